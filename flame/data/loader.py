"""One rank's share of the global order, as batches with a state that can be saved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from flame.data.batch import Batch, join_sequences
from flame.data.fingerprint import plan_fingerprint
from flame.data.mismatch import START_ANEW, check_fingerprint, check_positions
from flame.data.mixture import Mixture
from flame.data.order import RowOrder
from flame.data.pack import Sequence, StreamBuffer, pack_sequence
from flame.data.shard_order import ShardOrder
from flame.data.shards import ShardedSource
from flame.data.sources import Source, open_sources
from flame.data.state import STATE_VERSION, StreamState
from flame.data.streams import DataPlan, StreamReader
from flame.data.tokenize import DocumentEncoder
from flame.data.workers import SequencePool
from flame.errors import UserError
from flame.parallel.degrees import check_data_ranks

DEFAULT_BATCH_SIZE = 8


class DataLoader:
    """Batches of the global sequences i with ``i % dp_size == dp_rank``; sequence i comes from stream ``i % S``.

    With ``training.max_epochs`` the streams come to their ends at different times. From the first round in which one
    has ended, the round passes over those that have, and every rank makes the sequences of all streams and keeps its
    own: the order stays what it is for one rank, and no token is lost. What the last step lacks is padding.

    Args:
        plan: what the sequences hold.
        fingerprint: what identifies it, as plain data.
        training: the job's ``[training]`` section.
        dp_rank, dp_size: this rank's place among the data-parallel ranks.
        gather: gives every rank's plain value on every rank; used with ``training.max_epochs``, by all ranks at the
            same steps.

    Raises:
        UserError: ``dp_size`` does not divide the number of streams.
    """

    def __init__(
        self,
        plan: DataPlan,
        fingerprint: dict,
        training,
        dp_rank: int = 0,
        dp_size: int = 1,
        gather: Callable[[object], list] | None = None,
    ):
        check_data_ranks(plan.num_streams, dp_size)
        assert gather or dp_size == 1 or not plan.max_epochs, "several ranks must agree on when the data ends"
        self.plan = plan
        self.fingerprint = fingerprint
        self.training = training
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.gather = gather or (lambda value: [value])
        self.batch_size = training.batch_size or (1 if training.varlen else DEFAULT_BATCH_SIZE)
        self.num_sequences = 0  # of all ranks, consumed
        self.turn = 0  # the stream that the next sequence comes from
        self.is_draining = False  # streams have ended; this rank makes the sequences of all that go on
        self.knows_ends = False  # a stream that is not finished has a token left; sequences tell it from the first on
        self.own_streams = range(dp_rank, plan.num_streams, dp_size)
        self.states = {number: plan.start_state(number) for number in self.own_streams}
        self.pool: SequencePool | None = None

    def next_step(self) -> list[Batch]:
        """The microbatches of the next training step, ``gradient_accumulation_steps`` of them, on the CPU.

        Raises:
            StopIteration: ``training.max_epochs`` is reached, on every rank at the same step.
            UserError: a row is bad.
        """
        num_own = self.training.gradient_accumulation_steps * self.batch_size
        start, end = self.num_sequences, self.num_sequences + num_own * self.dp_size
        sequences: dict[int, Sequence] = {}
        while start < end:
            self._drain_when_a_stream_ends(start)
            if self.is_draining:
                num_left = self._take_drained(start, end, sequences)
                if start == self.num_sequences and num_left == end - start:
                    self._check_not_empty()
                    raise StopIteration
                break
            stop = min(end, start - start % self.plan.num_streams + self.plan.num_streams)
            self._take_own(start, stop, sequences)
            start = stop
        self.num_sequences = end
        numbers = self._own_numbers(end - num_own * self.dp_size, end)
        return join_batches(self.plan, self.training, self.batch_size, numbers, sequences)

    def state_dict(self) -> dict:
        """This rank's streams as of the last step handed out, for ``merge_state_dicts``."""
        return {
            "version": STATE_VERSION,
            "num_sequences": self.num_sequences,
            "num_streams": self.plan.num_streams,
            "turn": self.turn,
            "is_draining": self.is_draining,
            "max_epochs": self.plan.max_epochs,
            "sources": self._source_names(),
            "fingerprint": self.fingerprint,
            "streams": {str(number): state.to_list() for number, state in self.states.items()},
        }

    def snapshot(self) -> DataLoader:
        """This position of the loader, for ``state_dict`` and the counts, not to be stepped; the loader may go on."""
        snapshot = copy.copy(self)
        snapshot.pool, snapshot.states = None, dict(self.states)
        return snapshot

    def load_state_dict(self, merged: dict) -> None:
        """Go on from what ``merge_state_dicts`` made, at any number of ranks and workers.

        Raises:
            UserError: the state belongs to other data, another tokenizer, seed or packing.
        """
        if merged["version"] != STATE_VERSION:
            raise UserError(
                f"the checkpoint's data state has version {merged['version']}, not {STATE_VERSION}; {START_ANEW}"
            )
        check_positions(merged, self.plan, self._source_names())
        if not self.training.ignore_data_fingerprint:
            check_fingerprint(merged["fingerprint"], self.fingerprint, merged["sources"], self._source_names())
        self.close()
        self.num_sequences, self.turn = merged["num_sequences"], merged["turn"]
        self.is_draining = merged["is_draining"]
        is_same = merged["max_epochs"] == self.plan.max_epochs and merged["fingerprint"] == self.fingerprint
        self.knows_ends = is_same and self.num_sequences > 0
        numbers = range(self.plan.num_streams) if self.is_draining else self.own_streams
        self.states = {number: StreamState.from_list(merged["streams"][number]) for number in numbers}

    def epochs(self) -> dict[str, float]:
        """Passes over each source so far, judged by this rank's streams."""
        epochs = {}
        for index, (source, order) in enumerate(zip(self.plan.sources, self.plan.orders, strict=True)):
            cursors = {number: self.states[number].cursors[index] for number in self.own_streams}
            epochs[source.name] = order.epochs(cursors)
        return epochs

    @property
    def num_skipped_rows(self) -> int:
        """Bad rows left out so far by this rank's streams."""
        return sum(state.skipped for state in self._own_states())

    def dead_workers(self) -> str:
        """What became of workers that died, and what helps; empty when none has."""
        return self.pool.dead_workers() if self.pool is not None else ""

    def close(self) -> None:
        """End the workers; the next step starts them anew."""
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    def _source_names(self) -> list[str]:
        return [source.name for source in self.plan.sources]

    def _own_states(self) -> list[StreamState]:
        return [self.states[number] for number in self.own_streams]

    def _own_numbers(self, start: int, stop: int) -> range:
        """This rank's global sequences from ``start`` to ``stop``, which is left out."""
        return range(start + (self.dp_rank - start) % self.dp_size, stop, self.dp_size)

    def _take_own(self, start: int, stop: int, sequences: dict[int, Sequence]) -> None:
        """Add this rank's sequences from ``start`` to ``stop``; no stream ends before its turn in them."""
        if self.pool is None:
            first = self._own_numbers(start, start + self.dp_size)[0]
            num_streams = self.plan.num_streams
            self.pool = self._open_pool([n % num_streams for n in range(first, first + num_streams, self.dp_size)])
        for number in self._own_numbers(start, stop):
            sequences[number] = self.pool.next_sequence()
            self.states[number % self.plan.num_streams] = StreamState.from_list(sequences[number].state)
        self.turn = stop % self.plan.num_streams

    def _drain_when_a_stream_ends(self, start: int) -> None:
        """At the start of a round, find out whether any rank has a stream that ended; then take all streams over."""
        is_round = start % self.plan.num_streams == 0
        if not self.plan.max_epochs or self.is_draining or (self.knows_ends and not is_round):
            return
        own = {number: self.states[number] for number in self.own_streams}
        has_ended = any(self.plan.is_finished(number, state) for number, state in own.items())
        if not self.knows_ends and not has_ended:
            has_ended = StreamReader(self.plan, list(own), list(own.values())).has_empty_stream()
        self.knows_ends = True
        if any(self.gather(has_ended)):
            self.close()
            self.states = {number: state for part in self.gather(self.states) for number, state in part.items()}
            self.is_draining = True

    def _take_drained(self, start: int, stop: int, sequences: dict[int, Sequence]) -> int:
        """Make all ranks' sequences from ``start`` to ``stop`` and add this rank's; the number that there were not."""
        if self.pool is None:
            order = [*range(self.turn, self.plan.num_streams), *range(self.turn)]
            self.pool = self._open_pool([n for n in order if not self.plan.is_finished(n, self.states[n])])
        number = start
        while number < stop:
            stream = self.pool.next_stream
            if stream is None:
                return stop - number
            sequence = self.pool.next_sequence()
            self.states[stream] = StreamState.from_list(sequence.state)
            if sequence.is_empty:
                continue
            if number % self.dp_size == self.dp_rank:
                sequences[number] = sequence
            number += 1
        self.turn = self.pool.next_stream or 0
        return 0

    def _check_not_empty(self) -> None:
        """Raises UserError when the data has ended without a single sequence."""
        if not self.num_sequences:
            raise UserError(f"--training.dataset {', '.join(self._source_names())}: no row holds any text")

    def _open_pool(self, numbers: list[int]) -> SequencePool:
        return SequencePool(
            self.plan,
            numbers,
            [self.states[number] for number in numbers],
            self.training.num_workers,
            prefetch=self.training.prefetch_factor * self.batch_size,
            persistent=self.training.persistent_workers,
        )


