"""Packed sequences joined into what the model takes, and their digests."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch

from flame.data.pack import IGNORE_INDEX, Sequence
from flame.host_copy import send_and_remember


@dataclass
class Batch:
    """One microbatch of one rank, on the CPU.

    Attributes:
        input_ids: int64 [rows, T].
        labels: int64 [rows, T], the target of each input, -100 where there is none; not to be shifted again.
        cu_seqlens: int32 [pieces + 1] with varlen (rows is 1, T = batch_size * seq_len), else None (rows is batch_size,
            T = seq_len).
        numbers: global number of each sequence.
        digests: SHA-256 of each sequence, when asked for.
        copy: the same on a device, or on its way there; ``copied`` is recorded behind it.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    cu_seqlens: torch.Tensor | None = None
    numbers: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    copy: Batch | None = None
    copied: torch.cuda.Event | None = None

    @property
    def num_valid(self) -> int:
        """Number of targets that count in the loss."""
        return int((self.labels != IGNORE_INDEX).sum())

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; from page-locked memory the host does not wait for the copy."""
        if self.copy is not None and self.copy.input_ids.device == device:
            return self._take_copy()
        cu_seqlens = None if self.cu_seqlens is None else send_and_remember(self.cu_seqlens, device)
        input_ids, labels = (each.to(device, non_blocking=True) for each in (self.input_ids, self.labels))
        return Batch(input_ids, labels, cu_seqlens, self.numbers, self.digests)

    def _take_copy(self) -> Batch:
        """The copy that is on its way; the current stream waits for it, and its memory for the current stream."""
        copy, stream = self.copy, torch.cuda.current_stream(self.copy.input_ids.device)
        stream.wait_event(self.copied)
        for tensor in (copy.input_ids, copy.labels, copy.cu_seqlens):
            if tensor is not None:
                tensor.record_stream(stream)
        return copy

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory."""
        cu_seqlens = None if self.cu_seqlens is None else self.cu_seqlens.pin_memory()
        return Batch(self.input_ids.pin_memory(), self.labels.pin_memory(), cu_seqlens, self.numbers, self.digests)


def join_sequences(sequences: list[Sequence], numbers: list[int], varlen: bool, with_digests: bool) -> Batch:
    """Join the sequences of one microbatch: end to end in one row with varlen, else a row each."""
    input_ids = torch.from_numpy(np.stack([sequence.input_ids for sequence in sequences]).astype(np.int64))  # [B, T]
    labels = torch.from_numpy(np.stack([sequence.labels for sequence in sequences]).astype(np.int64))  # [B, T]
    digests = [sequence_digest(sequence) for sequence in sequences] if with_digests else []
    if not varlen:
        return Batch(input_ids, labels, None, numbers, digests)
    cu_seqlens = join_cu_seqlens([sequence.cu_seqlens for sequence in sequences])
    return Batch(input_ids.view(1, -1), labels.view(1, -1), torch.from_numpy(cu_seqlens), numbers, digests)


def join_cu_seqlens(parts: list[np.ndarray]) -> np.ndarray:
    """Boundaries of sequences laid end to end, int32, from those of each."""
    joined, end = [np.zeros(1, dtype=np.int32)], 0
    for part in parts:
        joined.append(part[1:] + np.int32(end))
        end += int(part[-1])
    return np.concatenate(joined)


def sequence_digest(sequence: Sequence) -> bytes:
    """SHA-256 over a sequence's input_ids, cu_seqlens and labels, as little-endian int32."""
    digest = hashlib.sha256()
    for array in (sequence.input_ids, sequence.cu_seqlens, sequence.labels):
        digest.update(array.astype("<i4", copy=False).tobytes())
    return digest.digest()


def combine_digests(digests: dict[int, bytes]) -> str:
    """One hash for a global step, from the digests of its sequences on all ranks by global number."""
    return hashlib.sha256(b"".join(digests[number] for number in sorted(digests))).hexdigest()
