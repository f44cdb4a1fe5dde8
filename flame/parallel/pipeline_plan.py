"""Which blocks of a model make up each stage of a pipeline, and which rank has which stages.

The schedule decides how many stages a rank has and how they lie: one each, several in a loop (stage i on rank i modulo
the ranks), two in a V (the last stage on the first rank), or whatever the rows of a CSV file say.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from flame.config import LOOPED_SCHEDULES, SINGLE_STAGE_SCHEDULES, V_SCHEDULES, Experimental
from flame.errors import UserError
from flame.models.blocks import find_blocks
from flame.parallel.degrees import PIPELINE_DEGREE
from flame.paths import find_resource

SCHEDULE = "experimental.pipeline_parallel_schedule"
SPLIT_POINTS = "experimental.pipeline_parallel_split_points"
_SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")

_ACTION = re.compile(r"(\d+)[FBIW](\d+)")


def splits_backward(options: Experimental) -> bool:
    """Whether the schedule computes gradients of inputs and of weights at different times."""
    if options.pipeline_parallel_schedule_csv:
        rows = _read_csv(options.pipeline_parallel_schedule_csv)
        return any(set("IW") & set(cell) for row in rows for cell in row)
    return options.pipeline_parallel_schedule in _SPLIT_BACKWARD


def check_whole_backward(options: Experimental, given: str, reason: str) -> None:
    """Refuse, beside ``given``, schedules that compute gradients of inputs and of weights at different times.

    Raises:
        UserError: names the schedule, and the reason.
    """
    if splits_backward(options):
        schedule, name = options.pipeline_parallel_schedule, SCHEDULE
        if options.pipeline_parallel_schedule_csv:
            schedule, name = options.pipeline_parallel_schedule_csv, f"{SCHEDULE}_csv"
        raise UserError(
            f"{given} and {name} = {schedule} do not go together: the schedule computes gradients of inputs and of "
            f"weights at different times, and {reason}; use 1F1B or Interleaved1F1B"
        )


@dataclass(frozen=True)
class PipelinePlan:
    """Which blocks each stage has, and which stages each rank.

    Attributes:
        num_ranks: ranks of a pipeline.
        stages: numbers of the blocks of each stage.
        owners: rank of each stage.
    """

    num_ranks: int
    stages: list[range]
    owners: list[int]

    def of_rank(self, rank: int) -> list[int]:
        """The stages of a rank, in order."""
        return [stage for stage, owner in enumerate(self.owners) if owner == rank]

    def is_first(self, stage: int) -> bool:
        return stage == 0

    def is_last(self, stage: int) -> bool:
        return stage == len(self.stages) - 1


def plan_pipeline(model: nn.Module, options: Experimental) -> PipelinePlan:
    """Cut a model into stages of about equal work, or at the split points that the job names.

    Raises:
        UserError: an unknown split point, more stages than blocks, or a number of stages that the schedule
            does not take.
    """
    blocks = find_blocks(model)
    points = options.pipeline_parallel_split_points
    starts = [0, *(_block_number(point, blocks) for point in points)]
    if sorted(set(starts)) != starts:
        raise UserError(f"{SPLIT_POINTS} = {points}: must name later and later blocks, and not the first")
    owners = stage_owners(options, len(starts) if points else None)
    if not points:
        if len(owners) > len(blocks):
            raise UserError(
                f"{PIPELINE_DEGREE} = {options.pipeline_parallel_degree}: {len(owners)} stages of {len(blocks)} "
                "blocks; use a lower degree, or a schedule with fewer stages on a rank"
            )
        starts = balanced_starts(_work(model, blocks), len(owners))
    stages = [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(blocks)], strict=True)]
    return PipelinePlan(options.pipeline_parallel_degree, stages, owners)


def stage_owners(options: Experimental, num_stages: int | None = None) -> list[int]:
    """The rank of each stage of the job's schedule.

    Args:
        num_stages: as many as the split points make; None for as few as the schedule takes.

    Raises:
        UserError: a schedule that does not take that many stages, or a CSV file that is none.
    """
    degree, name = options.pipeline_parallel_degree, options.pipeline_parallel_schedule
    loop = list(range(degree))
    if options.pipeline_parallel_schedule_csv:
        name = options.pipeline_parallel_schedule_csv
        owners = _owners_of_csv(name, degree)
        allowed, fits = f"{len(owners)}", num_stages in (None, len(owners))
    elif name in SINGLE_STAGE_SCHEDULES:
        owners, allowed, fits = loop, f"{degree}", num_stages in (None, degree)
    elif name in LOOPED_SCHEDULES:
        owners = loop * ((num_stages or 2 * degree) // degree)
        allowed = f"a multiple of {degree}, from {2 * degree} on"
        fits = len(owners) == (num_stages or len(owners)) >= 2 * degree
    else:
        assert name in V_SCHEDULES, name
        owners, allowed, fits = [*loop, *reversed(loop)], f"{2 * degree}", num_stages in (None, 2 * degree)
    if not fits:
        raise UserError(
            f"{SPLIT_POINTS} = {options.pipeline_parallel_split_points} makes {num_stages} stages; {name} on {degree} "
            f"ranks takes {allowed}"
        )
    return owners


def _owners_of_csv(name: str, degree: int) -> list[int]:
    """The rank of each stage, by the rows of a CSV file: a row for each rank, cells such as 0F3 (stage 0, forward,
    micro-batch 3), B for its backward, or I and W for the gradients of inputs and of weights."""
    option, rows = f"{SCHEDULE}_csv = {name}", _read_csv(name)
    if len(rows) != degree:
        raise UserError(f"{option} has {len(rows)} rows; {PIPELINE_DEGREE} = {degree} needs one for each rank")
    owners: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for cell in row:
            action = _ACTION.fullmatch(cell)
            if action is None:
                raise UserError(f"{option}: {cell} is no action; they look like 0F3, 0B3, 0I3 or 0W3")
            if row.count(cell) > 1:
                raise UserError(f"{option}: {cell} stands more than once")
            stage = int(action[1])
            if owners.setdefault(stage, rank) != rank:
                raise UserError(f"{option}: stage {stage} stands in the rows of ranks {owners[stage]} and {rank}")
    if sorted(owners) != list(range(len(owners))) or set(owners.values()) != set(range(degree)):
        raise UserError(f"{option}: stages must be numbered from 0 without a gap, and each rank must have one")
    return [owners[stage] for stage in range(len(owners))]


def _read_csv(name: str) -> list[list[str]]:
    """The cells of a schedule's rows, without empty ones."""
    option, path = f"{SCHEDULE}_csv = {name}", find_resource(name)
    if not path.is_file():
        raise UserError(f"{option}: no such file")
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = [[cell.strip() for cell in row if cell.strip()] for row in csv.reader(file)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{option}: no text with commas ({error})") from error
    return [row for row in rows if row]


def _block_number(point: str, blocks: list[tuple[str, nn.Module]]) -> int:
    numbers = [number for number, (name, _) in enumerate(blocks) if name == point or name.endswith(f".{point}")]
    if len(numbers) != 1:
        raise UserError(f"{SPLIT_POINTS}: {point} is no block; they are {blocks[0][0]} to {blocks[-1][0]}")
    return numbers[0]


def _work(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> list[float]:
    """Relative work of each block, by its parameters; that of the output projection counts for the last."""
    work = [float(sum(parameter.numel() for parameter in block.parameters())) for _, block in blocks]
    work[-1] += model.get_output_embeddings().weight.numel()
    return work


def balanced_starts(work: Sequence[float], num_stages: int) -> list[int]:
    """Where each of ``num_stages`` stages begins so that the one with the most work has as little as possible."""
    count = len(work)
    totals = [0.0]
    for each in work:
        totals.append(totals[-1] + each)
    best = [totals[stop] for stop in range(count + 1)]  # the most work of a stage, of the first ``stop`` blocks in one
    cuts: list[list[int]] = []
    for number in range(2, num_stages + 1):
        now, cut = [float("inf")] * (count + 1), [0] * (count + 1)
        for stop in range(number, count + 1):
            for start in range(number - 1, stop):
                most = max(best[start], totals[stop] - totals[start])
                if most < now[stop]:
                    now[stop], cut[stop] = most, start
        best = now
        cuts.append(cut)
    starts, stop = [], count
    for cut in reversed(cuts):
        stop = cut[stop]
        starts.append(stop)
    return [0, *reversed(starts)]


def check_microbatches(options: Experimental, num_sequences: int) -> int:
    """The number of micro-batches of a step, from the job and a rank's sequences in a step.

    Raises:
        UserError: fewer micro-batches than ranks of a pipeline, or a number that does not divide the sequences.
    """
    number = options.pipeline_parallel_microbatches or num_sequences
    if num_sequences % number:
        raise UserError(
            f"experimental.pipeline_parallel_microbatches = {number} does not divide a rank's {num_sequences} "
            "sequences of a step (batch_size * gradient_accumulation_steps)"
        )
    if number < options.pipeline_parallel_degree:
        raise UserError(
            f"{PIPELINE_DEGREE} = {options.pipeline_parallel_degree}: a step has {number} micro-batches only "
            "(training.batch_size * gradient_accumulation_steps); it takes one for each rank at least"
        )
    return number
