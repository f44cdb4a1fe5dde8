"""Whole runs with held-out data: the training stays what it is, and each validation is logged once."""

from __future__ import annotations

import json
import math

import pytest

from flame.launch import exit_codes
from flame.metrics.report import load_metrics, summarize
from tests.runs.harness import Job, run_jobs, train_all
from tests.runs.test_late_rows import untimed

STEPS = 7


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Job]:
    folder = tmp_path_factory.mktemp("validation")
    data = folder / "held_out.jsonl"
    texts = [f"def add_{number}(a, b):\n    return a + b + {number}\n" for number in range(40)]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    held_out = {"validation.dataset": str(data), "validation.interval": "3", "validation.num_tokens": "320"}
    options = {"training.steps": str(STEPS), "checkpoint.interval": "3", "checkpoint.keep_latest_k": "0"}
    jobs = {
        "without": Job(folder / "without", options),
        "with": Job(folder / "with", options | held_out),
        "late": Job(folder / "late", options | held_out, "ahead"),
        "first part": Job(folder / "parts", options | held_out | {"training.steps": "4"}),
        "parts": Job(folder / "parts", options | held_out | {"checkpoint.load_step": "3"}),
        "stopped": Job(folder / "stopped", options | held_out, "stopped_in_validation_6"),
        "stopped again": Job(folder / "stopped", options | held_out, "stopped_in_validation_7"),
        "made up": Job(folder / "stopped", options | held_out),
        "finished": Job(folder / "stopped", options | held_out),
    }
    codes = dict(zip(jobs, run_jobs(list(jobs.values())), strict=True))
    assert codes == dict.fromkeys(jobs, exit_codes.OK) | dict.fromkeys(
        ("stopped", "stopped again"), exit_codes.PREEMPTED
    )
    return jobs


def validations(job: Job) -> list[dict]:
    return [row for row in job.rows() if "val_loss" in row]


def test_training_is_what_it_is_without(runs):
    trained = [row for row in untimed(runs["with"].rows()) if "loss" in row]
    assert trained == untimed(runs["without"].rows())


@pytest.mark.parametrize("name", ["with", "late", "parts", "made up"])
def test_each_is_logged_behind_its_step_once(runs, name):
    rows = runs[name].rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 3, 4, 5, 6, 6, 7, 7]
    assert [row["step"] for row in validations(runs[name])] == [3, 6, 7]
    assert all(set(row) == {"step", "val_loss", "val_ppl", "time"} for row in validations(runs[name]))


@pytest.mark.parametrize("name", ["late", "parts", "made up"])
def test_it_says_the_same_later_and_after_a_resume_or_a_request_to_stop(runs, name):
    assert untimed(validations(runs[name])) == untimed(validations(runs["with"]))


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory) -> dict[str, tuple[Job, Job]]:
    """Of each schedule, a run without held-out data and one that validates between its steps."""
    folder = tmp_path_factory.mktemp("pipelines")
    held_out = {"validation.dataset": "builtin:stdlib", "validation.interval": "1", "validation.num_tokens": "192"}
    jobs = {}
    for schedule in ("1F1B", "ZBVZeroBubble"):
        options = {
            "model.config": "tests/runs/untied.json",
            "experimental.pipeline_parallel_degree": "2",
            "experimental.pipeline_parallel_schedule": schedule,
            "training.batch_size": "4",
            "training.num_streams": "60",
            "training.steps": "3",
            "checkpoint.enable_checkpoint": "false",
        }
        jobs[schedule] = (Job(folder / schedule, options), Job(folder / f"{schedule}_validated", options | held_out))
    train_all([job for pair in jobs.values() for job in pair], world_size=2)
    return jobs


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_pipeline_goes_on_as_without(pipelines, schedule):
    without, validated = pipelines[schedule]
    assert [row["step"] for row in validations(validated)] == [1, 2, 3]
    assert [row for row in untimed(validated.rows()) if "loss" in row] == untimed(without.rows())
    assert validated.series("val_loss") == pytest.approx(pipelines["1F1B"][1].series("val_loss"), abs=1e-5)


def test_it_falls_and_is_reported(runs):
    losses = [row["val_loss"] for row in validations(runs["with"])]
    assert 9 > losses[0] > losses[1] > losses[2] > 5
    assert all(row["val_ppl"] == pytest.approx(math.exp(row["val_loss"])) for row in validations(runs["with"]))
    summary = summarize(load_metrics(runs["with"].folder))
    assert f"val      {losses[0]:.4f} -> {losses[2]:.4f}, lowest {losses[2]:.4f}" in summary
