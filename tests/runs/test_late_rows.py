"""Whole runs whose host is ahead of the device, as on a GPU: rows are written later, and are the same rows."""

from __future__ import annotations

import pytest

from flame.launch import exit_codes
from flame.metrics.keys import TRAIN_KEYS
from tests.runs.harness import Job, run_ranks

MEASURED = {"tps", "tflops", "mfu", "step_time_s", "data_time_pct", "memory_gib", "time"}
NAN = {"optimizer.lr": "1e30", "training.skip_nan_inf": "true", "training.max_consecutive_skips": "3"}
OPTIONS = {
    "every step": {"checkpoint.interval": "3"},
    "every fourth step": {"metrics.log_freq": "4", "checkpoint.interval": "4", "training.log_data_hash": "true"},
    "in the background": {"checkpoint.interval": "2", "checkpoint.async_mode": "async"},
    "nan": NAN | {"training.steps": "40"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The rows of each run that waits for its rows and that does not, and rank 0's exit codes."""
    folder = tmp_path_factory.mktemp("late")
    jobs = [
        Job(folder / f"{name}{fault}", options, fault) for name, options in OPTIONS.items() for fault in ("", "ahead")
    ]
    jobs.append(Job(folder / "unreadable", fault="ahead_and_unreadable_at_step_6"))
    codes, outputs = run_ranks(jobs, world_size=1)
    return {job.folder.name: (job.rows(), code) for job, code in zip(jobs, codes[0], strict=True)}, outputs[0]


def untimed(rows: list[dict]) -> list[dict]:
    """The rows without what no two runs share."""
    return [{key: value for key, value in row.items() if key not in MEASURED} for row in rows]


@pytest.mark.parametrize("name", OPTIONS)
def test_rows_are_those_of_a_run_that_waits(runs, name):
    (plain, code), (late, late_code) = runs[0][name], runs[0][name + "ahead"]
    assert code == late_code == (exit_codes.USER_ERROR if name == "nan" else exit_codes.OK)
    assert untimed(plain) == untimed(late)
    assert list(plain[0]) == list(late[0]) and set(TRAIN_KEYS) < set(late[0])
    assert all(row["step_time_s"] > 0 for row in late)


def test_steps_that_are_logged(runs):
    steps = {name: [row["step"] for row in rows] for name, (rows, _) in runs[0].items()}
    assert steps["every stepahead"] == list(range(1, 11))
    assert steps["every fourth stepahead"] == [1, 4, 8, 10]


def test_a_run_that_fails_writes_its_last_row(runs):
    rows, code = runs[0]["unreadable"]
    assert code == exit_codes.USER_ERROR
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert "a row that cannot be read" in runs[1]
