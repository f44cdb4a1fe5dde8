"""The logical streams: each walks its own documents; together they read ahead and tokenise in batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flame.data.documents import Documents, interleave
from flame.data.order import RowOrder
from flame.data.pack import Sequence, StreamBuffer, pack_sequence
from flame.data.rows import read_rows
from flame.data.sources import Source
from flame.data.state import StreamState
from flame.data.tokenize import DocumentEncoder
from flame.errors import UserError

# A batch this large keeps the tokenizer at full speed, and small enough that its output stays in the processor's cache
# and no sequence waits long for its neighbours' documents.
TOKENS_PER_BATCH = 65_536
ROWS_PER_BATCH = 1_000
MAX_GROWTH = 4
FRUITLESS_PASSES = 20
NO_END = 1 << 62


@dataclass
class DataPlan:
    """Everything that decides which tokens a sequence holds; nothing in it knows of ranks or workers.

    Attributes:
        sources: where rows come from.
        orders: for each source, which row stands at a virtual position.
        encoder: rows to token ids.
        num_streams: S; stream s visits the virtual positions s, s + S, s + 2S, ... of a source.
        seq_len: tokens in a sequence.
        context_len: most tokens of one piece.
        max_epochs: passes over the data, 0 for no end.
        skip_bad_rows: count rows without text instead of raising.
    """

    sources: list[Source]
    orders: list[RowOrder]
    encoder: DocumentEncoder
    num_streams: int
    seq_len: int
    context_len: int
    max_epochs: int = 0
    skip_bad_rows: bool = False

    def num_documents(self, stream: int, source: int) -> int:
        """How many documents of a source the stream draws in all its epochs."""
        if not self.max_epochs:
            return NO_END
        return max(0, -(-(self.max_epochs * len(self.sources[source]) - stream) // self.num_streams))

    def is_finished(self, stream: int, state: StreamState) -> bool:
        """Whether the stream has used all its documents of the last epoch."""
        return state.cursors[0] >= self.num_documents(stream, 0)


@dataclass(eq=False)
class _Stream:
    number: int
    buffer: StreamBuffer
    read_cursors: list[int]  # per source, the next document to read; ahead of the state's cursors


@dataclass
class _Request:
    """Consecutive documents of one stream to read: the source of each, and its virtual position there."""

    stream: _Stream
    sources: np.ndarray  # int64 [documents]
    positions: np.ndarray  # int64 [documents]


class StreamReader:
    """Yields the sequences of some streams in turn: one of each, again and again.

    What a stream yields depends on its own documents alone, so how streams are dealt to readers, and how far a reader
    reads ahead, changes nothing.

    Args:
        plan: what the sequences hold.
        numbers: the streams of this reader in the order of their turns.
        states: their states, in the same order.
    """

    def __init__(self, plan: DataPlan, numbers: list[int], states: list[StreamState]):
        self.plan = plan
        self.streams = [
            _Stream(number, StreamBuffer(StreamState.from_list(state.to_list())), list(state.cursors))
            for number, state in zip(numbers, states, strict=True)
        ]
        self.num_documents = 0
        self.num_tokens = 0
        self.num_fruitless = 0  # documents without tokens since the last one with some

    def __iter__(self) -> Iterator[Sequence]:
        """Yield without end, or until every stream has come to the end of the last epoch and left the round."""
        plan = self.plan
        while self.streams:
            for stream in list(self.streams):
                self._fill(stream, plan.seq_len)
                sequence = pack_sequence(stream.buffer, plan.seq_len, plan.context_len, plan.encoder.pad_id)
                if plan.max_epochs and not self._fill(stream, 1):
                    stream.buffer.finish_all()  # documents without tokens, up to the last
                    sequence.state, sequence.is_last = stream.buffer.state.to_list(), True
                yield sequence
                if sequence.is_last:
                    self.streams.remove(stream)

    def _fill(self, stream: _Stream, num_tokens: int) -> bool:
        """Read ahead until the stream holds ``num_tokens``; False when its documents end before that."""
        while stream.buffer.num_tokens < num_tokens:
            requests = self._plan_batch(stream)
            if not requests:
                return False
            self._read_batch(requests)
        return True

    def _plan_batch(self, first: _Stream) -> list[_Request]:
        """The documents to read now: what the stream ``first`` lacks, then what the next streams will lack.

        None at all when ``first`` has come to the end of its documents.
        """
        requests: list[_Request] = []
        mean_tokens = self.num_tokens / self.num_documents if self.num_tokens else self.plan.seq_len
        known = max(1, MAX_GROWTH * self.num_documents)  # a short first document says little about the others
        rows_left = min(ROWS_PER_BATCH, math.ceil(TOKENS_PER_BATCH / mean_tokens), known)
        wanted = self.plan.seq_len + TOKENS_PER_BATCH // len(self.streams)  # so that few streams fill a batch too
        turn = self.streams.index(first)
        for stream in self.streams[turn:] + self.streams[:turn]:
            missing = wanted - stream.buffer.num_tokens
            if missing <= 0:
                continue
            request = self._draw(stream, min(math.ceil(missing / mean_tokens), rows_left))
            if len(request.positions):
                requests.append(request)
                rows_left -= len(request.positions)
            if not requests or not rows_left:
                break
        return requests

    def _draw(self, stream: _Stream, count: int) -> _Request:
        """The stream's next ``count`` documents, fewer at the end of the last epoch."""
        cursor = stream.read_cursors[0]
        count = min(count, self.plan.num_documents(stream.number, 0) - cursor)
        positions = stream.number + np.arange(cursor, cursor + count, dtype=np.int64) * self.plan.num_streams
        stream.read_cursors[0] += count
        return _Request(stream, np.zeros(count, dtype=np.int64), positions)

    def _read_batch(self, requests: list[_Request]) -> None:
        sources = np.concatenate([request.sources for request in requests])
        positions = np.concatenate([request.positions for request in requests])
        documents = read_documents(self.plan, sources, positions)
        start = 0
        for request in requests:
            stop = start + len(request.positions)
            request.stream.buffer.push(documents.select(start, stop), request.sources.tolist())
            start = stop
        self.num_documents += len(documents)
        self.num_tokens += len(documents.tokens)
        self._check_progress(documents)

    def _check_progress(self, documents: Documents) -> None:
        """Raise when so many documents in a row had no token that there can be none that has."""
        self.num_fruitless = 0 if len(documents.tokens) else self.num_fruitless + len(documents)
        if self.num_fruitless > FRUITLESS_PASSES * sum(map(len, self.plan.sources)):
            names = ", ".join(source.name for source in self.plan.sources)
            raise UserError(f"--training.dataset {names}: no row holds any text")


def read_documents(plan: DataPlan, sources: np.ndarray, positions: np.ndarray) -> Documents:
    """Read and tokenise the documents at virtual ``positions`` of their ``sources``, both int64 [n].

    Raises:
        UserError: a row cannot be read, or holds no text and ``plan.skip_bad_rows`` is off; it names source, row and
            column.
    """
    parts, places = [], []
    for source in np.unique(sources).tolist():
        places.append(np.flatnonzero(sources == source))
        rows = plan.orders[source].rows(positions[places[-1]]).tolist()
        parts.append(read_rows(plan.sources[source], rows, plan.encoder, plan.skip_bad_rows))
    return interleave(parts, places)
