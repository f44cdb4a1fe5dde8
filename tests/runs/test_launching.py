"""Layouts as a user starts them: ``bash train.sh`` with several processes, on one machine and on two.

The table of layouts itself shares processes (``test_layouts``); here each cell starts its own.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from flame.launch.layout import free_port
from tests.runs.harness import ROOT, Job, launch, user_environment

OPTIONS = {
    "model.config": "configs/debug/transformer.json",
    "training.steps": "4",
    "training.num_streams": "60",
    "job.description": "two words = one run",
    "checkpoint.enable_checkpoint": "false",
}
PP2 = {"experimental.pipeline_parallel_degree": "2", "training.gradient_accumulation_steps": "4"}
TP2 = {"training.tensor_parallel_degree": "2", "training.gradient_accumulation_steps": "4"}
CP2 = {"experimental.context_parallel_degree": "2", "training.gradient_accumulation_steps": "4"}
# On one machine, with two processes: the options, whose output is shown, and how far a loss may be off.
CELLS = {
    "FSDP2": ({"training.gradient_accumulation_steps": "2", "training.num_workers": "1"}, "0", 1e-5),
    "TP2": (TP2, "0,1", 1e-5),
    "PP2": (PP2, "0", 1e-4),
    "CP2": (CP2, "1", 1e-4),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs with a blank")


@pytest.fixture(scope="module")
def one(folder) -> Job:
    """The run of one process."""
    job = Job(folder / "one", OPTIONS | {"training.gradient_accumulation_steps": "4"})
    done = launch(*job.argv, NGPU="1")
    assert done.returncode == 0, done.stderr[-3000:]
    return job


def steps_shown(console: str, rank: int) -> list[float]:
    """The losses that the console has of a rank."""
    return [float(loss) for loss in re.findall(rf"^\[rank {rank}\] .*step +\d+/4  loss +([\d.]+)", console, re.M)]


def assert_same_losses(job: Job, one: Job, tolerance: float) -> None:
    assert job.series("loss") == pytest.approx(one.series("loss"), abs=tolerance)
    assert job.series("grad_norm") == pytest.approx(one.series("grad_norm"), rel=1e-3)


@pytest.mark.parametrize("name", CELLS)
def test_two_processes(folder, one, name):
    options, shown, tolerance = CELLS[name]
    job = Job(folder / name, OPTIONS | options)
    done = launch(*job.argv, NGPU="2", LOG_RANK=shown)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_losses(job, one, tolerance)
    # Rank 0 has the loss to say, whichever rank computes it; LOG_RANK says who is heard.
    seen = steps_shown(done.stdout, 0)
    assert seen == ([round(loss, 4) for loss in job.series("loss")] if "0" in shown else [])
    assert not steps_shown(done.stdout, 1)
    logs = {path.parent.name: path.read_text() for path in job.folder.glob("logs/*/attempt_0/*/stdout.log")}
    assert logs.keys() == {"0", "1"}
    assert "step 4/4" in logs["0"] and "step 4/4" not in logs["1"]
    assert json.loads((job.folder / "env.json").read_text())["world_size"] == 2


def test_two_machines_of_two_processes(folder, one):
    """FSDP2xTP2, a launcher for each machine: both are this one, and meet at a port of it."""
    job = Job(folder / "two machines", OPTIONS | TP2 | {"training.gradient_accumulation_steps": "2"})
    variables = {"NNODE": "2", "NGPU": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    launchers = [
        subprocess.Popen(
            ["bash", str(ROOT / "train.sh"), *job.argv],
            cwd=ROOT,
            env=user_environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        consoles = [launcher.communicate(timeout=300)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n".join(consoles)[-6000:]
    assert_same_losses(job, one, 1e-5)
    assert sorted(len(steps_shown(console, 0)) for console in consoles) == [0, 4]
    assert json.loads((job.folder / "env.json").read_text())["world_size"] == 4
    logs = list(job.folder.glob("logs/*/*/attempt_0/*/stdout.log"))
    assert len(logs) == 4 and len({path.parents[3] for path in logs}) == 2, "a folder for each launcher"
