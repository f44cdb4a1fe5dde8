"""Compiling beside the start: who begins it, who waits, and what it has to say."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flame.cli.parse import parse_args
from flame.launch import ahead

JOB = ["--model.config", "configs/gla_340M.json", "--model.tokenizer_path", "configs/tokenizer"]
JOB += ["--training.dataset", "builtin:stdlib", "--job.compile_ahead"]


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(ahead, "count_gpus", lambda environ: 1)


def test_a_job_is_compiled_once_for_each_cache(tmp_path, one_gpu):
    environ = {"TRITON_CACHE_DIR": str(tmp_path)}
    job, longer = parse_args(JOB), parse_args([*JOB, "--training.seq_len", "4096"])
    renamed = parse_args([*JOB, "--job.dump_folder", "elsewhere"])
    assert ahead.is_worthwhile(job, environ)
    ahead.stamp_of(job, environ).touch()
    assert not ahead.is_worthwhile(job, environ)
    assert not ahead.is_worthwhile(renamed, environ)
    assert ahead.is_worthwhile(longer, environ)
    assert ahead.is_worthwhile(job, {"TRITON_CACHE_DIR": str(tmp_path / "other")})


@pytest.mark.parametrize(
    "words",
    [
        ["--model.backend", "reference"],
        ["--checkpoint.create_seed_checkpoint"],
        ["--training.batch_size", "auto"],
    ],
)
def test_jobs_without_kernels_to_compile(words, tmp_path, one_gpu):
    assert not ahead.is_worthwhile(parse_args([*JOB, *words]), {"TRITON_CACHE_DIR": str(tmp_path)})


def test_it_must_be_asked_for(tmp_path, one_gpu):
    job = [word for word in JOB if word != "--job.compile_ahead"]
    assert not ahead.is_worthwhile(parse_args(job), {"TRITON_CACHE_DIR": str(tmp_path)})


def test_without_a_gpu_there_is_nothing_to_compile(tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "count_gpus", lambda environ: 0)
    assert not ahead.is_worthwhile(parse_args(JOB), {"TRITON_CACHE_DIR": str(tmp_path)})


def test_nothing_to_wait_for():
    assert ahead.wait_until_compiled({}) == ""


def test_a_trainer_waits_until_the_other_process_is_gone(tmp_path):
    path = tmp_path / "told"
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print('here', flush=True);"
        "sys.stdin.read(); file.write('all compiled')"
    )
    command = [sys.executable, "-c", code, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        environ = {ahead.FILE: str(path)}
        told = ahead.wait_until_compiled(environ, longest_s=0.2)
        assert told == "kernels are still being compiled after 0 s; not waiting any longer"
        process.stdin.close()
        assert ahead.wait_until_compiled(environ) == "all compiled"


def test_the_process_ends_when_the_launcher_does():
    code = "from flame.launch import ahead; import time; ahead.end_with_the_launcher(); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    process.stdin.close()
    assert process.wait(timeout=50) == 1


def test_what_goes_wrong_is_told_and_leaves_no_stamp(tmp_path, monkeypatch):
    kernels = pytest.importorskip("flame.dry_run.kernels")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "not" / "there" / "yet"))
    monkeypatch.setattr(ahead, "end_with_the_launcher", lambda: None)
    monkeypatch.setattr(os, "nice", lambda increment: increment)

    def run() -> str:
        with open(tmp_path / "told", "w+") as file:
            ahead.main(str(os.dup(file.fileno())), "1", *JOB)
            return Path(file.name).read_text()

    def broken(config, world_size):
        raise RuntimeError("no such luck\nand more")

    stamp = ahead.stamp_of(parse_args(JOB), os.environ)
    monkeypatch.setattr(kernels, "compile_kernels", broken)
    assert run() == "no kernels were compiled ahead, each is when it is needed: RuntimeError: no such luck"
    assert not stamp.exists()
    monkeypatch.setattr(kernels, "compile_kernels", lambda config, world_size: f"compiled for {world_size}")
    assert run() == "compiled for 1"
    assert stamp.exists()


def test_the_started_process_holds_the_lock(tmp_path, monkeypatch):
    (tmp_path / "told").touch()
    started = []

    def popen(command, pass_fds, **options):
        started.append((command, os.dup(pass_fds[0])))

    monkeypatch.setattr(subprocess, "Popen", popen)
    environ = {}
    ahead.start(JOB, 8, environ)
    ((command, number),) = started
    assert command[:3] == [sys.executable, "-m", "flame.launch.ahead"] and command[4:] == ["8", *JOB]
    with open(environ[ahead.FILE]) as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.close(number)
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


@pytest.mark.parametrize("error", [OSError("no locks here"), subprocess.TimeoutExpired("nvidia-smi", 60)])
def test_a_machine_that_does_not_let_it_goes_on_without(error, tmp_path, one_gpu, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr(ahead, "start", fail)
    environ = {"TRITON_CACHE_DIR": str(tmp_path)}
    assert ahead.start_if_worthwhile(parse_args(JOB), JOB, 1, environ) is None
    assert capsys.readouterr().out == f"flame: no kernels are compiled ahead: {error}\n"
    assert ahead.FILE not in environ


def test_other_nodes_are_not_kept_waiting_until_they_give_up():
    assert ahead.longest_wait({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, 300) == ahead.LONGEST_WAIT_S
    assert ahead.longest_wait({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 300) == 150
    assert ahead.longest_wait({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 7200) == ahead.LONGEST_WAIT_S


@pytest.mark.parametrize("option", ["--training.batch_size=auto", "--activation_checkpoint.mode=auto"])
def test_a_job_that_auto_decides_is_told_that_nothing_is_compiled(option, capsys):
    config = parse_args(["--job.config_file", "configs/debug.toml", "--job.compile_ahead", option])
    assert ahead.start_if_worthwhile(config, [], 1, {}) is None
    assert "auto decides their shapes" in capsys.readouterr().out
