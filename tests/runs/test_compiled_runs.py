"""Whole runs with compiled blocks and with float8: what equals a run without them, and what is only near it."""

from __future__ import annotations

import pytest

from tests.runs.harness import Job, run_ranks

COMPILE = {"training.compile": "true"}
FLOAT8 = {"model.converters": "float8", "float8.emulate": "true"}
GATHER = {
    "float8.enable_fsdp_float8_all_gather": "true",
    "float8.precompute_float8_dynamic_scale_for_fsdp": "true",
}
FSDP2 = {"training.gradient_accumulation_steps": "2"}
TP2 = {"training.tensor_parallel_degree": "2"}
PP2 = {"experimental.pipeline_parallel_degree": "2"}
HALF = {"training.steps": "2"}
FULL = {"activation_checkpoint.mode": "full"}

# Processes -> name: the runs of one folder, one after the other (each goes on from the last one's checkpoint), of a
# family. All take the same four sequences a step.
RUNS: dict[int, dict[str, tuple[str, list[dict[str, str]]]]] = {
    1: {
        "transformer": ("transformer", [{}]),
        "gla": ("gla", [{}]),
        "gated_deltanet": ("gated_deltanet", [{}]),
        "half compiled": ("transformer", [HALF, COMPILE]),
        "compiled gla": ("gla", [COMPILE | FULL]),
        "compiled gated_deltanet": ("gated_deltanet", [COMPILE]),
        "float8": ("transformer", [FLOAT8]),
    },
    2: {
        "compiled TP2": ("transformer", [COMPILE | TP2]),
        "compiled PP2": ("transformer", [COMPILE | PP2]),
        "float8 FSDP2": ("transformer", [FLOAT8 | FSDP2]),
        "half gathered in float8": ("transformer", [FLOAT8 | FSDP2 | GATHER | HALF, FLOAT8 | FSDP2]),
    },
}
SAID = {
    1: (
        "torch.compile: 4 blocks",
        "activation checkpointing (full): 4 of 4 blocks",
        "float8 (tensorwise, emulated): 28 linear layers of the blocks converted, 0 left",
    ),
    2: ("torch.compile: 8 mixers and MLPs of 4 blocks", "torch.compile: 3 blocks"),
}


def jobs_of(folder, family: str, parts: list[dict[str, str]]) -> list[Job]:
    model = {"model.config": f"configs/debug/{family}.json", "training.num_streams": "60"}
    steps = {"training.gradient_accumulation_steps": "4", "training.steps": "3"}
    return [Job(folder, model | steps | part) for part in parts]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Job]:
    """The last run of each folder, by name."""
    folder = tmp_path_factory.mktemp("compile")
    done = {}
    for world_size, rows in RUNS.items():
        jobs = {name: jobs_of(folder / name.replace(" ", "_"), *row) for name, row in rows.items()}
        codes, outputs = run_ranks([job for parts in jobs.values() for job in parts], world_size)
        assert not any(codes[0]), outputs[0][-6000:]
        for text in SAID[world_size]:
            assert text in outputs[0]
        assert "recompile_limit" not in outputs[0]
        done |= {name: parts[-1] for name, parts in jobs.items()}
    return done


@pytest.mark.parametrize(
    ("name", "plain", "tolerance"),
    [
        ("half compiled", "transformer", 1e-5),
        ("compiled gla", "gla", 1e-5),
        ("compiled gated_deltanet", "gated_deltanet", 1e-5),
        ("compiled TP2", "transformer", 1e-5),
        ("compiled PP2", "transformer", 1e-5),
        # The checkpoint of the first half holds plain weights, which a run without float8 gathering goes on from.
        ("half gathered in float8", "float8 FSDP2", 1e-5),
    ],
)
def test_the_losses_are_the_same(runs, name, plain, tolerance):
    expected, actual = runs[plain], runs[name]
    assert actual.series("step") == [1, 2, 3]
    assert actual.series("loss") == pytest.approx(expected.series("loss"), abs=tolerance)
    assert actual.series("grad_norm") == pytest.approx(expected.series("grad_norm"), rel=1e-3)
    assert expected.series("loss")[-1] < expected.series("loss")[0]


@pytest.mark.parametrize("name", ["float8", "float8 FSDP2"])
def test_float8_rounds_and_learns(runs, name):
    pairs = list(zip(runs["transformer"].series("loss"), runs[name].series("loss"), strict=True))
    assert all(1e-5 < abs(plain - rounded) < 1e-2 for plain, rounded in pairs)
