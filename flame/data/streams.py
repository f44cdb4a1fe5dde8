"""The logical streams: each walks its own documents; together they read ahead and tokenise in batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from flame.data.mixture import Mixture
from flame.data.order import RowOrder
from flame.data.pack import Sequence, StreamBuffer, pack_sequence
from flame.data.read_ahead import ReadAhead, Request
from flame.data.shard_order import ShardOrder
from flame.data.shard_walk import ShardWalk
from flame.data.shards import ShardedSource
from flame.data.sources import Source
from flame.data.state import StreamState
from flame.data.tokenize import DocumentEncoder
from flame.data.walks import RowWalk, Walk
from flame.errors import UserError

# A batch this large keeps the tokenizer at full speed, and small enough that its output stays in the processor's cache
# and no sequence waits long for its neighbours' documents.
TOKENS_PER_BATCH = 65_536
ROWS_PER_BATCH = 1_000
MAX_GROWTH = 4
BATCHES_AHEAD = 2  # one that the tokenizer has in hand, and one for it to go on with at once
FRUITLESS_PASSES = 20
STREAMS_PER_LOOK = 64
NO_END = 1 << 62


@dataclass
class DataPlan:
    """Everything that decides which tokens a sequence holds; nothing in it knows of ranks or workers.

    Attributes:
        sources: where rows come from.
        orders: for each source, which of its rows a stream gets, and when.
        encoder: rows to token ids.
        num_streams: S, the number of streams that the rows are dealt to.
        seq_len: tokens in a sequence.
        context_len: most tokens of one piece.
        max_epochs: passes over each source, 0 for no end.
        skip_bad_rows: count rows without text instead of raising.
        mixture: which source each document of a stream comes from.
    """

    sources: list[Source | ShardedSource]
    orders: list[RowOrder | ShardOrder]
    encoder: DocumentEncoder
    num_streams: int
    seq_len: int
    context_len: int
    max_epochs: int = 0
    skip_bad_rows: bool = False
    mixture: Mixture = field(default_factory=lambda: Mixture([1.0], seed=0))

    def start_state(self, stream: int) -> StreamState:
        """The state of a stream that has not begun."""
        return StreamState([order.start(stream) for order in self.orders])

    def end_cursor(self, stream: int, source: int) -> int:
        """The stream's cursor behind the last document that it draws from a source in all its epochs."""
        if not self.max_epochs:
            return NO_END
        return self.orders[source].end(stream, self.max_epochs)

    def is_finished(self, stream: int, state: StreamState) -> bool:
        """Whether the stream has used all its documents of all sources."""
        return all(state.cursors[source] >= self.end_cursor(stream, source) for source in self.mixture.drawn)

    def open_walk(self, source: int, cursors: dict[int, int]) -> Walk:
        """A walk over a source from the given cursors of some streams."""
        ends = {stream: self.end_cursor(stream, source) for stream in cursors}
        order = self.orders[source]
        walk = ShardWalk if isinstance(order, ShardOrder) else RowWalk
        return walk(self.sources[source], order, cursors, ends)


