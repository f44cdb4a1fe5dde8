"""The loaders of all ranks of a job in one process, stepped together."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

from flame.data.batch import combine_digests
from flame.data.state import merge_state_dicts

from .corpus import make_loader


class Ranks:
    """A job of ``dp_size`` ranks with a global batch of ``global_batch`` sequences, cut into ``accumulation`` parts."""

    def __init__(self, corpus: str, dp_size: int, accumulation: int = 1, global_batch: int = 24, **training):
        self.global_batch = global_batch
        training["gradient_accumulation_steps"] = accumulation
        training["batch_size"] = global_batch // dp_size // accumulation
        self.loaders = [make_loader(corpus, rank, dp_size, **training) for rank in range(dp_size)]

    def step_hashes(self, num_steps: int) -> list[str]:
        hashes = []
        for _ in range(num_steps):
            digests = {}
            for loader in self.loaders:
                for batch in loader.next_step():
                    digests.update(zip(batch.numbers, batch.digests, strict=True))
            assert len(digests) == self.global_batch
            hashes.append(combine_digests(digests))
        return hashes

    def save(self) -> dict:
        return json.loads(json.dumps(merge_state_dicts([loader.state_dict() for loader in self.loaders])))

    def load(self, state: dict) -> Ranks:
        for loader in self.loaders:
            loader.load_state_dict(state)
        return self

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


class ThreadGroup:
    """Gathers values of ranks that run as threads."""

    def __init__(self, size: int):
        self.values = [None] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def gather(self, rank: int, value) -> list:
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


def run_ranks(corpus: str, dp_size: int, max_steps: int = 10**6, state: dict | None = None, **training):
    """Step ``dp_size`` ranks, as threads that agree on when the data ends, until then or for ``max_steps``.

    Returns: (all batches of each step, merged state after the last one).
    """
    group = ThreadGroup(dp_size)
    options = {"max_epochs": 1, "num_streams": 12, "varlen": True, "batch_size": 12 // dp_size, **training}
    loaders = [
        make_loader(corpus, rank, dp_size, gather=lambda value, rank=rank: group.gather(rank, value), **options)
        for rank in range(dp_size)
    ]

    def run(loader) -> list:
        if state is not None:
            loader.load_state_dict(state)
        steps = []
        while len(steps) < max_steps:
            try:
                steps.append(loader.next_step())
            except StopIteration:
                break
        loader.close()
        return steps

    with ThreadPoolExecutor(dp_size) as threads:
        by_rank = list(threads.map(run, loaders))
    assert len({len(steps) for steps in by_rank}) == 1
    merged = json.loads(json.dumps(merge_state_dicts([loader.state_dict() for loader in loaders])))
    return [[batch for batches in step for batch in batches] for step in zip(*by_rank, strict=True)], merged


def step_hashes(steps) -> list[str]:
    """The hash of each step's sequences in global order."""
    return [
        combine_digests({n: d for batch in step for n, d in zip(batch.numbers, batch.digests, strict=True)})
        for step in steps
    ]
