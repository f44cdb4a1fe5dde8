"""Seeds, determinism, garbage collection."""

from __future__ import annotations

import gc
import weakref

import torch

from flame.config import JobConfig
from flame.training.restore import hyperparameters, log_changes
from flame.training.runtime import GarbageCollector, seconds_since_start, seed_step


def draw(*arguments: int) -> torch.Tensor:
    seed_step(*arguments)
    return torch.rand(8)


def test_each_step_and_rank_draws_its_own_numbers_again():
    assert torch.equal(draw(42, 7, 0), draw(42, 7, 0))
    draws = [draw(seed, step, rank) for seed in (1, 2) for step in (1, 2) for rank in (0, 1)]
    assert len({tuple(each.tolist()) for each in draws}) == len(draws)


class Kept:
    """Something that can be referred to weakly."""


def test_garbage_is_collected_at_its_steps_only():
    collector = GarbageCollector(every=3)
    try:
        assert not gc.isenabled()
        counts = []
        for step in range(1, 7):
            before = gc.get_stats()[1]["collections"]
            collector.step(step)
            counts.append(gc.get_stats()[1]["collections"] - before)
        assert counts == [0, 0, 1, 0, 0, 1]
        cycle = [Kept()]
        cycle.append(cycle)
        kept = weakref.ref(cycle[0])
        gc.collect()  # as old as it gets
        del cycle
        collector.step(3)
        assert kept() is not None
        collector.collect()
        assert kept() is None
    finally:
        collector.close()
    assert gc.isenabled()


def test_the_clock_counts_from_the_launcher(monkeypatch):
    monkeypatch.setenv("FLAME_START_TIME", "0")
    assert seconds_since_start() > 1e9


def test_changed_settings_are_named(caplog):
    config = JobConfig()
    config.training.batch_size = 3
    before = hyperparameters(config, 2)
    config.optimizer.lr, config.optimizer.weight_decay = 1e-3, 0.2
    log_changes(before, hyperparameters(config, 4))
    assert [record.getMessage() for record in caplog.records] == [
        "optimizer.lr changed since the checkpoint: 0.001, was 0.0008",
        "optimizer.weight_decay changed since the checkpoint: 0.2, was 0.1",
        "tokens per step changed since the checkpoint: 24576, was 12288; training.batch_size and "
        "gradient_accumulation_steps, which count for each rank, can keep it",
    ]
