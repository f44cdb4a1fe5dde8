"""The comparison script's rows as a test: against float64 everywhere, against FLA's Triton kernels on a GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from flame.models.backend import setup_backend, uninstall
from flame.paths import find_resource

FAMILIES = sorted(path.stem for path in find_resource("configs/debug").glob("*.json"))
SCRIPT = Path(__file__).parents[3] / "utils" / "compare_backends.py"
# What bfloat16 inputs and outputs cost an operator, and a model of four layers; TF32 products in Triton's float32.
BFLOAT16 = {"operator": 1e-2, "model": 0.1}
TRITON_FLOAT32 = {"operator": 3e-3, "model": 1e-2}
# Models whose gradients cancel or are ruled by a few tokens: RetNet's norm divides by outputs near zero at the start of
# documents (q_1 . k_1 may be 0), and GSA's queries and keys choose among slots that are almost equal before training.
LOOSER = {"model retnet": 4, "model gsa": 4}


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPT.parent))  # as Python does for a script: its cases lie beside it
    spec = importlib.util.spec_from_file_location("compare_backends", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare_backends"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPT.parent))
    uninstall()


def check(rows):
    assert rows
    for row in rows:
        kind = "model" if row.case.startswith("model") else "operator"
        factor = LOOSER.get(row.case, 1)
        assert row.reference < factor * (1e-5 if row.dtype == "float32" else BFLOAT16[kind]), row
        if row.between is not None:
            assert row.between < factor * (TRITON_FLOAT32[kind] if row.dtype == "float32" else BFLOAT16[kind]), row


def test_every_operator_matches_float64(script):
    setup_backend("reference", "cpu")
    cases = [str(index) for index in range(len(script.operators(torch.device("cpu"))))]
    check([row for case in [*cases, "attention"] for row in script.compare(case, "cpu")])


def test_the_table_has_a_line_a_tensor(script, tmp_path, capsys):
    script.main(["--device", "cpu", "--models", "gla", "--output", str(tmp_path / "table.md")])
    table = (tmp_path / "table.md").read_text()
    assert "| model gla | bfloat16 | d model.layers.*.attn.q_proj.weight |" in table
    assert table in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_models_agree_with_triton(script, family):
    check(script.compare(f"model {family}", "cuda"))


@pytest.mark.gpu
def test_operators_agree_with_triton(script):
    cases = range(len(script.operators(torch.device("cpu"))))
    rows = [row for case in [*cases, "attention"] for row in script.compare(str(case), "cuda")]
    # FLA's gradient through the final state of documents shorter than the convolution is off; training asks for none.
    check([row for row in rows if row.case != "causal_conv1d, with final state"])
