"""One rank's share of the global order, as batches with a state that can be saved."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from flame.data.batch import Batch, join_sequences
from flame.data.order import RowOrder
from flame.data.sources import open_source, source_fingerprint, source_specs
from flame.data.state import STATE_VERSION, StreamState, check_fingerprint
from flame.data.streams import DataPlan
from flame.data.tokenize import DocumentEncoder
from flame.data.workers import SequencePool
from flame.errors import UserError

DEFAULT_BATCH_SIZE = 8


class DataLoader:
    """Batches of the global sequences i with ``i % dp_size == dp_rank``; sequence i comes from stream ``i % S``.

    Args:
        plan: what the sequences hold.
        fingerprint: what identifies it, as plain data.
        training: the job's ``[training]`` section.
        dp_rank, dp_size: this rank's place among the data-parallel ranks.

    Raises:
        UserError: ``dp_size`` does not divide the number of streams.
    """

    def __init__(self, plan: DataPlan, fingerprint: dict, training, dp_rank: int = 0, dp_size: int = 1):
        if plan.num_streams % dp_size:
            divisors = [str(size) for size in range(1, plan.num_streams + 1) if plan.num_streams % size == 0]
            raise UserError(
                f"{dp_size} data-parallel ranks do not divide --training.num_streams {plan.num_streams}; "
                f"numbers that do: {', '.join(divisors)}"
            )
        self.plan = plan
        self.fingerprint = fingerprint
        self.training = training
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.batch_size = training.batch_size or (1 if training.varlen else DEFAULT_BATCH_SIZE)
        self.num_sequences = 0  # of all ranks, consumed
        self.states = {number: self._initial_state() for number in range(dp_rank, plan.num_streams, dp_size)}
        self.pool: SequencePool | None = None

    def next_step(self) -> list[Batch]:
        """The microbatches of the next training step, ``gradient_accumulation_steps`` of them, on the CPU.

        Raises:
            StopIteration: ``training.max_epochs`` is reached; the state is that after the last whole step.
            UserError: a row is bad.
        """
        if self.pool is None:
            self.pool = self._open_pool()
        num_microbatches = self.training.gradient_accumulation_steps
        first = self._own_first(self.num_sequences)
        numbers = [first + place * self.dp_size for place in range(num_microbatches * self.batch_size)]
        sequences = [self.pool.next_sequence() for _ in numbers]
        for number, sequence in zip(numbers, sequences, strict=True):
            self.states[number % self.plan.num_streams] = StreamState.from_list(sequence.state)
        self.num_sequences += len(numbers) * self.dp_size
        return [
            self._join(sequences[start : start + self.batch_size], numbers[start : start + self.batch_size])
            for start in range(0, len(numbers), self.batch_size)
        ]

    def state_dict(self) -> dict:
        """This rank's streams as of the last step handed out, for ``merge_state_dicts``."""
        return {
            "version": STATE_VERSION,
            "num_sequences": self.num_sequences,
            "num_streams": self.plan.num_streams,
            "fingerprint": self.fingerprint,
            "streams": {str(number): state.to_list() for number, state in self.states.items()},
        }

    def load_state_dict(self, merged: dict) -> None:
        """Go on from what ``merge_state_dicts`` made, at any number of ranks and workers.

        Raises:
            UserError: the state belongs to other data, another tokenizer, seed or packing.
        """
        if merged["version"] != STATE_VERSION:
            raise UserError(f"the checkpoint's data state has version {merged['version']}, this one is {STATE_VERSION}")
        if merged["num_streams"] != self.plan.num_streams:
            raise UserError(
                f"--training.num_streams {self.plan.num_streams}: the checkpoint's data order has "
                f"{merged['num_streams']} streams; give that number"
            )
        if not self.training.ignore_data_fingerprint:
            check_fingerprint(merged["fingerprint"], self.fingerprint)
        self.close()
        self.num_sequences = merged["num_sequences"]
        self.states = {number: StreamState.from_list(merged["streams"][number]) for number in self.states}

    def epochs(self) -> dict[str, float]:
        """Passes over each source so far, judged by this rank's streams."""
        return {
            source.name: sum(state.cursors[index] for state in self.states.values()) * self.dp_size / len(source)
            for index, source in enumerate(self.plan.sources)
        }

    @property
    def num_skipped_rows(self) -> int:
        """Bad rows left out so far by this rank's streams."""
        return sum(state.skipped for state in self.states.values())

    def close(self) -> None:
        """End the workers; the next step starts them anew."""
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    def _initial_state(self) -> StreamState:
        return StreamState([0] * len(self.plan.sources))

    def _own_first(self, number: int) -> int:
        """The first global sequence from ``number`` on that is this rank's."""
        return number + (self.dp_rank - number) % self.dp_size

    def _open_pool(self) -> SequencePool:
        first = self._own_first(self.num_sequences)
        num_own = self.plan.num_streams // self.dp_size
        numbers = [(first + place * self.dp_size) % self.plan.num_streams for place in range(num_own)]
        return SequencePool(
            self.plan,
            numbers,
            [self.states[number] for number in numbers],
            self.training.num_workers,
            prefetch=self.training.prefetch_factor * self.batch_size,
            persistent=self.training.persistent_workers,
        )

    def _join(self, sequences: list, numbers: list[int]) -> Batch:
        batch = join_sequences(sequences, numbers, self.training.varlen, self.training.log_data_hash)
        return batch.pin_memory() if self.training.pin_memory and torch.cuda.is_available() else batch


def build_dataloader(
    config, tokenizer, dp_rank: int = 0, dp_size: int = 1, prepare: AbstractContextManager | None = None
) -> DataLoader:
    """Open the job's data for one data-parallel rank.

    Args:
        config: the job's config; its ``training`` section is read.
        tokenizer: a Hugging Face tokenizer.
        dp_rank, dp_size: this rank's place among the data-parallel ranks.
        prepare: entered while datasets are downloaded and converted, such as ``local_leader_first``.

    Raises:
        UserError: the data does not exist or cannot be used; the message says what to change.
    """
    training = config.training
    with prepare or nullcontext():
        sources = [open_source(spec, training.text_column) for spec in source_specs(training)]
    if len(sources) != 1:
        raise UserError(f"--training.dataset names {len(sources)} datasets; give one")
    encoder = DocumentEncoder(tokenizer, training.add_bos, training.add_eos)
    context_len = min(training.context_len, training.seq_len) if training.varlen else training.seq_len
    plan = DataPlan(
        sources=sources,
        orders=[RowOrder(len(source), training.seed, index, training.shuffle) for index, source in enumerate(sources)],
        encoder=encoder,
        num_streams=training.num_streams,
        seq_len=training.seq_len,
        context_len=context_len,
        max_epochs=training.max_epochs,
        skip_bad_rows=training.on_bad_row == "skip",
    )
    return DataLoader(plan, _fingerprint(plan, training), training, dp_rank, dp_size)


def _fingerprint(plan: DataPlan, training) -> dict:
    return {
        "sources": [source_fingerprint(source) for source in plan.sources],
        "tokenizer": plan.encoder.fingerprint(),
        "order": {"seed": training.seed, "shuffle": training.shuffle},
        "packing": {"seq_len": plan.seq_len, "context_len": plan.context_len, "varlen": training.varlen},
    }
