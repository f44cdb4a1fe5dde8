"""Where sequences are made: in this process, or in worker processes that each own fixed streams."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from fsspec.asyn import reset_lock
from torch.utils.data import DataLoader, IterableDataset

from flame.data.pack import Sequence
from flame.data.state import StreamState
from flame.data.streams import DataPlan, StreamReader
from flame.errors import UserError, WorkerDied

# The longest that the tokenizer's thread waits for Python's lock, which it needs before and after each batch: by
# Python's own 5 ms, up to a tenth of its time.
SWITCH_SECONDS = 2e-4
ORPHAN_SECONDS = 0.5  # between two looks at whether the trainer is there
TOKENS_PER_MESSAGE = 65_536
MIN_MESSAGES_AHEAD = 2  # one to be taken apart, and one to be made meanwhile


@dataclass
class WorkerFault:
    """A user fault met in a worker, sent in place of a sequence."""

    message: str


class _WorkerDataset(IterableDataset):
    """A reader's sequences, several to a message where they are short; the first messages come sooner, with fewer."""

    def __init__(self, reader: StreamReader):
        self.reader = reader

    def __iter__(self) -> Iterator[list[Sequence | WorkerFault]]:
        limit, size = sequences_per_message(self.reader.plan.seq_len), 1
        message: list[Sequence | WorkerFault] = []
        try:
            for sequence in self.reader:
                message.append(sequence)
                if len(message) == size:
                    yield message
                    message, size = [], min(2 * size, limit)
        except UserError as error:
            message.append(WorkerFault(str(error)))
        if message:
            yield message


def sequences_per_message(seq_len: int) -> int:
    """Sequences that a worker hands over at once, so that the handing over costs little beside making them."""
    return max(1, TOKENS_PER_MESSAGE // seq_len)


class SequencePool:
    """Hands out the sequences of a rank's streams in turn, whoever makes them.

    The l-th of the streams belongs to worker ``l % num_workers``; each worker is asked when it is the turn of one of
    its streams, so neither number need divide the other. Streams at the end of their data leave the round.

    Args:
        plan: what the sequences hold.
        numbers: the streams, in the order of their turns from the next sequence on.
        states: their states, in the same order.
        num_workers: processes; 0 makes the sequences in this one.
        prefetch: sequences that each worker makes ahead, at least; more where a message holds more.
        persistent: handed to ``torch.utils.data.DataLoader``.
    """

    def __init__(
        self,
        plan: DataPlan,
        numbers: list[int],
        states: list[StreamState],
        num_workers: int,
        prefetch: int,
        persistent: bool = False,
    ):
        num_makers = max(1, min(num_workers, len(numbers)))
        readers = [
            StreamReader(plan, numbers[maker::num_makers], states[maker::num_makers]) for maker in range(num_makers)
        ]
        already_running = set(multiprocessing.active_children())
        if num_workers:
            messages = max(MIN_MESSAGES_AHEAD, math.ceil(prefetch / sequences_per_message(plan.seq_len)))
            received = [iter(_start_worker(reader, messages, persistent)) for reader in readers]  # starts them
            self.makers = [chain.from_iterable(messages) for messages in received]
        else:
            self.makers = [iter(reader) for reader in readers]
        self.workers = [child for child in multiprocessing.active_children() if child not in already_running]
        # Also where nobody closes the pool: the interpreter would wait at its end for workers that ignore its signal.
        self.end_workers = weakref.finalize(self, _end, self.workers)
        self.round = deque((number, place % num_makers) for place, number in enumerate(numbers))

    @property
    def next_stream(self) -> int | None:
        """The stream whose turn it is, None when all have come to their ends."""
        return self.round[0][0] if self.round else None

    def next_sequence(self) -> Sequence:
        """The sequence of the stream whose turn it is.

        Raises:
            UserError: a row is bad.
            WorkerDied: a worker was killed.
        """
        number, maker = self.round[0]
        sequence = self._receive(maker)
        if isinstance(sequence, WorkerFault):
            raise UserError(sequence.message)
        self.round.popleft()
        if not sequence.is_last:
            self.round.append((number, maker))
        return sequence

    def _receive(self, maker: int) -> Sequence | WorkerFault:
        try:
            return next(self.makers[maker])
        except RuntimeError as error:
            death = self.dead_workers()
            if not death:
                raise
            raise WorkerDied(death) from error

    def dead_workers(self) -> str:
        """What became of workers that died, and what helps; empty when none has."""
        codes = [f"process {worker.pid}: exit code {worker.exitcode}" for worker in self.workers if worker.exitcode]
        if not codes:
            return ""
        return (
            f"a data worker died ({', '.join(codes)}; -9 is mostly the system running out of memory: use fewer "
            "--training.num_workers, or a smaller --training.prefetch_factor)"
        )

    def close(self) -> None:
        """End the workers, by force where one hangs: they ignore the signal that a ``DataLoader`` would send."""
        self.makers = []
        self.end_workers()
        self.workers = []


def _end(workers: list[multiprocessing.process.BaseProcess]) -> None:
    for worker in workers:
        worker.kill()
        worker.join()


def _start_worker(reader: StreamReader, messages_ahead: int, persistent: bool) -> DataLoader:
    return DataLoader(
        _WorkerDataset(reader),
        batch_size=None,
        num_workers=1,
        collate_fn=_as_is,  # arrays go through the pipe: tensors would take a file descriptor and shared memory each
        prefetch_factor=messages_ahead,
        persistent_workers=persistent,
        worker_init_fn=_settle_worker,
        multiprocessing_context=_start_method(),
        generator=torch.Generator(),  # or the workers' seeds would be drawn from the model's random numbers
    )


def _start_method() -> str | None:
    """Forked workers share the sources' memory and start at once; elsewhere than on Linux forking is unsafe."""
    return "fork" if sys.platform == "linux" else None


def _as_is(item):
    return item


def _settle_worker(worker_id: int) -> None:
    """Preemption signals reach every process of a job: the trainer decides what happens then, and ends its workers."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    _die_with_the_trainer()
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_SECONDS)
    reset_lock()  # the thread that fsspec reads remote files with is not in a forked process; it starts another
    # A forked process has lost the tokenizer's thread pool and would wait for it for ever.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _die_with_the_trainer() -> None:
    """End this process soon after a killed trainer leaves it behind.

    torch's own check would have it wait for ever with a message that nobody reads; and the trainer's connections, which
    a forked worker has too, would stay open, so that the other ranks do not learn of its death. Linux's parent death
    signal would not do: it comes when the *thread* that forked ends.
    """
    trainer = multiprocessing.parent_process().pid

    def watch() -> None:
        while os.getppid() == trainer:
            time.sleep(ORPHAN_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="trainer", daemon=True).start()
