"""The dry run as a command: what it prints, and its exit codes."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from flame.launch import exit_codes, launcher
from flame.models.backend import uninstall
from flame.train import main

JOB = (
    *("--model.config", "configs/debug/gla.json", "--model.tokenizer_path", "configs/tokenizer"),
    *("--training.dataset", "builtin:stdlib", "--training.varlen"),
)


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """A process of its own, as far as this one can be; log and operators are put back afterwards."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    log = logging.getLogger("flame")
    level, propagate, handlers = log.level, log.propagate, list(log.handlers)
    yield
    log.setLevel(level)
    log.propagate, log.handlers = propagate, handlers
    uninstall()


def test_a_plan_is_printed_and_nothing_is_written(capsys, tmp_path):
    folder = tmp_path / "run"
    options = ("--job.dry_run", "--job.world_size", "6", "--training.tensor_parallel_degree", "2")
    assert main([*JOB, *options, "--job.dump_folder", str(folder)]) == exit_codes.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("gla: ") and lines[0].endswith("on 6 GPUs, shard 3 x tensor 2")
    assert "  shard           3   0, 2, 4" in lines
    assert "  tensor          2   0, 1" in lines
    assert any(line.endswith("GiB at most; documents as long as they may be") for line in lines)
    assert any(line.startswith("  tensor parallelism") for line in lines)
    assert not folder.exists()


def test_an_estimate_of_memory_is_part_of_it(capsys):
    assert main([*JOB, "--memory_estimation.enabled", "--training.compile"]) == exit_codes.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "memory of a GPU (GiB)"
    assert lines[-1].startswith("  as without training.compile")


def test_what_could_not_run_is_refused_by_its_exit_code(capsys):
    options = ("--job.dry_run", "--job.world_size", "8", "--training.tensor_parallel_degree", "8")
    assert main([*JOB, *options]) == exit_codes.USER_ERROR
    assert "does not divide" in capsys.readouterr().out


def test_several_processes_are_planned_by_one(capsys, monkeypatch):
    monkeypatch.setenv("NGPU", "4")
    assert launcher.main([*JOB, "--job.dry_run"]) == exit_codes.OK
    assert "on 4 GPUs, shard 4" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")  # as under a torchrun of one's own
    assert main([*JOB, "--job.dry_run"]) == exit_codes.OK
    assert capsys.readouterr().out == ""


AUTO = ("--activation_checkpoint.mode", "auto", "--training.batch_size", "auto")


def test_a_plan_says_what_auto_would_choose(capsys, tmp_path):
    options = ("--job.dry_run", *AUTO, "--job.device_memory_gib", "0.5", "--job.dump_folder", str(tmp_path))
    assert main([*JOB, *options]) == exit_codes.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("activation_checkpoint.mode = auto: none; planned none 0.")
    assert lines[0].endswith(" of 0.45 GiB usable (0.50 of job.device_memory_gib, 10% kept back)")
    chosen = int(re.match(r"training\.batch_size = auto: (\d+); planned 1: ", lines[1])[1])
    assert chosen > 1
    tokens = next(line for line in lines if line.startswith("  tokens "))
    assert int(tokens.split()[1].replace(",", "")) == chosen * 2048
    assert lines[-1].endswith(" GiB less than the 0.50 of job.device_memory_gib")


def test_a_plan_says_how_far_a_job_is_from_a_given_memory(capsys):
    options = ("--memory_estimation.enabled", "--job.device_memory_gib", "0.01")
    assert main([*JOB, *options]) == exit_codes.OK
    assert capsys.readouterr().out.splitlines()[-1].endswith(" GiB more than the 0.01 of job.device_memory_gib")


def test_a_plan_with_auto_needs_a_memory(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*JOB, "--job.dry_run", *AUTO]) == exit_codes.USER_ERROR
    assert "activation_checkpoint.mode = auto: this machine has no GPU" in capsys.readouterr().out
