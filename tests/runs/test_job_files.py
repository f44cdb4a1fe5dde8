"""Every shipped job file that asks for it (``job.use_for_integration_test``) starts and takes two steps."""

from __future__ import annotations

import tomllib

import pytest

from tests.runs.harness import ROOT, Job, run_jobs


def marked_files() -> list[str]:
    files = [*ROOT.glob("configs/*.toml"), *ROOT.glob("flame/models/*.toml")]
    jobs = {str(path.relative_to(ROOT)): tomllib.loads(path.read_text())["job"] for path in files}
    return [name for name, job in jobs.items() if job.get("use_for_integration_test")]


@pytest.mark.parametrize("name", marked_files())
def test_job_file_runs(name, tmp_path):
    job = Job(tmp_path / "run", {"job.config_file": name, "training.steps": "2"})
    assert run_jobs([job]) == [0]
    assert job.series("step") == [1, 2]


def test_the_demo_is_among_them():
    assert "configs/debug.toml" in marked_files()
