"""A job's plan in words."""

from __future__ import annotations

from collections.abc import Iterator

from flame.dry_run.capacity import gib
from flame.dry_run.fit import Fit
from flame.dry_run.plan import JobPlan, RankPlan
from flame.metrics.device import GIB
from flame.parallel.degrees import AXES, Degrees
from flame.training.auto import TIGHT

_SHOWN_RANKS = 4
# Of the memory table, with their widths.
_COLUMNS = {
    "rank": 6,
    "stages": 8,
    "blocks": 8,
    "parameters": 12,
    "shard": 10,
    "weights": 9,
    "gradients": 11,
    "optimizer": 11,
    "gathered": 10,
    "unreduced": 11,
    "in flight": 11,
    "activations": 13,
    "peak": 9,
}


def lines_of(plan: JobPlan) -> Iterator[str]:
    """The whole plan."""
    degrees = plan.degrees
    gpus = "1 GPU" if degrees.world == 1 else f"{degrees.world} GPUs"
    yield f"{plan.family}: {plan.num_parameters / 1e6:,.1f}M parameters on {gpus}, {degrees.describe()}"
    yield ""
    yield from mesh_lines(degrees)
    yield ""
    yield from step_lines(plan)
    yield ""
    yield from memory_lines(plan)
    yield ""
    yield from traffic_lines(plan)


def auto_lines(fit: Fit) -> Iterator[str]:
    """What auto has come to, before the plan of it."""
    yield from fit.lines()
    if fit.is_tight:
        yield TIGHT
    yield ""


def room_lines(plan: JobPlan, limit_gib: float) -> Iterator[str]:
    """Whether the plan fits a GPU of the given memory, 0 for none given."""
    if limit_gib:
        room = int(limit_gib * GIB) - plan.heaviest.memory.peak
        yield ""
        side = "less" if room >= 0 else "more"
        yield f"{gib(abs(room))} GiB {side} than the {limit_gib:,.2f} of job.device_memory_gib"


def mesh_lines(degrees: Degrees) -> Iterator[str]:
    """Each axis of the mesh, with the ranks of rank 0's group along it."""
    yield "mesh (outermost first; the ranks of rank 0's group)"
    stride = degrees.world
    for axis in AXES:
        size = getattr(degrees, axis)
        stride //= size
        ranks = [str(stride * place) for place in range(size)]
        if size > _SHOWN_RANKS + 1:
            ranks[_SHOWN_RANKS - 1 : -1] = ["..."]
        yield f"  {axis:<12}{size:>5}   {', '.join(ranks)}"
    yield f"  parameters are sharded over {degrees.fsdp}, sequences are dealt to {degrees.data}"


def step_lines(plan: JobPlan) -> Iterator[str]:
    """What a step computes."""
    yield "a step"
    yield f"  tokens            {plan.tokens:>16,}"
    yield f"  micro-batches     {plan.num_microbatches:>16,} a rank"
    yield f"  FLOPs             {plan.flops:>16.4g}, {plan.flops / plan.degrees.world:.4g} a rank"
    if plan.degrees.pipeline > 1:
        yield f"  pipeline bubble   {plan.waiting:>16.1%} of the time"


def memory_lines(plan: JobPlan) -> Iterator[str]:
    """What each rank of a pipeline has, and its memory."""
    yield "memory of a GPU (GiB)"
    yield "".join(f"{name:>{width}}" for name, width in _COLUMNS.items())
    for rank in plan.ranks:
        yield _memory_line(rank)
    heaviest = plan.heaviest
    if heaviest.memory.host:
        yield f"  {gib(heaviest.memory.host)} GiB of the host's memory for each: weights, gradients and optimizer"
    place = f", on pipeline rank {heaviest.rank}" if len(plan.ranks) > 1 else ""
    yield f"  {gib(heaviest.memory.peak)} GiB at most{place}; documents as long as they may be"
    yield from (f"  {note}" for note in plan.notes)


def _memory_line(rank: RankPlan) -> str:
    memory = rank.memory
    cells = [
        str(rank.rank),
        ", ".join(map(str, rank.stages)),
        str(rank.num_blocks),
        f"{rank.num_parameters / 1e6:,.1f}M",
        f"{rank.num_kept / 1e6:,.1f}M",
        *map(gib, (memory.weights, memory.gradients, memory.optimizer, memory.gathered, memory.unreduced)),
        str(rank.in_flight),
        *map(gib, (memory.activations, memory.peak)),
    ]
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, _COLUMNS.values(), strict=True))


def traffic_lines(plan: JobPlan) -> Iterator[str]:
    """What each rank of a pipeline sends."""
    yield "sent by a GPU in a step (GiB)"
    kinds = [kind for kind in dict.fromkeys(kind for rank in plan.ranks for kind in rank.sent)]
    for kind in kinds:
        values = [rank.sent[kind] for rank in plan.ranks]
        if any(values):
            yield f"  {kind:<28}" + "".join(f"{gib(value):>10}" for value in values)
    if not any(any(rank.sent.values()) for rank in plan.ranks):
        yield "  nothing"
