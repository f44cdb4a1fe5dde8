"""The learning-rate schedule, as tables of rates."""

from __future__ import annotations

import pytest

from flame.config import JobConfig, LRScheduler, resolve_defaults
from flame.training.lr_scheduler import lr_factor


def rates(num_steps: int, **options) -> list[float]:
    config = JobConfig(lr_scheduler=LRScheduler(**options))
    resolve_defaults(config)
    schedule = config.lr_scheduler
    return [lr_factor(step, num_steps, schedule) for step in range(1, num_steps + 1)]


def test_linear_decay_after_warmup_reaches_peak_and_minimum():
    assert rates(6, warmup_steps=2, decay_type="linear", lr_min=0.2) == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine", "wsd"])
@pytest.mark.parametrize("lr_min", [0.0, 0.1])
@pytest.mark.parametrize("num_steps", [2, 7, 100])
def test_last_step_is_lr_min_and_peak_is_reached(decay_type, lr_min, num_steps):
    table = rates(num_steps, warmup_steps=1, decay_type=decay_type, lr_min=lr_min)
    assert table[-1] == pytest.approx(lr_min)
    assert max(table) == 1.0


def test_no_warmup_starts_at_the_peak():
    assert rates(5, warmup_steps=0, decay_type="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_warmup_for_all_steps_never_decays():
    assert rates(4, warmup_steps=4, decay_type="cosine") == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_warmup_longer_than_the_run_is_cut_to_it():
    assert rates(4, warmup_steps=100) == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_decay_ratio_zero_is_constant_after_warmup():
    assert rates(5, warmup_steps=2, decay_ratio=0.0) == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0])


def test_decay_ratio_gives_warmup_stable_decay():
    table = rates(10, warmup_steps=2, decay_ratio=0.4, decay_type="linear")
    assert table == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0])


def test_wsd_is_a_linear_decay_over_a_tenth():
    expected = rates(40, warmup_steps=3, decay_ratio=0.1, decay_type="linear", lr_min=0.1)
    assert rates(40, warmup_steps=3, decay_type="wsd", lr_min=0.1) == pytest.approx(expected)
    assert rates(40, warmup_steps=3, decay_type="wsd", decay_ratio=0.5)[20] == pytest.approx(0.95)


def test_decay_and_warmup_that_overlap_leave_the_warmup_whole():
    assert rates(4, warmup_steps=3, decay_ratio=0.9, decay_type="linear") == pytest.approx([1 / 3, 2 / 3, 1.0, 0.0])


def test_sqrt_and_cosine_halfway():
    assert rates(9, warmup_steps=1, decay_type="cosine")[4] == pytest.approx(0.5)
    assert rates(9, warmup_steps=1, decay_type="sqrt")[4] == pytest.approx(1 - 0.5**0.5)


def test_one_step_run():
    assert rates(1, warmup_steps=0, decay_type="cosine") == [1.0]
