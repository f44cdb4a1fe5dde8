"""Documents to packed sequences: inputs, shifted targets and known document boundaries."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from flame.data.state import StreamState

IGNORE_INDEX = -100


@dataclass
class Document:
    """One document drawn from a source; an empty or skipped one has no tokens but still counts as drawn."""

    tokens: np.ndarray  # [length]
    source: int
    skipped: bool = False


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
class StreamBuffer:
    """The documents of one stream that have been read but not used up.

    ``state`` is the position of the next unused token; the first queued document is the one it points into.
    """

    state: StreamState
    documents: deque[Document] = field(default_factory=deque)
    num_tokens: int = 0  # unused tokens in the queue

    def push(self, document: Document) -> None:
        """Queue the stream's next document; the first one after a resume has tokens that were used before."""
        used = self.state.offset if not self.documents else 0
        self.num_tokens += max(len(document.tokens) - used, 0)
        self.documents.append(document)

    def finish_document(self) -> None:
        """Leave the first queued document behind."""
        document = self.documents.popleft()
        self.state.finish_document(document.source, document.skipped)


def pack_sequence(buffer: StreamBuffer, seq_len: int, context_len: int, pad_id: int = 0) -> Sequence:
    """Cut the next sequence off a stream that holds at least ``seq_len`` unused tokens, or all that it will ever hold.

    Each document goes in as pieces of at most ``context_len`` tokens; what does not fit goes on in the next sequence.
    Whole documents are queued, so the true target of a piece's last input is always at hand. A stream that runs out
    fills its sequence up with ``pad_id``, without targets.
    """
    parts, ends, boundaries = [], [], [0]
    state, filled = buffer.state, 0
    while filled < seq_len and buffer.documents:
        tokens, offset = buffer.documents[0].tokens, state.offset
        length = len(tokens)
        if offset < length:
            taken = min(length - offset, seq_len - filled)
            _cut(boundaries, taken, context_len)
            parts.append(tokens[offset : offset + taken])
            filled += taken
            offset = state.offset = offset + taken
            if offset == length:
                ends.append(filled - 1)
        if offset >= length:
            buffer.finish_document()
        else:
            following = tokens[offset]
    buffer.num_tokens -= filled
    if filled < seq_len:
        _cut(boundaries, seq_len - filled, context_len)
        parts.append(np.full(seq_len - filled, pad_id))
        ends.extend(range(filled, seq_len))
    input_ids = np.concatenate(parts).astype(np.int32)  # [seq_len]
    labels = np.empty_like(input_ids)
    labels[:-1] = input_ids[1:]
    if not ends or ends[-1] != seq_len - 1:
        labels[-1] = following
    labels[ends] = IGNORE_INDEX
    return Sequence(input_ids, labels, np.array(boundaries, dtype=np.int32), state.to_list())


def _cut(boundaries: list[int], length: int, context_len: int) -> None:
    """Append the ends of the pieces of the next ``length`` tokens."""
    start = boundaries[-1]
    if length > context_len:
        boundaries.extend(range(start + context_len, start + length, context_len))
    boundaries.append(start + length)
