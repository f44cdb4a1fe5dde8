"""Whole runs that must not go on as if nothing were wrong, and what they leave behind."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from flame.launch import exit_codes
from tests.runs.harness import ROOT, Job, run_jobs

OK, REFUSED = exit_codes.OK, exit_codes.USER_ERROR
BERT = {
    "model_type": "bert", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 4096, "max_position_embeddings": 128,
}  # fmt: skip
PLAIN = {"training.varlen": "false", "training.context_len": "64", "training.steps": "2"}


@dataclass(frozen=True)
class Row:
    """One run: its folder, what it sets, and its exit code."""

    folder: str
    options: dict[str, str]
    code: int


def table(folder: Path) -> dict[str, Row]:
    """Runs in the order in which they happen; several share a folder."""
    gla = json.loads((ROOT / "configs/debug/gla.json").read_text())
    (folder / "gla.json").write_text(json.dumps(gla | {"norm_eps": 0.1}))
    (folder / "bert.json").write_text(json.dumps(BERT))
    base = {"model.config": "configs/debug/gla.json", "checkpoint.interval": "2", "checkpoint.keep_latest_k": "0"}
    return {
        "first": Row("branch", base | {"training.steps": "6"}, OK),
        "same shapes, another norm_eps": Row(
            "branch", base | {"model.config": str(folder / "gla.json"), "training.steps": "8"}, REFUSED
        ),
        "another family": Row(
            "branch", base | {"model.config": "configs/debug/delta_net.json", "training.steps": "8"}, REFUSED
        ),
        "another optimizer": Row("branch", base | {"optimizer.name": "SGD", "training.steps": "8"}, REFUSED),
        "from step 2 on another course": Row(
            "branch", base | {"checkpoint.load_step": "2", "training.steps": "5", "optimizer.lr": "1e-2"}, OK
        ),
        "on from there": Row("branch", base | {"training.steps": "7", "optimizer.lr": "1e-2"}, OK),
        "a seed beside trained steps": Row("branch", base | {"checkpoint.create_seed_checkpoint": "true"}, REFUSED),
        "not causal": Row("bert", PLAIN | {"model.config": str(folder / "bert.json")}, REFUSED),
        "snapshot without a GPU": Row("snapshot", {"profiling.enable_memory_snapshot": "true"}, REFUSED),
        "nan": Row(
            "nan",
            {
                "optimizer.lr": "1e30",
                "training.skip_nan_inf": "true",
                "training.steps": "40",
                "training.max_consecutive_skips": "3",
            },
            REFUSED,
        ),
    }


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> tuple[Path, dict[str, tuple[int, int]]]:
    """The folder of the runs, and each one's (expected, actual) exit code."""
    folder = tmp_path_factory.mktemp("refusals")
    rows = table(folder)
    codes = run_jobs([Job(folder / row.folder, row.options) for row in rows.values()])
    return folder, {name: (row.code, code) for (name, row), code in zip(rows.items(), codes, strict=True)}


def test_exit_codes(outcome):
    wrong = {name: codes for name, codes in outcome[1].items() if codes[0] != codes[1]}
    assert wrong == {}, "(expected, actual)"


def test_another_course_leaves_no_stale_steps(outcome):
    folder = outcome[0] / "branch"
    rows = Job(folder).rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["lr"] for row in rows] == [1e-3] * 2 + [1e-2] * 5
    names = {path.name for path in (folder / "checkpoint").iterdir()}
    assert names >= {"step-2", "step-4", "step-5", "step-6", "step-7", "step-4.replaced", "step-6.replaced"}


def test_a_job_that_did_not_start_leaves_no_folder(outcome):
    assert not (outcome[0] / "snapshot").exists()


def test_the_run_gives_up_after_skips_in_a_row(outcome):
    rows = Job(outcome[0] / "nan").rows()
    assert rows[-1]["skipped_steps"] >= 3
    assert rows[-1]["step"] < 40