def make_order(source: Source | ShardedSource, index: int, training) -> RowOrder | ShardOrder:
    """The order of the rows of the job's source number ``index``."""
    options = {"seed": training.seed, "source_index": index, "shuffle": training.shuffle}
    if isinstance(source, ShardedSource):
        return ShardOrder(source.num_shards, num_streams=training.num_streams, **options)
    return RowOrder(len(source), num_streams=training.num_streams, **options)


def make_plan(sources: list[Source | ShardedSource], tokenizer, training) -> DataPlan:
    """What the sequences from some sources hold, by the options of the ``[training]`` section."""
    return DataPlan(
        sources=sources,
        orders=[make_order(source, index, training) for index, source in enumerate(sources)],
        encoder=DocumentEncoder(tokenizer, training.add_bos, training.add_eos),
        num_streams=training.num_streams,
        seq_len=training.seq_len,
        context_len=min(training.context_len, training.seq_len) if training.varlen else training.seq_len,
        max_epochs=training.max_epochs,
        skip_bad_rows=training.on_bad_row == "skip",
        mixture=Mixture(training.data_probs or [1.0] * len(sources), training.seed),
    )


def join_batches(
    plan: DataPlan, training, batch_size: int, numbers: range, sequences: dict[int, Sequence]
) -> list[Batch]:
    """The sequences of the given numbers in micro-batches of ``batch_size``; those that lack are padding."""
    starts = range(0, len(numbers), batch_size)
    return [_join(plan, training, numbers[start : start + batch_size], sequences) for start in starts]