@dataclass(eq=False)
class _Stream:
    number: int
    buffer: StreamBuffer
    draws: int  # the next draw of a source; ahead of the state's
    num_awaited: int = 0  # documents on their way
    is_drawn_up: bool = False  # there is no further document to read


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
            _Stream(number, StreamBuffer(StreamState.from_list(state.to_list())), state.draws)
            for number, state in zip(numbers, states, strict=True)
        ]
        starts = dict(zip(numbers, states, strict=True))
        self.walks = {
            source: plan.open_walk(source, {number: state.cursors[source] for number, state in starts.items()})
            for source in plan.mixture.drawn
        }
        self.ahead = ReadAhead(plan.sources, self.walks, plan.encoder, plan.skip_bad_rows)
        self.num_documents = 0
        self.num_tokens = 0
        self.fruitful_passes = 0.0  # passes over the sources up to the last document with tokens

    def __iter__(self) -> Iterator[Sequence]:
        """Yield without end, or until every stream has come to the end of the last epoch and left the round."""
        try:
            while self.streams:
                for stream in list(self.streams):
                    yield self._next_sequence(stream)
        finally:
            self.ahead.close()

    def has_empty_stream(self) -> bool:
        """Whether one of the streams has no token left; reads no more than it takes to know, and ends the reader.

        Rows without text, and shards without rows, show only when they are read.
        """
        starts = range(0, len(self.streams), STREAMS_PER_LOOK)
        try:
            return not all(self._have_tokens(self.streams[start : start + STREAMS_PER_LOOK]) for start in starts)
        finally:
            self.close()

    def close(self) -> None:
        """End the reader and wait for what it reads ahead: processes may be forked from this one afterwards."""
        self.ahead.close(wait=True)

    def _have_tokens(self, streams: list[_Stream]) -> bool:
        """Whether each of the streams comes to a token before its end."""
        while streams:
            requests = [self._draw(stream, 1) for stream in streams]
            if not all(request.items for request in requests):
                return False
            self.ahead.begin(requests)
            self._receive_batch()
            streams = [stream for stream in streams if not stream.buffer.num_tokens]
        return True

    def _next_sequence(self, stream: _Stream) -> Sequence:
        plan = self.plan
        self._fill(stream, plan.seq_len)
        is_empty = not stream.buffer.num_tokens
        sequence = pack_sequence(stream.buffer, plan.seq_len, plan.context_len, plan.encoder.pad_id)
        if plan.max_epochs and not self._fill(stream, 1):
            sequence.state, sequence.is_last = self._end(stream).to_list(), True
            sequence.is_empty = is_empty
            self.streams.remove(stream)
        return sequence

    def _fill(self, stream: _Stream, num_tokens: int) -> bool:
        """Read on until the stream holds ``num_tokens``; False when its documents end before that."""
        while stream.buffer.num_tokens < num_tokens:
            while len(self.ahead) < BATCHES_AHEAD and (requests := self._plan_batch(stream)):
                self.ahead.begin(requests)
            if stream.is_drawn_up and not stream.num_awaited:
                return False
            self._receive_batch()
        return True

    def _plan_batch(self, first: _Stream) -> list[Request]:
        """The documents to read now: what the stream ``first`` lacks, then what the next streams will lack."""
        requests: list[Request] = []
        mean_tokens = self.num_tokens / self.num_documents if self.num_tokens else self.plan.seq_len
        known = max(1, MAX_GROWTH * self.num_documents)  # a short first document says little about the others
        rows_left = min(ROWS_PER_BATCH, math.ceil(TOKENS_PER_BATCH / mean_tokens), known)
        # Few streams too must find room for all the batches on their way and one that has come.
        wanted = self.plan.seq_len + (BATCHES_AHEAD + 1) * TOKENS_PER_BATCH // len(self.streams)
        turn = self.streams.index(first)
        for stream in self.streams[turn:] + self.streams[:turn]:
            missing = wanted - stream.buffer.num_tokens - stream.num_awaited * mean_tokens
            if missing <= 0 or stream.is_drawn_up:
                continue
            request = self._draw(stream, min(math.ceil(missing / mean_tokens), rows_left))
            stream.is_drawn_up = not request.items
            if request.items:
                requests.append(request)
                rows_left -= len(request.items)
            if not rows_left:
                break
        return requests

    def _draw(self, stream: _Stream, count: int) -> Request:
        """The stream's next ``count`` documents, fewer only where they end."""
        request = Request(stream)
        while len(request.items) < count and self._extend(request, count - len(request.items)):
            pass
        stream.num_awaited += len(request.items)
        request.num_passes = min(walk.num_passes() for walk in self.walks.values())
        return request

    def _extend(self, request: Request, count: int) -> bool:
        """Add up to ``count`` documents, as far as none of the sources drawn has come to its end; False for none."""
        number, mixture, draw = request.stream.number, self.plan.mixture, request.stream.draws
        sources = self._up_to_an_end(number, mixture.choose(number, draw, count))
        if not sources:
            left = [source for source, walk in self.walks.items() if walk.available(number, 1)]
            if not left:
                return False
            sources = [mixture.choose_among(left, number, draw)]
        taken = {source: self.walks[source].take(number, sources.count(source)) for source in set(sources)}
        rows = {source: zip(*items_and_cursors, strict=True) for source, items_and_cursors in taken.items()}
        items, cursors = zip(*[next(rows[source]) for source in sources], strict=True)
        request.sources += sources
        request.items += items
        request.cursors += cursors
        request.stream.draws += len(sources)
        return True

    def _up_to_an_end(self, number: int, sources: list[int]) -> list[int]:
        """The first of the drawn ``sources``, up to one that has no document left for the stream."""
        for source in set(sources):
            wanted = sources.count(source)
            available = self.walks[source].available(number, wanted)
            if available < wanted:
                places = [place for place, drawn in enumerate(sources) if drawn == source]
                sources = sources[: places[available]]
        return sources

    def _end(self, stream: _Stream) -> StreamState:
        """The state of a stream behind its last document; those that it has not used up have no tokens."""
        stream.buffer.finish_all()
        state = stream.buffer.state
        for source, walk in self.walks.items():
            state.cursors[source] = walk.cursor(stream.number)
        return state

    def _receive_batch(self) -> None:
        """Hand the documents of the batch that was begun first to their streams."""
        requests, documents = self.ahead.finish()
        start = 0
        for request in requests:
            stop = start + len(request.items)
            request.stream.buffer.push(documents.select(start, stop), request.sources, request.cursors)
            request.stream.num_awaited -= len(request.items)
            start = stop
        self.num_documents += len(documents)
        self.num_tokens += len(documents.tokens)
        self._check_progress(requests[-1].num_passes, len(documents.tokens) > 0)

    def _check_progress(self, num_passes: float, is_fruitful: bool) -> None:
        """Raise when so many passes over all sources gave no token that there can be none."""
        if is_fruitful:
            self.fruitful_passes = num_passes
        elif num_passes > self.fruitful_passes + FRUITLESS_PASSES:
            names = ", ".join(source.name for source in self.plan.sources)
            if not self.num_tokens:
                raise UserError(f"--training.dataset {names}: no row holds any text")
            raise UserError(
                f"--training.dataset {names}: one of the {self.plan.num_streams} streams meets rows without text only, "
                "as can be when --training.shuffle is none and the rows are few, since each stream then meets the same "
                "ones in every epoch; leave out the empty rows, shuffle, or give another --training.num_streams"
            )
