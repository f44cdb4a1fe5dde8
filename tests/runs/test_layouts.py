"""Whole runs whose losses must not depend on how a model is laid over processes.

All runs of one number of processes share one group; see ``harness``.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from flame.launch import exit_codes
from tests.runs.harness import ROOT, Job, run_ranks, train_all

FAMILIES = ("transformer", "gla", "gated_deltanet")
# Others whose modules tensor parallelism knows; tests/parallel/test_tensor.py looks at the gradients of all of them.
SHARED_FAMILIES = ("hybrid", "hgrn2", "kda", "rwkv7", "mamba2", "samba", "sba", "llama")
# AdamW's update does not change when all gradients are scaled; plain gradient descent's does.
SGD = {"optimizer.name": "SGD", "optimizer.beta1": "0", "optimizer.lr": "0.1", "optimizer.weight_decay": "0"}
BF16 = {"training.mixed_precision_param": "bfloat16"}
# What the jobs of those set that are no family; their model is gated_deltanet unless they name one. Mamba-2's blocks
# give float32.
VARIANTS = {
    "sgd": SGD,
    "unclipped_sgd": SGD | {"optimizer.lr": "0.05", "training.max_norm": "inf"},
    "plain": {"training.varlen": "false", "training.context_len": "64"},
    "bf16_transformer": BF16 | {"model.config": "configs/debug/transformer.json"},
    "bf16_mamba2": BF16 | {"model.config": "configs/debug/mamba2.json"},
}


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
    norm_tolerance: float = 1e-3  # relative


LAYOUTS = {
    "FSDP2": Layout(2, families=(*FAMILIES, "sgd", "unclipped_sgd", "plain", "delta_net", "rwkv7", "llama", "sba")),
    "FSDP4": Layout(4),
    "DDP2": Layout(2, {"training.data_parallel_replicate_degree": "2"}),
    "FSDP2_full": Layout(2, {"activation_checkpoint.mode": "full"}, families=("gated_deltanet",)),
    "FSDP2_op": Layout(
        2,
        {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"},
        families=("transformer",),
    ),
    "FSDP2_norm": Layout(
        2,
        {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "norm"},
        families=("gla",),
    ),
    "TP2": Layout(2, TP2, families=(*FAMILIES, "sgd", *SHARED_FAMILIES)),
    "TP2_whole_loss": Layout(2, TP2 | {"training.disable_loss_parallel": "true"}, families=("gla",)),
    "FSDP2xTP2": Layout(4, TP2),
    "PP2": Layout(2, PP2, 1e-4, "no_boundaries", (*FAMILIES, "sgd", "llama", "gpt2", "rwkv7", "hgrn2")),
    "PP2xFSDP2": Layout(4, PP2, 1e-4, "no_boundaries"),
    "PP2xTP2": Layout(4, PP2 | TP2, 1e-4, "no_boundaries"),
    "PP2_looped": Layout(2, PP2 | {SCHEDULE: "Interleaved1F1B"}, 1e-4, families=("transformer",)),
    "PP2_V": Layout(2, PP2 | {SCHEDULE: "ZBVZeroBubble"}, 1e-4, families=("untied",)),
    "PP2_csv": Layout(2, PP2 | {f"{SCHEDULE}_csv": "tests/runs/schedule.csv"}, 1e-4, families=("gated_deltanet",)),
    "PP2_bf16": Layout(2, PP2, 2e-3, families=("bf16_transformer", "bf16_mamba2"), norm_tolerance=1e-2),
    "TP2_bf16": Layout(2, TP2, 1e-2, families=("bf16_transformer",), norm_tolerance=1e-2),
    "PP2_full": Layout(2, PP2 | {"activation_checkpoint.mode": "full"}, 1e-4, families=("gated_deltanet",)),
    "CP2": Layout(2, CP2, 1e-4, "no_exchange"),
    "CP2_alltoall": Layout(
        2,
        CP2 | {"experimental.context_parallel_rotate_method": "alltoall"},
        1e-4,
        "no_exchange",
        ("transformer", "stickbreaking_attn"),
    ),
    "CP2_states": Layout(2, CP2, 1e-4, "no_state", ("delta_net", "hgrn2", "retnet", "gsa", "kda", "rwkv7", "hybrid")),
    # From random weights the states of Mamba and Mamba-2 move these losses by 4e-5 only; their operators are compared
    # without states in tests/parallel/test_context_pieces.py.
    "CP2_others": Layout(2, CP2, 1e-4, "no_exchange", ("mamba", "mamba2", "samba", "attnres", "plain")),
    "CP2_full": Layout(2, CP2 | {"activation_checkpoint.mode": "full"}, 1e-4, families=("gated_deltanet",)),
    "CP2xFSDP2": Layout(4, CP2, 1e-4, "no_exchange"),
    # Mamba-2 computes its recurrence again in the backward, when another micro-batch has gone forward since.
    "PP2xCP2": Layout(4, PP2 | CP2, 1e-4, "no_exchange", ("transformer", "gated_deltanet", "mamba2")),
    "TP2xCP2": Layout(4, TP2 | CP2, 1e-4, "no_exchange"),
    "HSDP2x2": Layout(4, {"training.data_parallel_replicate_degree": "2"}),
}
CELLS = [(name, family) for name, layout in LAYOUTS.items() for family in layout.families]
STEPS = 10
# Of the families that only a few layouts run, and of runs with a fault: errors of a layout show in the first step.
STEPS_OF_OTHERS = 4


# Llama learns of documents in another way than the other families that a pipeline takes. What the states of each family
# are worth is seen in tests/parallel/test_context_pieces.py.
BROKEN = [
    (layout, family)
    for layout, family in CELLS
    if LAYOUTS[layout].fault
    and (family in (*FAMILIES, "llama") or family in LAYOUTS[layout].families[:2])
    # Of four processes one family each.
    and (family == "gated_deltanet" or LAYOUTS[layout].world_size == 2)
]


def data_ranks(layout: Layout) -> int:
    """Processes of a layout that take sequences of their own."""
    ranks = layout.world_size
    for key, value in layout.options.items():
        if key.endswith("_degree") and "data" not in key:
            ranks //= int(value)
    return ranks


def sequences_of(name: str, family: str) -> int:
    """Sequences in a step of a cell.

    Two are quick. Four give a pipeline micro-batches, four ranks one each, and the other layouts two to accumulate,
    which gla and tensor parallelism do.
    """
    is_quick = data_ranks(LAYOUTS[name]) < 4 and "PP" not in name and ("TP" not in name or "CP" in name)
    return 2 if is_quick and family != "gla" else 4


def options_of(family: str) -> dict[str, str]:
    folder = "tests/runs" if family in ("untied", "retnet", "llama", "gpt2", "attnres") else "configs/debug"
    name = "gated_deltanet" if family in VARIANTS else family
    model = {"model.config": f"{folder}/{name}.json", "training.num_streams": "60"}
    return model | VARIANTS.get(family, {})


def make_job(folder, name: str, family: str, fault: str = "") -> Job:
    """The cell's job."""
    layout, sequences = LAYOUTS[name], sequences_of(name, family)
    # Two to a row where nothing is cut along rows or by micro-batches: half as many forward passes.
    rows = 2 if name == "TP2" else 1
    accumulation = sequences // data_ranks(layout) // rows
    return _job(folder / f"{name}_{family}_{fault}", family, rows, accumulation, layout, fault)


