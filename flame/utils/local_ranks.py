"""All data-parallel ranks of a job in one process, without a process group: their loaders, stepped together."""

from __future__ import annotations

import copy
import threading

from flame.config import JobConfig
from flame.data.batch import Batch
from flame.data.loader import build_dataloader


class LocalRanks:
    """The loaders that ``dp_size`` ranks of a training run would build, one for each rank.

    Args:
        config: the job.
        tokenizer: a Hugging Face tokenizer.
        dp_size: data-parallel ranks.
        data_state: where to begin, what ``merge_state_dicts`` made; None for the beginning.

    Raises:
        UserError: the data cannot be used as configured.
    """

    def __init__(self, config: JobConfig, tokenizer, dp_size: int, data_state: dict | None = None):
        self._turns = TakingTurns(dp_size)
        self.loaders = [
            build_dataloader(config, tokenizer, rank, dp_size, gather=self._turns.gather_for(rank))
            for rank in range(dp_size)
        ]
        if data_state is not None:
            for loader in self.loaders:
                loader.load_state_dict(data_state)

    def next_step(self) -> list[list[Batch]] | None:
        """Each rank's microbatches of the next step, or None when ``training.max_epochs`` is over.

        Raises:
            UserError: a row is bad.
        """
        steps = self._turns.run([loader.next_step for loader in self.loaders])
        return None if steps[0] is None else steps

    def epochs(self) -> dict[str, float]:
        """Passes over each source so far."""
        parts = [loader.epochs() for loader in self.loaders]
        return {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}

    def close(self) -> None:
        """End the loaders' workers."""
        for loader in self.loaders:
            loader.close()


class TakingTurns:
    """Runs one function for each rank, in threads of which only one moves at a time; they meet where they gather.

    Taking turns makes it safe to fork workers: no other thread holds a lock of the tokenizer or of Arrow then.
    """

    def __init__(self, size: int):
        self._values: list = [None] * size
        self._turn = threading.Lock()
        self._meeting = threading.Barrier(size)

    def gather_for(self, rank: int):
        """A function that gives every rank's value on every rank, for ``rank`` to call."""

        def gather(value) -> list:
            self._values[rank] = copy.deepcopy(value)
            self._turn.release()
            try:
                self._meeting.wait()
                values = copy.deepcopy(self._values)
                self._meeting.wait()  # nobody puts in the next value before all have taken these
            finally:
                self._turn.acquire()
            return values

        return gather

    def run(self, functions: list) -> list:
        """The functions' results by rank, None for one that raised StopIteration; the first other error is raised."""
        results: list = [None] * len(functions)
        errors: list[BaseException] = []
        # Not a ThreadPoolExecutor: workers forked from one of its threads would wait for that thread at their end.
        threads = [
            threading.Thread(target=self._run_one, args=(rank, function, results, errors))
            for rank, function in enumerate(functions)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def _run_one(self, rank: int, function, results: list, errors: list[BaseException]) -> None:
        with self._turn:
            try:
                results[rank] = function()
            except StopIteration:
                pass
            except BaseException as error:
                errors.append(error)  # the first is the cause: the others only miss this rank at their meeting
                self._meeting.abort()
