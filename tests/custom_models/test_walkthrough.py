"""docs/custom_models.md, followed to the letter: its files are written, its commands run, its model trains."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flame.paths import PACKAGE_ROOT
from tests.runs.harness import ROOT, user_environment

DOCUMENT = (PACKAGE_ROOT.parent / "docs" / "custom_models.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT, flags=re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder outside the checkout in which the document's training command has run."""
    folder = tmp_path_factory.mktemp("walkthrough")
    (folder / "gated_recurrence.py").write_text(blocks("python")[0])
    (folder / "gated_recurrence.json").write_text(blocks("json")[0])
    follow(folder, blocks("bash")[0])
    return folder


def follow(folder: Path, commands: str) -> str:
    """Run commands of the document in a folder; fails where one of them does."""
    commands = commands.replace("bash train.sh", f"bash {ROOT / 'train.sh'}")
    environment = user_environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(
        ["bash", "-e", "-c", commands], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_model_is_about_a_hundred_lines():
    assert len(blocks("python")[0].splitlines()) <= 120


def test_it_trains(folder):
    rows = [json.loads(line) for line in (folder / "exp/recurrence/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 40
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert rows[-1]["tflops"] > 0


def test_its_log_has_no_complaint(folder):
    log = (folder / "exp/recurrence/logs/train.log").read_text()
    assert "FLOPs:" not in log
    assert "initial weights:" not in log
    assert "model.layers.*.mixer.decay" in log


def test_it_converts_both_ways_and_generates_after_reload(folder):
    follow(folder, next(block for block in blocks("bash") if "convert_hf_to_dcp" in block))
    assert (folder / "exp/again/checkpoint/step-0/manifest.json").exists()
    reload = [sys.executable, "-c", blocks("python")[1]]
    done = subprocess.run(reload, cwd=folder, env=user_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def ")
