"""utils/slurm/train.slurm, with stand-ins for Slurm's own commands."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SRUN = """#!/usr/bin/env bash
echo "srun $* NNODE=$NNODE NGPU=$NGPU $MASTER_ADDR:$MASTER_PORT" >> "$RECORD"
{body}
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then printf 'node7\\nnode8\\n'; else echo "scontrol $*" >> "$RECORD"; fi
"""


@pytest.fixture
def slurm(tmp_path):
    """Starts the script where ``srun`` does what its body says; what is called goes to ``record``."""

    def start(body: str) -> subprocess.Popen:
        for name, text in {"srun": SRUN.format(body=body), "scontrol": SCONTROL}.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        variables = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(tmp_path / "record"),
            "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "42",
            "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8",
        }  # fmt: skip
        command = ["bash", str(ROOT / "utils" / "slurm" / "train.slurm"), "--job.dump_folder", "exp/a b"]
        return subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.DEVNULL)

    start.record = tmp_path / "record"
    return start


def test_the_layout_is_handed_to_the_launcher(slurm):
    assert slurm("exit 0").wait(30) == 0
    assert slurm.record.read_text() == (
        "srun --kill-on-bad-exit=1 bash train.sh --job.dump_folder exp/a b NNODE=2 NGPU=8 node7:20042\n"
    )


def test_a_failed_run_is_not_requeued(slurm):
    assert slurm("exit 3").wait(30) == 3
    assert "requeue" not in slurm.record.read_text()


def preempt(slurm, code: int) -> list[str]:
    """What a run records that ends with this code when it is asked to stop."""
    process = slurm(f"trap 'echo stopped >> \"$RECORD\"; exit {code}' USR1; while :; do sleep 0.05; done")
    deadline = time.monotonic() + 30
    while not slurm.record.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == code
    return slurm.record.read_text().splitlines()[1:]


def test_a_preempted_run_saves_and_is_requeued(slurm):
    assert preempt(slurm, 75) == ["stopped", "scontrol requeue 42"]


def test_a_preempted_run_whose_slower_nodes_srun_kills_is_requeued(slurm):
    assert preempt(slurm, 143) == ["stopped", "scontrol requeue 42"]


def test_a_preempted_run_that_crashes_is_not_requeued(slurm):
    assert preempt(slurm, 1) == ["stopped"]


def test_a_killed_run_that_was_not_asked_to_stop_is_not_requeued(slurm):
    assert slurm("exit 137").wait(30) == 137
    assert "requeue" not in slurm.record.read_text()
