"""The fault commands with a few faults each; docs/reliability.md has the figures of the long ones."""

from __future__ import annotations

import subprocess
import sys

from tests.faults.kill import compare_layouts, compare_runs, compare_validations
from tests.runs.harness import ROOT, user_environment

ROWS = [
    dict.fromkeys(("max_loss", "grad_norm", "lr", "tokens", "skipped_steps"), 0)
    | {"step": step, "loss": 1 / step, "data_hash": "ab"}
    for step in range(1, 5)
]


def test_a_few_kills_damages_and_a_full_disk():
    command = [sys.executable, "-m", "tests.faults"]
    done = subprocess.run(command, cwd=ROOT, env=user_environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "nothing lost: all steps there once, every number as in the undisturbed run" in done.stdout
    assert "each was found" in done.stdout
    assert "made by (1, 2, 4) ranks: bit for bit equal" in done.stdout
    assert "every number as on a large disk" in done.stdout or "full disk: skipped" in done.stdout


def test_the_comparison_sees_what_is_lost():
    assert compare_runs(ROWS, ROWS, 4, exact=True) == []
    assert "missing or doubled" in compare_runs(ROWS, ROWS[:3], 4, exact=True)[0]
    assert "missing or doubled" in compare_runs(ROWS, [*ROWS[:2], *ROWS[1:]], 4, exact=True)[0]
    other = [*ROWS[:3], ROWS[3] | {"loss": 0.26, "data_hash": "cd"}]
    assert compare_runs(ROWS, other, 4, exact=True) == ["step 4: loss 0.25 != 0.26", "step 4: data_hash ab != cd"]
    assert compare_runs(ROWS, other, 4, exact=False) == ["step 4: data_hash ab != cd"]
    assert compare_layouts(ROWS, [row | {"loss": row["loss"] + 2e-4} for row in ROWS[:2]])[1] == [
        f"step {step}: the losses of the layouts differ by 2.0e-04" for step in (1, 2)
    ]


def test_the_comparison_sees_validations_that_are_lost():
    whole = [{"step": step, "val_loss": 1 / step} for step in (3, 6, 9)]
    assert compare_validations(whole, whole, exact=True) == []
    for other in (whole[::2], [*whole, whole[-1]], [*whole, {"step": 10, "val_loss": 0.1}]):
        (fault,) = compare_validations(whole, other, exact=True)
        assert "missing or doubled" in fault
    other = [*whole[:2], {"step": 9, "val_loss": 0.5}]
    assert compare_validations(whole, other, exact=False) == []
    assert compare_validations(whole, other, exact=True) == [f"step 9: val_loss {1 / 9} != 0.5"]
