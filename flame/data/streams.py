"""The logical streams: each walks its own documents; together they read ahead and tokenise in batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flame.data.order import RowOrder
from flame.data.pack import Document, Sequence, StreamBuffer, pack_sequence
from flame.data.rows import find_fault, read_rows
from flame.data.sources import Source
from flame.data.state import StreamState
from flame.data.tokenize import DocumentEncoder
from flame.errors import UserError

# A batch this large keeps the tokenizer at full speed, and small enough that its output stays in the processor's cache
# and no sequence waits long for its neighbours' documents.
TOKENS_PER_BATCH = 65_536
ROWS_PER_BATCH = 1_000


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

    def position(self, stream: int, source: int, cursor: int) -> int | None:
        """Virtual position of a stream's document number ``cursor`` of a source, None beyond the last epoch."""
        position = stream + cursor * self.num_streams
        if self.max_epochs and position >= self.max_epochs * len(self.sources[source]):
            return None
        return position

    def is_finished(self, stream: int, state: StreamState) -> bool:
        """Whether the stream has used all its documents of the last epoch."""
        return self.position(stream, 0, state.cursors[0]) is None


@dataclass
class _Stream:
    number: int
    buffer: StreamBuffer
    read_cursors: list[int]  # per source, the next document to read; ahead of the state's cursors


@dataclass
class _Request:
    stream: _Stream
    source: int
    position: int


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

    def __iter__(self) -> Iterator[Sequence]:
        """Yield without end, or until every stream has come to the end of the last epoch and left the round."""
        plan = self.plan
        while self.streams:
            for stream in list(self.streams):
                self._fill(stream, plan.seq_len)
                sequence = pack_sequence(stream.buffer, plan.seq_len, plan.context_len, plan.encoder.pad_id)
                if plan.max_epochs and not self._fill(stream, 1):
                    while stream.buffer.documents:
                        stream.buffer.finish_document()  # documents without tokens, up to the last
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
        max_rows = min(ROWS_PER_BATCH, math.ceil(TOKENS_PER_BATCH / mean_tokens)) if self.num_documents else 1
        turn = self.streams.index(first)
        for stream in self.streams[turn:] + self.streams[:turn]:
            missing = self.plan.seq_len - stream.buffer.num_tokens
            if missing <= 0 and stream is not first:
                continue
            num_rows = min(max(1, math.ceil(missing / mean_tokens)), max_rows - len(requests))
            requests += self._draw(stream, num_rows)
            if not requests or len(requests) >= max_rows:
                break
        return requests

    def _draw(self, stream: _Stream, count: int) -> list[_Request]:
        """The stream's next ``count`` documents, fewer at the end of the last epoch."""
        requests = []
        for _ in range(count):
            source = 0
            position = self.plan.position(stream.number, source, stream.read_cursors[source])
            if position is None:
                break
            stream.read_cursors[source] += 1
            requests.append(_Request(stream, source, position))
        return requests

    def _read_batch(self, requests: list[_Request]) -> None:
        documents: list[Document | None] = [None] * len(requests)
        for source in {request.source for request in requests}:
            places = [place for place, request in enumerate(requests) if request.source == source]
            positions = np.array([requests[place].position for place in places], dtype=np.int64)
            rows = self.plan.orders[source].rows(positions).tolist()
            for place, document in zip(places, read_documents(self.plan, source, rows), strict=True):
                documents[place] = document
        for request, document in zip(requests, documents, strict=True):
            request.stream.buffer.push(document)
            self.num_documents += 1
            self.num_tokens += len(document.tokens)


def read_documents(plan: DataPlan, source_index: int, rows: list[int]) -> list[Document]:
    """Read and tokenise rows of one source.

    Raises:
        UserError: a row cannot be read, or holds no text and ``plan.skip_bad_rows`` is off; it names source, row and
            column.
    """
    source, encoder = plan.sources[source_index], plan.encoder
    values = read_rows(source, rows)
    faults = [find_fault(value, source.is_tokenized, encoder.vocab_size) for value in values]
    for row, fault in zip(rows, faults, strict=True):
        if fault and not plan.skip_bad_rows:
            raise UserError(
                f"{source.name}: row {row} (counted from 0), column {source.column}: {fault}; "
                "mend the row, or leave such rows out with --training.on_bad_row skip"
            )
    good = [value for value, fault in zip(values, faults, strict=True) if not fault]
    encoded = iter(encoder.encode_ids(good) if source.is_tokenized else encoder.encode_texts(good))
    empty = np.empty(0, dtype=encoder.dtype)
    return [Document(empty if fault else next(encoded), source_index, bool(fault)) for fault in faults]