def make_single(folder, family: str, sequences: int) -> Job:
    """The family's job on one process."""
    rows = 1 if family.startswith("bf16") else 2
    return _job(folder / f"one_{family}_{sequences}", family, rows, sequences // rows, Layout(1), "")


def _job(path, family: str, rows: int, accumulation: int, layout: Layout, fault: str) -> Job:
    steps = {
        "training.batch_size": str(rows),
        "training.gradient_accumulation_steps": str(accumulation),
        "training.steps": str(STEPS if family in (*FAMILIES, "sgd") and not fault else STEPS_OF_OTHERS),
        "checkpoint.enable_checkpoint": "false",
    }
    # Three sequences, which no step of a layout divides into.
    held_out = {"validation.dataset": "builtin:stdlib", "validation.num_tokens": "192"} if not fault else {}
    return Job(path, options_of(family) | steps | held_out | layout.options, fault)


# Hybrids on PP2xTP2 of which some stages are refused, by what their config sets: the last, or each for its own reason.
LAST_STAGE = {"attn": {"layers": [3], "num_heads": 3}}
UNEVEN = "training.tensor_parallel_degree = 2 does not divide"
REFUSED = {
    "one stage": (LAST_STAGE, f"error: ranks 2, 3: {UNEVEN} model.layers.3.attn.num_heads = 3\n"),
    "each stage": (
        LAST_STAGE | {"num_heads": 3},
        f"error: ranks 0, 1: {UNEVEN} model.layers.0.attn.num_heads = 3\n"
        f"ranks 2, 3: {UNEVEN} model.layers.3.attn.num_heads = 3\n",
    ),
}
# One run whose model is laid out another way for every two of its steps, and on one process for the rest.
COURSE = [PP2 | {SCHEDULE: "Interleaved1F1B"}, TP2, PP2, CP2]


@dataclass
class Table:
    """Jobs that have run.

    Attributes:
        jobs: by layout and family, with ``broken`` behind those with a fault.
        single: jobs of one process by family and sequences in a step.
        moved: the job of ``COURSE``.
        refused: each rank's exit code, by the name in ``REFUSED``.
        outputs: all that the ranks of four printed.
    """

    jobs: dict[tuple[str, ...], Job]
    single: dict[tuple[str, int], Job]
    moved: Job
    refused: dict[str, list[int]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)

    def one(self, layout: str, family: str) -> Job:
        """The job of one process that a cell must agree with."""
        return self.single[family, sequences_of(layout, family)]


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Table:
    """Everything in this file, in one group of two processes, one of four and two of one."""
    folder = tmp_path_factory.mktemp("layouts")
    moved = options_of("gated_deltanet") | {"training.gradient_accumulation_steps": "4"}
    course = [
        Job(folder / "moved", moved | layout | {"training.steps": str(2 * number)})
        for number, layout in enumerate(COURSE, 1)
    ]
    made = Table({}, {}, Job(folder / "moved", moved))
    two, four = jobs_of(folder, 2), jobs_of(folder, 4)
    train_all([*two.values(), *course], 2)
    refused = [make_refused(folder, name) for name in REFUSED]
    codes, made.outputs = run_ranks([*four.values(), *refused], 4)
    failed = [job.folder.name for job, code in zip(four.values(), codes[0], strict=False) if code]
    assert not failed, f"{failed} failed:\n" + "\n".join(output[-6000:] for output in made.outputs)
    made.refused = {name: [rank[len(four) + i] for rank in codes] for i, name in enumerate(REFUSED)}
    kinds = dict.fromkeys((family, sequences_of(name, family)) for name, family in CELLS)
    made.single = {kind: make_single(folder, *kind) for kind in kinds}
    alone = [made.moved, *made.single.values()]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train_all, (alone[::2], alone[1::2])))
    made.jobs = two | four
    return made


