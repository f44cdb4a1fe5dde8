"""The learning rate as a function of the step: warm-up, stable phase, decay."""

from __future__ import annotations

import math
from collections.abc import Callable

from flame.config import LRScheduler

DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def lr_factor(step: int, num_steps: int, schedule: LRScheduler) -> float:
    """Factor on the peak learning rate at a training step.

    The rate rises linearly to its peak at step ``warmup_steps`` (at step 1 without warm-up), stays there, and decays
    so that the last step is exactly ``lr_min``. Where warm-up leaves no step for a decay there is none.

    Args:
        step: training step, counted from 1.
        num_steps: last step of the run.
        schedule: ``decay_ratio`` None decays over all steps after the warm-up; a positive share decays over the last
            ``round(num_steps * decay_ratio)`` steps (warm-up, stable, decay); 0 never decays.

    Returns:
        A number in [0, 1].
    """
    warmup_steps = min(schedule.warmup_steps, num_steps)
    if step <= warmup_steps:
        return step / warmup_steps
    peak_step = _last_peak_step(num_steps, warmup_steps, schedule)
    if step <= peak_step or peak_step >= num_steps:
        return 1.0
    progress = min(1.0, (step - peak_step) / (num_steps - peak_step))
    return schedule.lr_min + (1.0 - schedule.lr_min) * DECAYS[schedule.decay_type](progress)


def _last_peak_step(num_steps: int, warmup_steps: int, schedule: LRScheduler) -> int:
    """The last step at the peak rate: the decay starts after it."""
    first_peak = max(warmup_steps, 1)
    ratio = schedule.decay_ratio
    if ratio is None:
        return first_peak
    if ratio == 0.0:
        return num_steps
    decay_steps = max(1, round(num_steps * ratio))
    return max(first_peak, num_steps - decay_steps)
