"""Batches as text: the pieces of each packed sequence, where documents end, and which targets are masked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flame.data.batch import Batch
from flame.data.pack import IGNORE_INDEX

MASKED = "[masked]"
LEGEND = f"{MASKED}: the token before it has no target (-100), because its document ends there"


@dataclass
class SequenceView:
    """One packed sequence of a batch.

    Attributes:
        number: its global number.
        input_ids: int64 [seq_len].
        labels: int64 [seq_len].
        boundaries: ends of its pieces, from 0 to seq_len.
    """

    number: int
    input_ids: np.ndarray
    labels: np.ndarray
    boundaries: list[int]

    @property
    def masked(self) -> np.ndarray:
        """Whether each input lacks a target, bool [seq_len]."""
        return self.labels == IGNORE_INDEX

    @property
    def num_documents(self) -> int:
        """Documents that the sequence holds tokens of; padding is none."""
        masked = self.masked
        starts = [start for start, stop in self.pieces() if not masked[start:stop].all() or stop - start == 1]
        return sum(start == 0 or bool(masked[start - 1]) for start in starts)

    def pieces(self) -> list[tuple[int, int]]:
        """Start and end of each piece."""
        return list(zip(self.boundaries, self.boundaries[1:], strict=False))


def split_sequences(batch: Batch) -> Iterator[SequenceView]:
    """The packed sequences of a batch, one by one."""
    num_sequences = len(batch.numbers)
    rows = zip(
        batch.numbers,
        batch.input_ids.numpy().reshape(num_sequences, -1),
        batch.labels.numpy().reshape(num_sequences, -1),
        strict=True,
    )
    for place, (number, input_ids, labels) in enumerate(rows):
        if batch.cu_seqlens is None:
            boundaries = _cut_after_masked(labels)
        else:
            start, stop = place * len(input_ids), (place + 1) * len(input_ids)
            boundaries = [end - start for end in batch.cu_seqlens.tolist() if start <= end <= stop]
        yield SequenceView(number, input_ids, labels, boundaries)


def _cut_after_masked(labels: np.ndarray) -> list[int]:
    """Document boundaries of a sequence that came without: every document's last token has no target."""
    masked = labels == IGNORE_INDEX
    if masked.all():  # nothing but padding
        return [0, len(labels)]
    num_masked = int(np.argmin(masked[::-1]))
    end = len(labels) - max(0, num_masked - 1)  # of several masked tokens at the end the first closes a document
    ends = (np.flatnonzero(masked[:end]) + 1).tolist()
    return sorted({0, *ends, len(labels)})


def show_sequence(view: SequenceView, rank: int, tokenizer, max_chars: int) -> Iterator[str]:
    """Lines that describe a sequence: its counts, then one line for each piece."""
    masked = view.masked
    yield (
        f"  sequence {view.number} (rank {rank}): tokens {len(view.input_ids)}, documents {view.num_documents}, "
        f"masked targets {int(masked.sum())}"
    )
    width = len(str(len(view.input_ids)))
    for start, stop in view.pieces():
        yield (
            f"    {start:{width}}-{stop:{width}} {_describe_ends(view, start, stop):23} "
            f"{_excerpt(view, start, stop, tokenizer, max_chars)}"
        )


def _describe_ends(view: SequenceView, start: int, stop: int) -> str:
    masked = view.masked
    if stop - start > 1 and masked[start:stop].all():
        return "padding"
    begins = "continues, " if start and not masked[start - 1] else ""
    return begins + ("ends" if masked[stop - 1] else "goes on")


def _excerpt(view: SequenceView, start: int, stop: int, tokenizer, max_chars: int) -> str:
    """The text of a piece, its middle left out when it is long, in quotes so that line ends show."""
    ids = view.input_ids[start:stop]
    mark = MASKED if view.masked[stop - 1] else ""
    if len(ids) <= 2 * max_chars:
        text = tokenizer.decode(ids.tolist())
        if len(text) <= max_chars:
            return _quote(text) + mark
        head = tail = text
    else:  # decoding a whole long document would take longer than making it
        head, tail = (tokenizer.decode(part.tolist()) for part in (ids[:max_chars], ids[-max_chars:]))
    half = max(1, max_chars // 2)
    return f"{_quote(head[:half])} ... {_quote(tail[-half:])}{mark}"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
