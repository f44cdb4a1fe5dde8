"""utils/compare_attention.py on a CPU, where only the reference is available."""

import json

import pytest
import torch

from utils import compare_attention

SMALL = ["--device", "cpu", "--dtype", "float32", "--seq_len", "64", "--context_len", "32"]


def test_figures_of_small_shapes(tmp_path, capsys):
    configs = "configs/debug/transformer.json,configs/debug/samba.json"
    assert compare_attention.main([*SMALL, "--configs", configs, "--json", str(tmp_path / "a.json")]) == 0
    text = capsys.readouterr().out
    assert "transformer: 64 tokens in documents of up to 32, 4 heads of 32, float32 on CPU" in text
    assert "window 64" in text and text.count("\n| sdpa |") == 2
    result = json.loads((tmp_path / "a.json").read_text())
    assert (result["device"], result["torch"], len(result["rows"])) == ("CPU", torch.__version__, 2)
    row = result["rows"][0]
    assert (row["model"], row["backend"], row["shape"]["num_tokens"]) == ("transformer", "sdpa", 64)
    flops = 4 * 32 * 4 * sum(n * (n + 1) // 2 for n in (32, 16, 16))
    assert row["forward_tflops"] == pytest.approx(flops / row["forward_ms"] / 1e9)
    assert row["backward_tflops"] == pytest.approx(2.5 * flops / row["backward_ms"] / 1e9)


def test_a_failure_stands_in_the_table():
    shape = compare_attention.AttentionShape(4, 4, 16, 1, 64, 32)
    assert compare_attention.line_of("fa4", shape, "RuntimeError: a | b") == "| fa4 | RuntimeError: a / b | | | | |"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backends", "fa3"], "'fa3' needs a CUDA device, this is cpu; available here: sdpa"),
        pytest.param(
            ["--device", "cuda"],
            "--device cuda: torch finds no GPU here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        (["--configs", "configs/gla_340M.json"], "has no softmax attention that flame computes"),
    ],
)
def test_what_cannot_be_compared_is_refused(options, message, capsys):
    assert compare_attention.main([*SMALL, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--seq_len", "-5"], "-5: must be a whole number, at least 1"),
        (["--context_len", "0"], "0: must be a whole number, at least 1"),
        (["--json", "no/such/folder/a.json"], "no/such/folder/a.json: must be a file in a folder that exists"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_measured(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        compare_attention.main([*SMALL, *options])
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.gpu
def test_the_default_shapes_on_a_gpu(tmp_path):
    assert compare_attention.main(["--seq_len", "8192", "--json", str(tmp_path / "a.json")]) == 0
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert {row["model"] for row in rows} == {"transformer_340M", "transformer_1B", "transformer_7B"}
    varlen = [row for row in rows if row["backend"] == "varlen"]
    assert all(row["memory_bytes"] > 0 and row["forward_tflops"] > 0 for row in varlen) and len(varlen) == 3
