"""Documents to packed sequences: inputs, shifted targets and known document boundaries."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from flame.data.documents import Documents
from flame.data.state import StreamState

IGNORE_INDEX = -100


@dataclass
class Sequence:
    """``seq_len`` tokens of one stream, and the stream's state behind them.

    Attributes:
        input_ids: int32 [seq_len].
        labels: int32 [seq_len], the token that follows each input in its document, IGNORE_INDEX after the last one.
        cu_seqlens: int32 [pieces + 1], from 0 to seq_len, strictly increasing.
        state: the stream's state once this sequence is consumed, for ``StreamState.from_list``.
        is_last: the stream has no token after this sequence (only with ``training.max_epochs``).
    """

    input_ids: np.ndarray
    labels: np.ndarray
    cu_seqlens: np.ndarray
    state: list[int]
    is_last: bool = False


@dataclass
class Block:
    """Consecutive documents of one stream that were read together, and how far they are used."""

    documents: Documents
    sources: list[int]  # the source of each document
    num_finished: int = 0

    @property
    def document_start(self) -> int:
        """Where the first unfinished document starts in the block's tokens."""
        return self.documents.ends[self.num_finished - 1] if self.num_finished else 0

    def finish_before(self, stop: int, state: StreamState) -> list[int]:
        """Leave the documents behind whose tokens are used up at token ``stop``; returns where they end.

        Empty documents at ``stop`` itself stay: whether any have been read yet must not show in the state.
        """
        ends, first = self.documents.ends, self.num_finished
        last = bisect_left(ends, stop, first)
        if last < len(ends) and ends[last] == stop:
            last += 1
        for source in self.sources[first:last]:
            state.cursors[source] += 1
        if last > first:
            state.draws += last - first
            state.offset = 0
            state.skipped += sum(first <= place < last for place in self.documents.skipped)
        self.num_finished = last
        return ends[first:last]


@dataclass
class StreamBuffer:
    """The documents of one stream that have been read but not used up.

    ``state`` is the position of the next unused token; the first unfinished document is the one it points into.
    """

    state: StreamState
    blocks: deque[Block] = field(default_factory=deque)
    num_tokens: int = 0  # unused tokens in the blocks

    def push(self, documents: Documents, sources: list[int]) -> None:
        """Queue the stream's next documents; the first ones after a resume have tokens that were used before."""
        self.num_tokens += len(documents.tokens)
        if not self.blocks and len(documents):
            self.state.offset = min(self.state.offset, documents.ends[0])  # less than saved only in changed data
            self.num_tokens -= self.state.offset
        self.blocks.append(Block(documents, sources))

    def finish_all(self) -> None:
        """Leave all documents behind; none has an unused token."""
        for block in self.blocks:
            while block.num_finished < len(block.documents):
                block.finish_before(len(block.documents.tokens), self.state)
        self.blocks.clear()


def pack_sequence(buffer: StreamBuffer, seq_len: int, context_len: int, pad_id: int = 0) -> Sequence:
    """Cut the next sequence off a stream that holds at least ``seq_len`` unused tokens, or all that it will ever hold.

    Each document goes in as pieces of at most ``context_len`` tokens; what does not fit goes on in the next sequence.
    Whole documents are queued, so the true target of a piece's last input is always at hand. A stream that runs out
    fills its sequence up with ``pad_id``, without targets.
    """
    state, filled, following = buffer.state, 0, IGNORE_INDEX
    parts: list[np.ndarray] = []
    ends: list[int] = []  # where documents end in the sequence
    while filled < seq_len and buffer.blocks:
        block = buffer.blocks[0]
        tokens = block.documents.tokens
        start = block.document_start + state.offset
        stop = min(start + seq_len - filled, len(tokens))
        parts.append(tokens[start:stop])
        ends += [end - start + filled for end in block.finish_before(stop, state)]
        filled += stop - start
        if block.num_finished == len(block.documents):
            buffer.blocks.popleft()
        elif stop > block.document_start:
            state.offset = stop - block.document_start
            following = tokens[stop]
    buffer.num_tokens -= filled
    if filled < seq_len:
        parts.append(np.full(seq_len - filled, pad_id))
    input_ids = np.concatenate(parts).astype(np.int32)  # [seq_len]
    labels = np.empty_like(input_ids)
    labels[:-1] = input_ids[1:]
    labels[-1] = following
    labels[filled:] = IGNORE_INDEX
    document_ends = np.array(ends, dtype=np.int32)
    document_ends = document_ends[document_ends > 0]  # an empty document in front ends where the sequence starts
    labels[document_ends - 1] = IGNORE_INDEX
    return Sequence(input_ids, labels, cut_pieces(document_ends, seq_len, context_len), state.to_list())


def cut_pieces(document_ends: np.ndarray, seq_len: int, context_len: int) -> np.ndarray:
    """Boundaries, int32, of the pieces of at most ``context_len`` tokens between ascending ``document_ends``."""
    boundaries = np.concatenate([[0], document_ends, [seq_len]]).astype(np.int32)
    lengths = np.diff(boundaries)
    if lengths.max() > context_len:
        inner = [
            np.arange(boundaries[place] + context_len, boundaries[place + 1], context_len)
            for place in np.flatnonzero(lengths > context_len)
        ]
        boundaries = np.sort(np.concatenate([boundaries, *inner])).astype(np.int32)
        lengths = np.diff(boundaries)
    return boundaries[np.concatenate([[True], lengths > 0])]  # empty documents end where the one before them does
