"""Bytes that one rank sends in a step, by rings, whose volume is the least: (n - 1) / n of what n ranks gather."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from flame.dry_run.memory import MASTER, Unit
from flame.dry_run.schedule import Action
from flame.dry_run.trial import Trial
from flame.parallel.degrees import Degrees


def fsdp_traffic(
    units: Mapping[int, list[Unit]],
    actions: Iterable[Action],
    degrees: Degrees,
    *,
    compute_bytes: int,
    reshards: bool,
    is_pipeline: bool,
) -> Counter[str]:
    """What FSDP sends: gathered weights, reduced gradients, and the sum over copies (HSDP, DDP).

    Args:
        units: of each of the rank's stages.
        actions: of the rank.
        reshards: blocks are given back after their forward, and gathered again for the backward.
        is_pipeline: gradients are reduced once a step, and weights stay gathered from one backward to the next forward.
    """
    sent: Counter[str] = Counter()
    shards, copies = degrees.fsdp, degrees.replicate
    for stage, own in units.items():
        kinds = [action.kind for action in actions if action.stage == stage and action.kind != "W"]
        num_reductions = 1 if is_pipeline else kinds.count("F")
        for unit in own:
            resharded = reshards and not unit.is_root
            num_gathers = _num_gathers(kinds, stays=is_pipeline) if resharded else num_reductions
            sent["gathered weights"] += num_gathers * compute_bytes * unit.num_kept * (shards - 1)
            sent["reduced gradients"] += num_reductions * MASTER * unit.num_kept * (shards - 1)
            sent["summed gradients of copies"] += num_reductions * 2 * MASTER * unit.num_kept * (copies - 1) // copies
    return sent


def _num_gathers(kinds: Sequence[str], stays: bool) -> int:
    """How often a block is gathered that is given back after each forward, and after each backward unless it stays."""
    count, is_gathered = 0, False
    for kind in kinds:
        count += not is_gathered
        is_gathered = stays and kind != "F"
    return count


def pipeline_traffic(actions: Iterable[Action], owners: Sequence[int], rank: int, hidden_bytes: int) -> int:
    """What a rank hands on to others: hidden states forward, their gradients backward."""
    sent = 0
    for action in actions:
        other = action.stage + (1 if action.kind == "F" else -1)
        if action.kind != "W" and 0 <= other < len(owners) and owners[other] != rank:
            sent += hidden_bytes
    return sent


def model_traffic(actions: Iterable[Action], trials: Mapping[int, Trial]) -> Counter[str]:
    """What the model's own collectives send, those of tensor and context parallelism."""
    sent: Counter[str] = Counter()
    for action in actions:
        if action.kind == "F":  # a trial counts forward and backward
            sent.update(trials[action.stage].sent)
    return sent