def _join(plan: DataPlan, training, numbers: range, sequences: dict[int, Sequence]) -> Batch:
    parts = [sequences.get(number) or _padding(plan) for number in numbers]
    batch = join_sequences(parts, list(numbers), training.varlen, training.log_data_hash)
    return batch.pin_memory() if training.pin_memory and torch.cuda.is_available() else batch


def _padding(plan: DataPlan) -> Sequence:
    return pack_sequence(StreamBuffer(StreamState()), plan.seq_len, plan.context_len, plan.encoder.pad_id)


def build_dataloader(
    config,
    tokenizer,
    dp_rank: int = 0,
    dp_size: int = 1,
    prepare: AbstractContextManager | None = None,
    gather: Callable[[object], list] | None = None,
) -> DataLoader:
    """Open the job's data for one data-parallel rank.

    Args:
        config: the job's config; its ``training`` section is read.
        tokenizer: a Hugging Face tokenizer.
        dp_rank, dp_size: this rank's place among the data-parallel ranks.
        prepare: entered while datasets are downloaded and converted, such as ``local_leader_first``.
        gather: gives every rank's plain value on every rank; needed by several ranks with ``training.max_epochs``.

    Raises:
        UserError: the data does not exist or cannot be used; the message says what to change.
    """
    training = config.training
    with prepare or nullcontext():
        sources = open_sources(training)
    plan = make_plan(sources, tokenizer, training)
    return DataLoader(plan, plan_fingerprint(plan, training), training, dp_rank, dp_size, gather)
