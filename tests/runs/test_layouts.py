"""Whole runs whose losses must not depend on how a model is laid over processes.

All runs of one number of processes share one group; see ``harness``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.runs.harness import Job, train_all

FAMILIES = ("transformer", "gla", "gated_deltanet")
# Others whose modules tensor parallelism knows; tests/parallel/test_tensor.py looks at each of their gradients. Retnet
# has a larger norm_eps than in configs/debug: its first tokens' outputs are so small that rounding would grow.
SHARED_FAMILIES = (
    *("hybrid", "gsa", "hgrn2", "retnet", "kda", "rwkv7", "mamba2", "samba", "stickbreaking_attn", "sba"),
    *("llama", "qwen3"),
)
# AdamW's update does not change when all gradients are scaled; plain gradient descent's does.
SGD = {"optimizer.name": "SGD", "optimizer.beta1": "0", "optimizer.lr": "0.1", "optimizer.weight_decay": "0"}


PP2 = {"experimental.pipeline_parallel_degree": "2"}
TP2 = {"training.tensor_parallel_degree": "2"}
CP2 = {"experimental.context_parallel_degree": "2"}
SCHEDULE = "experimental.pipeline_parallel_schedule"


@dataclass(frozen=True)
class Layout:
    """How processes share the work, and how far rounding may move a loss."""

    world_size: int
    options: dict[str, str] = field(default_factory=dict)
    tolerance: float = 1e-5
    fault: str = ""  # one that must be seen in the losses
    families: tuple[str, ...] = (*FAMILIES, "sgd")


LAYOUTS = {
    "FSDP2": Layout(2),
    "FSDP4": Layout(4),
    "DDP2": Layout(2, {"training.data_parallel_replicate_degree": "2"}),
    "FSDP2_full": Layout(2, {"activation_checkpoint.mode": "full"}),
    "FSDP2_op": Layout(
        2, {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
    ),
    "TP2": Layout(2, TP2, families=(*FAMILIES, "sgd", *SHARED_FAMILIES)),
    "TP2_whole_loss": Layout(2, TP2 | {"training.disable_loss_parallel": "true"}),
    "FSDP2xTP2": Layout(4, TP2),
    "PP2": Layout(2, PP2, 1e-4, "no_boundaries"),
    "PP2xFSDP2": Layout(4, PP2, 1e-4, "no_boundaries"),
    "PP2xTP2": Layout(4, PP2 | TP2, 1e-4, "no_boundaries"),
    "PP2_looped": Layout(2, PP2 | {SCHEDULE: "Interleaved1F1B"}, 1e-4, families=("transformer", "gated_deltanet")),
    "PP2_V": Layout(2, PP2 | {SCHEDULE: "ZBVZeroBubble"}, 1e-4, families=("untied",)),
    "PP2_csv": Layout(
        2, PP2 | {f"{SCHEDULE}_csv": "tests/runs/schedule.csv"}, 1e-4, families=("transformer", "gated_deltanet")
    ),
    "PP2_full": Layout(2, PP2 | {"activation_checkpoint.mode": "full"}, 1e-4, families=("gated_deltanet",)),
    "CP2": Layout(2, CP2, 1e-4, "no_exchange"),
    "CP2_alltoall": Layout(
        2, CP2 | {"experimental.context_parallel_rotate_method": "alltoall"}, 1e-4, families=("transformer",)
    ),
    "CP2_others": Layout(2, CP2, 1e-4, families=("delta_net", "hybrid")),
    "CP2xFSDP2": Layout(4, CP2, 1e-4, "no_exchange"),
    "TP2xCP2": Layout(4, TP2 | CP2, 1e-4, "no_exchange"),
    "HSDP2x2": Layout(4, {"training.data_parallel_replicate_degree": "2"}),
}
CELLS = [(name, family) for name, layout in LAYOUTS.items() for family in layout.families]


# Of four processes one family each: a run takes ten seconds.
BROKEN = [
    (layout, family)
    for layout, family in CELLS
    if LAYOUTS[layout].fault and family in (FAMILIES if LAYOUTS[layout].world_size == 2 else ("gated_deltanet",))
]


def options_of(family: str) -> dict[str, str]:
    folder = "tests/runs" if family in ("untied", "retnet", "llama", "qwen3") else "configs/debug"
    name = "gated_deltanet" if family == "sgd" else family
    model = {"model.config": f"{folder}/{name}.json", "training.num_streams": "60"}
    return model | (SGD if family == "sgd" else {})


def make_job(folder, name: str, family: str, fault: str = "") -> Job:
    """The cell's job; every layout takes the same four sequences a step."""
    layout = LAYOUTS[name]
    degrees = [int(value) for key, value in layout.options.items() if key.endswith("_degree") and "data" not in key]
    data = layout.world_size
    for degree in degrees:
        data //= degree
    steps = {"training.gradient_accumulation_steps": str(4 // data)}
    return Job(folder / f"{name}_{family}_{fault}", options_of(family) | steps | layout.options, fault)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[tuple[str, str], Job]:
    """Every cell's job, and one of one process for each family under the layout ``one``, all run."""
    folder = tmp_path_factory.mktemp("layouts")
    one = {"training.gradient_accumulation_steps": "4"}
    jobs = {
        ("one", family): Job(folder / f"one_{family}", options_of(family) | one)
        for family in dict.fromkeys(family for _, family in CELLS)
    }
    train_all(list(jobs.values()))
    for world_size in sorted({layout.world_size for layout in LAYOUTS.values()}):
        cells = [cell for cell in CELLS if LAYOUTS[cell[0]].world_size == world_size]
        group = {cell: make_job(folder, *cell) for cell in cells}
        broken = [cell for cell in BROKEN if cell in cells]
        group |= {(*cell, "broken"): make_job(folder, *cell, LAYOUTS[cell[0]].fault) for cell in broken}
        train_all(list(group.values()), world_size)
        jobs |= group
    return jobs


@pytest.mark.parametrize(("layout", "family"), CELLS)
def test_the_losses_are_those_of_one_process(runs, layout, family):
    one, job = runs["one", family], runs[layout, family]
    assert one.series("loss") == pytest.approx(job.series("loss"), abs=LAYOUTS[layout].tolerance)
    assert one.series("grad_norm") == pytest.approx(job.series("grad_norm"), rel=1e-3)
    assert one.series("tokens") == job.series("tokens")
    losses = one.series("loss")
    assert losses[0] > 8 and losses[-1] < losses[0], "the runs must learn, or agreeing means nothing"


@pytest.mark.parametrize(("layout", "family"), BROKEN)
def test_a_broken_layout_is_seen(runs, layout, family):
    one, broken = runs["one", family], runs[layout, family, "broken"]
    distance = max(abs(a - b) for a, b in zip(one.series("loss"), broken.series("loss"), strict=True))
    assert distance > 5 * LAYOUTS[layout].tolerance


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> tuple[Job, Job]:
    """A run of one process, and one that goes on from its checkpoints with its model laid out another way each time."""
    folder = tmp_path_factory.mktemp("course")
    options = options_of("gated_deltanet") | {"training.gradient_accumulation_steps": "4"}
    layouts = [PP2 | {SCHEDULE: "Interleaved1F1B"}, TP2, CP2]
    train_all(
        [
            Job(folder / "moved", options | layout | {"training.steps": str(3 * number)})
            for number, layout in enumerate(layouts, 1)
        ],
        2,
    )
    stayed, moved = Job(folder / "stayed", options), Job(folder / "moved", options)
    train_all([stayed, moved])
    return stayed, moved


def test_a_checkpoint_goes_on_in_any_layout(course):
    stayed, moved = course
    assert [row["step"] for row in moved.rows()] == list(range(1, 11))
    assert moved.series("loss") == pytest.approx(stayed.series("loss"), abs=1e-4)
    assert moved.series("grad_norm") == pytest.approx(stayed.series("grad_norm"), rel=1e-3)
    assert moved.series("tokens") == stayed.series("tokens")
