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
        is_empty: the stream had no token for this sequence either.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    cu_seqlens: np.ndarray
    state: list[int]
    is_last: bool = False
    is_empty: bool = False


@dataclass
class Block:
    """Consecutive documents of one stream that were read together, and how far they are used."""

    documents: Documents
    sources: list[int]  # the source of each document
    cursors: list[int]  # the stream's cursor in that source behind each document
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
        if last > first:
            # Of each source the last cursor counts: a dict keeps that one, and is quicker than a loop.
            for source, cursor in dict(zip(self.sources[first:last], self.cursors[first:last], strict=True)).items():
                state.cursors[source] = cursor
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

    def push(self, documents: Documents, sources: list[int], cursors: list[int]) -> None:
        """Queue the stream's next documents; the first ones after a resume have tokens that were used before."""
        self.num_tokens += len(documents.tokens)
        if not self.blocks and len(documents):
            self.state.offset = min(self.state.offset, documents.ends[0])  # less than saved only in changed data
            self.num_tokens -= self.state.offset
        self.blocks.append(Block(documents, sources, cursors))

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
    input_ids = np.full(seq_len, pad_id, dtype=np.int32)
    ends: list[int] = []  # where documents end in the sequence
    while filled < seq_len and buffer.blocks:
        block = buffer.blocks[0]
        tokens = block.documents.tokens
        start = block.document_start + state.offset
        stop = min(start + seq_len - filled, len(tokens))
        input_ids[filled : filled + stop - start] = tokens[start:stop]
        ends += [end - start + filled for end in block.finish_before(stop, state)]
        filled += stop - start
        if block.num_finished == len(block.documents):
            buffer.blocks.popleft()
        elif stop > block.document_start:
            state.offset = stop - block.document_start
            following = tokens[stop]
    buffer.num_tokens -= filled
    labels = np.empty_like(input_ids)
    labels[:-1] = input_ids[1:]
    labels[-1] = following
    labels[filled:] = IGNORE_INDEX
    labels[[end - 1 for end in ends if end]] = IGNORE_INDEX  # an empty document in front ends at 0
    boundaries = cut_pieces([*ends, seq_len], context_len)
    return Sequence(input_ids, labels, np.array(boundaries, dtype=np.int32), state.to_list())


def cut_pieces(document_ends: list[int], context_len: int) -> list[int]:
    """Boundaries of pieces of at most ``context_len`` tokens between ascending ``document_ends``, from 0 on."""
    boundaries, start = [0], 0
    for end in document_ends:
        if end - start > context_len:
            boundaries += range(start + context_len, end, context_len)
        if end > start:  # empty documents end where the one before them does
            boundaries.append(end)
            start = end
    return boundaries
