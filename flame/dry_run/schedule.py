"""What the ranks of a pipeline do one after the other: from the schedule's own order to waiting times and memory."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flame.config import Experimental
from flame.parallel.pipeline_plan import PipelinePlan
from flame.paths import find_resource

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_DURATIONS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # a backward costs two forwards, half of it for the weights


@dataclass(frozen=True)
class Action:
    """One thing that a rank does.

    Attributes:
        kind: F forward, B backward, I and W its parts for inputs and for weights.
        stage: of the pipeline.
        microbatch: number of the micro-batch.
    """

    kind: str
    stage: int
    microbatch: int


def rank_actions(plan: PipelinePlan, options: Experimental, num_microbatches: int, schedule: Any) -> list[list[Action]]:
    """Every rank's actions of one step, in order.

    Args:
        options: name the schedule.
        schedule: torch's, which has accepted that many micro-batches; those with several stages on a rank say in
            ``pipeline_order`` what each rank does.
    """
    ranks = range(plan.num_ranks)
    if options.pipeline_parallel_schedule_csv:
        with open(find_resource(options.pipeline_parallel_schedule_csv), newline="", encoding="utf-8") as file:
            return [list(_read_cells(row)) for row in csv.reader(file)]
    if options.pipeline_parallel_schedule == "1F1B":
        return [_one_by_one(rank, plan.num_ranks, num_microbatches) for rank in ranks]
    if options.pipeline_parallel_schedule == "GPipe":
        return [[Action(kind, rank, number) for kind in "FB" for number in range(num_microbatches)] for rank in ranks]
    return [list(_read_cells(schedule.pipeline_order[rank])) for rank in ranks]


def _one_by_one(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """1F1B: as many forwards as ranks follow and one more, then backwards and forwards in turn."""
    ahead = min(num_ranks - rank, num_microbatches)
    actions = [Action("F", rank, number) for number in range(ahead)]
    for number in range(num_microbatches):
        actions.append(Action("B", rank, number))
        if number + ahead < num_microbatches:
            actions.append(Action("F", rank, number + ahead))
    return actions


def _read_cells(cells: Iterable[object]) -> Iterator[Action]:
    """The actions of cells such as 0F3; one may hold two that overlap, or none."""
    for cell in cells:
        for stage, kind, microbatch in _ACTION.findall(str(cell)):
            yield Action(kind, int(stage), int(microbatch))


def waiting_share(actions: list[list[Action]], work: Sequence[float], owners: Sequence[int]) -> float:
    """The share of a step that a pipeline's ranks wait for each other, sending not counted.

    Args:
        actions: every rank's.
        work: of each stage, in any unit.
        owners: rank of each stage.
    """
    ends: dict[Action, float] = {}
    clocks, queues = [0.0] * len(actions), [list(reversed(each)) for each in actions]
    last = len(work) - 1
    while any(queues):
        moved = False
        for rank, queue in enumerate(queues):
            while queue and (ready := _ready_at(queue[-1], last, ends)) is not None:
                action = queue.pop()
                clocks[rank] = max(clocks[rank], ready) + _DURATIONS[action.kind] * work[action.stage]
                ends[action] = clocks[rank]
                moved = True
        assert moved, "a schedule that torch accepts comes to an end"
    busy = sum(_DURATIONS[action.kind] * work[action.stage] for each in actions for action in each)
    return 1 - busy / (max(clocks) * len(actions))


def _ready_at(action: Action, last: int, ends: dict[Action, float]) -> float | None:
    """When an action could begin at the earliest; None while something that it needs has not been done."""
    kind, stage, number = action.kind, action.stage, action.microbatch
    if kind == "F":
        return 0.0 if stage == 0 else ends.get(Action("F", stage - 1, number))
    if kind == "W":
        return ends.get(Action("I", stage, number))
    if stage == last:
        return ends.get(Action("F", stage, number))
    return next((ends[each] for each in (Action(k, stage + 1, number) for k in "BI") if each in ends), None)


def peak_over(actions: Iterable[Action], during: Callable[[Action, dict[int, int]], int]) -> int:
    """The most that ``during(action, kept)`` gives, where ``kept`` counts each stage's micro-batches in flight.

    A micro-batch is in flight from its forward to the end of its backward, that for the weights included; while an
    action goes on it counts its own.
    """
    kept: dict[int, int] = {}
    peak = 0
    for action in actions:
        kept[action.stage] = kept.get(action.stage, 0) + (action.kind == "F")
        peak = max(peak, during(action, kept))
        kept[action.stage] -= action.kind in "BW"
    return peak


def most_in_flight(actions: Iterable[Action]) -> int:
    """Micro-batches that a rank holds between forward and backward at most, over all its stages."""
    return peak_over(actions, lambda _action, kept: sum(kept.values()))
