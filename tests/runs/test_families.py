"""Every family's CPU train, varlen isolation, init, resume, export and decode, and what docs/models.md says of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flame.models.backend import REFERENCE_FAMILIES
from tests.runs.family_worker import CELLS, FAMILIES
from tests.runs.harness import ROOT
from utils.family_table import PAGE, STORE, families_table, fill, gpu_table, read

# What a family refuses on a CPU: (family, cell) -> words of the reason.
REFUSED = {("stickbreaking_attn", "decode"): "does not support KV-cache decoding"}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """Family -> cell -> result, of one process that runs them all."""
    output: Path = tmp_path_factory.mktemp("families") / "cpu.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.runs.family_worker", "--output", str(output)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(output.read_text())["cpu"]


def test_every_family_of_the_reference_backend_has_a_row():
    assert set(REFERENCE_FAMILIES) | {"hybrid", "sba"} <= set(FAMILIES)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_cell(results, family, cell):
    result = results[family][cell]
    if (family, cell) in REFUSED:
        assert result["state"] == "refused" and REFUSED[family, cell] in result["why"]
    else:
        assert result == {"state": "passed"}


def test_the_page_says_what_was_found(results):
    said = read(STORE)["cpu"]
    assert said == results, (
        "docs/families.json is out of date: python -m tests.runs.family_worker --output cpu.json, "
        "then python utils/family_table.py --merge cpu.json"
    )


def test_the_page_is_that_of_the_stored_results():
    stored, page = read(STORE), PAGE.read_text(encoding="utf-8")
    assert fill(page, "families", families_table(stored)) == page
    assert fill(page, "GPU runs", gpu_table(stored)) == page
