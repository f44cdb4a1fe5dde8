"""The loaders of all ranks of a job in one process, stepped together."""

from __future__ import annotations

import json

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