def jobs_of(folder, world_size: int) -> dict[tuple[str, ...], Job]:
    """The jobs of the layouts of that many processes."""
    cells = [cell for cell in CELLS if LAYOUTS[cell[0]].world_size == world_size]
    broken = {(*cell, "broken"): make_job(folder, *cell, LAYOUTS[cell[0]].fault) for cell in BROKEN if cell in cells}
    return {cell: make_job(folder, *cell) for cell in cells} | broken


def make_refused(folder, name: str) -> Job:
    """A job of ``REFUSED``."""
    config = json.loads((ROOT / "configs/debug/hybrid.json").read_text()) | REFUSED[name][0]
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return Job(folder / name, {"model.config": str(path), "training.gradient_accumulation_steps": "4"} | PP2 | TP2)


@pytest.mark.parametrize(("layout", "family"), CELLS)
def test_the_losses_are_those_of_one_process(table, layout, family):
    one, job = table.one(layout, family), table.jobs[layout, family]
    assert one.series("loss") == pytest.approx(job.series("loss"), abs=LAYOUTS[layout].tolerance)
    assert one.series("grad_norm") == pytest.approx(job.series("grad_norm"), rel=LAYOUTS[layout].norm_tolerance)
    assert one.series("tokens") == job.series("tokens")
    (held_out,) = one.series("val_loss")
    assert job.series("val_loss") == pytest.approx([held_out], abs=LAYOUTS[layout].tolerance)
    losses = one.series("loss")
    assert losses[0] > 8 and losses[-1] < losses[0], "the runs must learn, or agreeing means nothing"


@pytest.mark.parametrize("family", LAYOUTS["PP2_bf16"].families)
def test_stages_hand_on_all_that_a_block_would_see(table, family):
    """In bfloat16 the first loss is that of one process to the bit."""
    assert table.jobs["PP2_bf16", family].series("loss")[0] == table.one("PP2_bf16", family).series("loss")[0]


@pytest.mark.parametrize(("layout", "family"), BROKEN)
def test_a_broken_layout_is_seen(table, layout, family):
    one, broken = table.one(layout, family), table.jobs[layout, family, "broken"]
    losses = broken.series("loss")
    assert len(losses) == STEPS_OF_OTHERS
    distance = max(abs(a - b) for a, b in zip(one.series("loss"), losses, strict=False))
    assert distance > 5 * LAYOUTS[layout].tolerance


def test_a_checkpoint_goes_on_in_any_layout(table):
    stayed, moved = table.single["gated_deltanet", 4], table.moved
    assert [row["step"] for row in moved.rows()] == list(range(1, 11))
    assert moved.series("loss") == pytest.approx(stayed.series("loss"), abs=1e-4)
    assert moved.series("grad_norm") == pytest.approx(stayed.series("grad_norm"), rel=1e-3)
    assert moved.series("tokens") == stayed.series("tokens")


@pytest.mark.parametrize("name", REFUSED)
def test_what_some_ranks_refuse_all_of_them_do(table, name):
    """Whatever each rank finds in its own stage, all end at once, with every reason and the ranks that have it."""
    assert table.refused[name] == [exit_codes.USER_ERROR] * 4
    assert all(REFUSED[name][1] in output for output in table.outputs)
