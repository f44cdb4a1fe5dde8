"""Whole runs whose numbers must agree: resume against no interruption."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.harness import Job, run_jobs


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> dict[str, Job]:
    """An undisturbed run, and runs that stopped after steps 4 and 7 and went on."""
    folder = tmp_path_factory.mktemp("resumed")
    common = {"checkpoint.interval": "4", "training.num_workers": "1", "training.log_data_hash": "true"}
    whole = Job(folder / "whole", common | {"checkpoint.interval": "3"})
    parts = [Job(folder / "parts", common | {"training.steps": str(last)}) for last in (4, 7, 10)]
    changed = Job(folder / "parts", common | {"training.steps": "12", "optimizer.lr": "5e-4"})
    again = Job(folder / "whole", common)
    bad = Job(folder / "whole", common | {"checkpoint.load_step": "999", "training.steps": "20"})
    assert run_jobs([whole, *parts, changed, again, bad]) == [0, 0, 0, 0, 0, 0, 2]
    return {"whole": whole, "parts": parts[-1]}


def test_resume_is_bit_exact(resumed):
    whole, parts = resumed["whole"], resumed["parts"]
    for key in ("loss", "max_loss", "grad_norm", "lr", "tokens", "data_hash"):
        assert parts.series(key)[:10] == whole.series(key), key


def test_the_log_says_how_many_blocks_fsdp_took(resumed):
    log = (resumed["whole"].folder / "logs" / "train.log").read_text()
    assert "FSDP: 4 blocks, sharded over 1" in log


def test_no_step_is_missing_or_doubled(resumed):
    assert resumed["parts"].series("step") == list(range(1, 13))


def test_a_changed_learning_rate_applies(resumed):
    assert resumed["parts"].series("lr")[9:] == [1e-3, 5e-4, 5e-4]


def test_checkpoints_are_where_they_are_said_to_be(resumed):
    folder: Path = resumed["whole"].folder / "checkpoint"
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-10", "step-9"]  # keep_latest_k = 2


def test_the_run_folder_explains_itself(resumed):
    names = {path.name for path in resumed["whole"].folder.iterdir()}
    assert names >= {"config.toml", "model_config.json", "metrics.jsonl", "env.json", "checkpoint", "loss.svg"}
