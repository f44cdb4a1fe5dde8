"""What auto comes to: the fastest way to recompute activations, and the largest batch, that a device's memory holds.

Plans say what a choice takes. Each is made on tensors without memory, about a second for a model of any size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from flame.cli.validate import MAX_ROW
from flame.config import AUTO, JobConfig, auto_options
from flame.dry_run.capacity import Capacity, gib
from flame.dry_run.plan import JobPlan
from flame.errors import UserError
from flame.parallel.pipeline_plan import splits_backward

MODE, BATCH = "activation_checkpoint.mode", "training.batch_size"

# What activation_checkpoint.mode auto chooses from, with selective_ac_option. docs/performance.md has the speeds.
NONE, KEEP_OPERATORS, FULL = ("none", ""), ("selective", "op"), ("full", "")

MOST_SEQUENCES = 2**20  # what training.batch_size may be

# A few short sequences may take no more than one, which says nothing of many, and plans of very many take long.
MOST_AT_ONCE = 64

Plan = Callable[[JobConfig], JobPlan]


@dataclass(frozen=True)
class Tried:
    """A choice that was planned: its mode, batch size, and peak in bytes on the rank that needs the most."""

    mode: tuple[str, str]
    batch_size: int
    peak: int


@dataclass(frozen=True)
class Fit:
    """What auto has come to.

    Attributes:
        names: the options that were auto.
        mode: of activation checkpointing, with selective_ac_option where that counts.
        batch_size: sequences of a micro-batch.
        tried: what was planned, in that order.
        capacity: what the job is to fit; None where it is not known.
        kept_batch_size: the batch size is that of the checkpoint.
    """

    names: list[str]
    mode: tuple[str, str]
    batch_size: int
    tried: list[Tried]
    capacity: Capacity | None
    kept_batch_size: bool = False

    def apply(self, config: JobConfig) -> None:
        """Write the numbers and names in the place of auto. The memory given has then done its work."""
        config.training.batch_size = self.batch_size
        if MODE in self.names:
            checkpointing = config.activation_checkpoint
            checkpointing.mode, option = self.mode
            checkpointing.selective_ac_option = option or checkpointing.selective_ac_option
        config.job.device_memory_gib = 0.0

    def lines(self) -> list[str]:
        """What was chosen, what each choice would take, and what there is."""
        memory = self.capacity.describe() if self.capacity else "this machine does not say how much memory it has"
        lines = []
        if MODE in self.names:
            first = self.tried[0].batch_size if self.tried else 0
            tried = [f"{_words(each.mode)} {gib(each.peak)}" for each in self.tried if each.batch_size == first]
            lines.append(f"{MODE} = auto: {_words(self.mode)}; {_planned(tried)}{memory}")
        if BATCH in self.names:
            tried = [each for each in self.tried if each.mode == self.mode]
            peaks = [f"{each.batch_size}: {gib(each.peak)}" for each in sorted(tried, key=lambda x: x.batch_size)]
            kept = ", which keeps the tokens a step of the checkpoint" if self.kept_batch_size else ""
            lines.append(f"{BATCH} = auto: {self.batch_size}{kept}; {_planned(peaks)}{memory}")
        return lines

    @property
    def is_tight(self) -> bool:
        """Whether the choice needs some of the margin, because nothing takes less."""
        chosen = [each.peak for each in self.tried if (each.mode, each.batch_size) == (self.mode, self.batch_size)]
        return self.capacity is not None and bool(chosen) and chosen[0] > self.capacity.usable


def fit_job(config: JobConfig, capacity: Capacity | None, plan: Plan, kept_batch_size: int | None = None) -> Fit:
    """Decide what the job leaves to auto: the mode first, at the smallest batch, then the batch in that mode.

    Args:
        capacity: memory of a device. Without it nothing is recomputed, and a batch size must be known.
        plan: of a job whose options are all given.
        kept_batch_size: that of the checkpoint which the run goes on from.

    Raises:
        UserError: the job cannot be planned, or fits in no way.
    """
    names = auto_options(config)
    search = _Search(config, capacity, plan)
    batch_size = config.training.batch_size
    if batch_size == AUTO:
        batch_size = kept_batch_size or 1
    is_kept = BATCH in names and kept_batch_size is not None
    if capacity is None:
        if BATCH in names and not is_kept:
            raise UserError(f"{BATCH} = auto: this machine does not say how much memory it has; give a number")
        return Fit(names, NONE, batch_size, [], None, is_kept)
    mode = search.mode(batch_size)
    if BATCH in names and not is_kept:
        batch_size = search.largest_batch(mode)
    return Fit(names, mode, batch_size, search.tried, capacity, is_kept)


class _Search:
    def __init__(self, config: JobConfig, capacity: Capacity | None, plan: Plan):
        self.config, self.capacity, self.plan = config, capacity, plan
        self.plans: dict[tuple[tuple[str, str], int], JobPlan] = {}

    @property
    def tried(self) -> list[Tried]:
        return [Tried(mode, size, plan.heaviest.memory.peak) for (mode, size), plan in self.plans.items()]

    def of(self, mode: tuple[str, str], batch_size: int) -> JobPlan:
        """The plan of a choice."""
        if (mode, batch_size) not in self.plans:
            training = replace(self.config.training, batch_size=batch_size)
            checkpointing = self.config.activation_checkpoint
            if checkpointing.mode == AUTO:
                checkpointing = replace(checkpointing, mode=mode[0])
                if mode[1]:
                    checkpointing = replace(checkpointing, selective_ac_option=mode[1])
            job = replace(self.config, training=training, activation_checkpoint=checkpointing)
            self.plans[mode, batch_size] = self.plan(job)
        return self.plans[mode, batch_size]

    def fits(self, mode: tuple[str, str], batch_size: int) -> bool:
        return self.of(mode, batch_size).heaviest.memory.peak <= self.capacity.usable

    def mode(self, batch_size: int) -> tuple[str, str]:
        """The fastest mode that fits, or the one that the job names; the last needs no margin.

        Keeping operators costs more time than recomputing all where mixers are many small kernels, as those of linear
        attention are, besides taking more memory: there it is no choice.
        """
        checkpointing = self.config.activation_checkpoint
        if checkpointing.mode != AUTO:
            modes = [(checkpointing.mode, checkpointing.selective_ac_option * (checkpointing.mode == "selective"))]
        elif self.of(NONE, batch_size).only_attention and not splits_backward(self.config.experimental):
            modes = [NONE, KEEP_OPERATORS, FULL]
        else:
            modes = [NONE, FULL]
        for mode in modes:
            if self.fits(mode, batch_size):
                return mode
        if self.of(modes[-1], batch_size).heaviest.memory.peak > self.capacity.num_bytes:
            raise UserError(self._too_large(batch_size))
        return modes[-1]

    def largest_batch(self, mode: tuple[str, str]) -> int:
        """The largest power of two that fits, between one that was planned to and one that was planned not to."""
        training = self.config.training
        most = MOST_SEQUENCES
        if training.varlen:
            most = min(most, _power_below(MAX_ROW // training.seq_len))
        if most < 2 or not self.fits(mode, 2):
            return 1
        fits, fits_not = 2, 2 * most
        while 2 * fits < fits_not:
            size = min(max(self._estimate(mode), 2 * fits), fits_not // 2, MOST_AT_ONCE * fits)
            if self.fits(mode, size):
                fits = size
            else:
                fits_not = size
        return fits

    def _estimate(self, mode: tuple[str, str]) -> int:
        """The power of two that fits if activations grow as from two sequences to the most that were planned."""
        most = max(size for planned, size in self.plans if planned == mode and size != 2)
        two, other = (self.of(mode, size).heaviest.memory for size in (2, most))
        each = (other.activations - two.activations) / (most - 2)
        return _power_below(2 + int((self.capacity.usable - two.peak) / max(1, each)))

    def _too_large(self, batch_size: int) -> str:
        peaks = ", ".join(f"{_words(each.mode)} {gib(each.peak)}" for each in self.tried)
        training, name = self.config.training, " and ".join(auto_options(self.config))
        ways = ["a smaller training.seq_len", "more devices to shard over"]
        if batch_size > 1:
            ways.insert(0, "a smaller training.batch_size (with more gradient_accumulation_steps for the same steps)")
        if self.config.activation_checkpoint.mode not in (AUTO, "full"):
            ways.append("activation_checkpoint.mode auto")
        if not training.enable_cpu_offload:
            ways.append("training.enable_cpu_offload")
        there = f"{gib(self.capacity.num_bytes)} GiB {self.capacity.source}"
        return (
            f"{name} = auto: the job does not fit the {there}: {batch_size} x {training.seq_len} tokens a micro-batch "
            f"take {peaks} GiB; {', '.join(ways[:-1])} or {ways[-1]} take less"
        )


def _power_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def _words(mode: tuple[str, str]) -> str:
    return " ".join(filter(None, mode))


def _planned(peaks: list[str]) -> str:
    return f"planned {', '.join(peaks)} of " if peaks else ""
