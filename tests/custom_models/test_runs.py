"""Whole runs with custom models: training, resuming, export and reload of sba, and what a job is refused for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flame.launch import exit_codes
from flame.utils.convert_dcp_to_hf import main as convert_dcp_to_hf
from flame.utils.convert_hf_to_dcp import main as convert_hf_to_dcp
from tests.runs.harness import ROOT, Job, launch, run_jobs, user_environment

SBA = {
    "model.config": "configs/debug/sba.json",
    "training.steps": "40",
    "optimizer.lr": "5e-3",
    "checkpoint.interval": "20",
    "checkpoint.keep_latest_k": "0",
}
EXPORTED = SBA | {"checkpoint.export_hf": "true", "job.sample_prompt": "def ", "job.sample_tokens": "4"}

RELOAD = """
import sys, torch, custom_models.sba
from transformers import AutoModelForCausalLM, AutoTokenizer
model, other = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in sys.argv[1:])
prompt = AutoTokenizer.from_pretrained(sys.argv[1])("def ", return_tensors="pt").input_ids
assert torch.equal(model(prompt).logits, other(prompt).logits)
new = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
plain = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=False)
assert torch.equal(new, plain) and new.shape[1] == prompt.shape[1] + 6
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Runs: ``whole``; ``halves``, stopped after 20 steps and gone on."""
    folder = tmp_path_factory.mktemp("sba")
    halves = [Job(folder / "halves", SBA | {"training.steps": steps}) for steps in ("20", "40")]
    assert run_jobs([Job(folder / "whole", EXPORTED), *halves]) == [0, 0, 0]
    return folder


def test_the_loss_falls(folder):
    losses = Job(folder / "whole").series("loss")
    assert sum(losses[-5:]) / 5 < losses[0] - 1


def test_a_resumed_run_goes_on_bit_by_bit(folder):
    whole, halves = (Job(folder / name).series("loss") for name in ("whole", "halves"))
    # The learning rate of the first half is the same: it is constant after no warm-up.
    assert halves == whole


def test_flops_are_counted(folder):
    log = (folder / "whole" / "logs" / "train.log").read_text()
    assert "FLOPs:" not in log
    assert Job(folder / "whole").series("tflops")[-1] > 0


def test_conversion_both_ways_and_reload_in_another_process(folder):
    again = folder / "again"
    checkpoint = ["--checkpoint", str(again / "checkpoint" / "step-0")]
    assert convert_hf_to_dcp(["--model", str(folder / "whole"), *checkpoint, "--quiet"]) == exit_codes.OK
    assert convert_dcp_to_hf(["--path", str(again), "--quiet"]) == exit_codes.OK
    reload = [sys.executable, "-c", RELOAD, str(folder / "whole"), str(again)]
    done = subprocess.run(reload, cwd=ROOT, env=user_environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_wrong_code_ends_a_conversion_in_one_line(folder, tmp_path, capsys):
    broken = tmp_path / "broken_for_conversion.py"
    broken.write_text("1 / 0")
    code = convert_dcp_to_hf(["--path", str(folder / "halves"), "--custom_models", str(broken), "--quiet"])
    assert code == exit_codes.USER_ERROR
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"--custom_models {broken}: importing it fails: ZeroDivisionError")


def test_a_job_ends_before_its_data_where_code_is_missing_or_broken(tmp_path):
    missing = launch("--job.config_file=configs/debug.toml", "--model.custom_models=no_such_model")
    assert missing.returncode == exit_codes.USER_ERROR
    (line,) = missing.stderr.strip().splitlines()
    assert line.startswith('--model.custom_models = ["no_such_model"]: neither a package in custom_models')

    (tmp_path / "empty_model.py").write_text("x = 1\n")
    empty = Job(tmp_path / "run", {"experimental.custom_model_path": str(tmp_path / "empty_model.py")})
    broken = Job(tmp_path / "run", {"model.custom_models": str(tmp_path / "broken_model.py")})
    (tmp_path / "broken_model.py").write_text("import no_such_library\n")
    assert run_jobs([empty, broken]) == [exit_codes.USER_ERROR] * 2
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
