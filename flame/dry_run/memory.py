"""Bytes that one rank needs on its device, from the parameters that it has and what a micro-batch takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from flame.config import Optimizer
from flame.dry_run.schedule import Action, peak_over
from flame.dry_run.trial import Trial

MASTER = 4  # bytes of a weight, a gradient or a moment: float32

# Numbers that the optimizer keeps for each parameter.
_MOMENTS = {"AdamW": 2, "Adam": 2, "SGD": 1}


@dataclass(frozen=True)
class Unit:
    """What FSDP gathers at a time.

    Attributes:
        num_parameters: of the unit on this rank once it is gathered (its part under tensor parallelism).
        num_kept: of those this rank keeps, its shard; FSDP pads the first dimension of each.
        is_root: embedding, norm and output projection, which stay gathered from forward to backward.
    """

    num_parameters: int
    num_kept: int
    is_root: bool = False

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter], num_shards: int, is_root: bool = False) -> Unit:
        parameters = list(parameters)
        kept = sum(-(-each.shape[0] // num_shards) * each[0].numel() for each in parameters)
        return cls(sum(each.numel() for each in parameters), kept, is_root)


@dataclass(frozen=True)
class Memory:
    """A rank's bytes; ``peak`` is the most that there are at a time, and less than the sum of all.

    Attributes:
        weights: master weights, float32.
        gradients: of the rank's shards, float32.
        optimizer: its moments, float32.
        gathered: weights in the compute dtype that are gathered at a time.
        unreduced: gradients that a pipeline adds up until its last micro-batch.
        activations: what micro-batches in flight keep and what the one at work needs besides.
        peak: of forward and backward, or of the optimizer's step when that is more.
        host: bytes of the host's memory that this rank takes; weights, gradients and moments may be there.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    unreduced: int
    activations: int
    peak: int
    host: int = 0


def estimate(
    units: list[Unit],
    activations: int,
    *,
    optimizer: Optimizer,
    compute_bytes: int,
    reshards: bool,
    is_pipeline: bool,
    has_gradients: bool,
    on_host: bool = False,
) -> Memory:
    """The memory of one rank.

    Args:
        units: of all the rank's stages.
        activations: bytes at the peak of forward and backward.
        compute_bytes: of a gathered weight.
        reshards: blocks are given back after their forward.
        is_pipeline: gradients are reduced once a step, and weights stay gathered from one backward to the next forward.
        has_gradients: the step adds up several micro-batches, so that gradients are there from the second on. Those of
            a first are part of the activations.
        on_host: weights, gradients and moments are in the host's memory.
    """
    num_kept, num_gathered = (sum(getattr(each, name) for each in units) for name in ("num_kept", "num_parameters"))
    weights = gradients = MASTER * num_kept
    moments = weights * num_moments(optimizer)
    if reshards and not is_pipeline:
        num_gathered = _most_gathered(units)
    gathered = compute_bytes * num_gathered
    unreduced = MASTER * sum(each.num_parameters for each in units) if is_pipeline else 0
    if on_host:
        host = weights + gradients + moments
        return Memory(0, 0, 0, gathered, unreduced, activations, gathered + unreduced + activations, host)
    at_work = weights + moments + gathered + unreduced + activations + (gradients if has_gradients else 0)
    at_step = weights + moments + gradients + _step_bytes(units, optimizer)
    if is_pipeline:
        at_step += unreduced  # the last reduction makes the shards while these are there
    return Memory(weights, gradients, moments, gathered, unreduced, activations, max(at_work, at_step))


def num_moments(optimizer: Optimizer) -> int:
    """Numbers that the optimizer keeps for each parameter."""
    return 0 if optimizer.name == "SGD" and not optimizer.beta1 else _MOMENTS[optimizer.name]


def _step_bytes(units: list[Unit], optimizer: Optimizer) -> int:
    """What the optimizer's step itself allocates: multi-tensor operations make one result for every parameter."""
    return MASTER * sum(each.num_kept for each in units) if optimizer.implementation == "foreach" else 0


def _most_gathered(units: list[Unit]) -> int:
    """Parameters gathered at a time: the root, the block at work and the next, which is gathered meanwhile."""
    blocks = sorted((each.num_parameters for each in units if not each.is_root), reverse=True)
    return sum(each.num_parameters for each in units if each.is_root) + sum(blocks[:2])


def activation_peak(actions: Iterable[Action], trials: Mapping[int, Trial]) -> int:
    """Bytes of activations that a rank holds at most.

    Args:
        actions: what it does in a step.
        trials: of its stages.
    """

    def during(action: Action, kept: dict[int, int]) -> int:
        trial = trials[action.stage]
        others = sum(trials[stage].saved * number for stage, number in kept.items()) - trial.saved
        return others + (trial.forward_peak if action.kind == "F" else trial.backward_peak)

    return peak_over(actions, during)
