"""Compiling beside the start: who begins it, who waits, and what it has to say."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from flame.cli.parse import parse_args
from flame.launch import ahead
from flame.launch.gpu import Gpu
from flame.launch.works import WORKS

JOB = ["--model.config", "configs/gla_340M.json", "--model.tokenizer_path", "configs/tokenizer"]
JOB += ["--training.dataset", "builtin:stdlib", "--job.compile_ahead"]


def is_worthwhile(words, environ, name="kernels"):
    return ahead.is_worthwhile(WORKS[name], parse_args(words), environ)


def test_a_job_is_compiled_once_for_each_cache(tmp_path):
    environ = {"TRITON_CACHE_DIR": str(tmp_path)}
    assert is_worthwhile(JOB, environ)
    ahead.stamp_of(WORKS["kernels"], parse_args(JOB), environ).touch()
    assert not is_worthwhile(JOB, environ)
    assert not is_worthwhile([*JOB, "--job.dump_folder", "elsewhere"], environ)
    assert is_worthwhile([*JOB, "--training.seq_len", "4096"], environ)
    assert is_worthwhile(JOB, {"TRITON_CACHE_DIR": str(tmp_path / "other")})


def test_each_work_has_a_stamp_of_its_own(tmp_path):
    environ = {"FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path)}
    assert len({ahead.stamp_of(work, parse_args(JOB), environ) for work in WORKS.values()}) == len(WORKS)


def test_what_is_wanted_is_started_where_there_is_a_gpu(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(ahead, "start", lambda name, argv, world_size, environ: started.append((name, world_size)))
    environ = {"TRITON_CACHE_DIR": str(tmp_path)}
    for number in (0, 2):
        monkeypatch.setattr(ahead, "count_gpus", lambda environ, number=number: number)
        ahead.start_if_worthwhile(parse_args(JOB), JOB, 2, environ)
        assert started == [("kernels", 2)] * (number > 0)


def test_nothing_to_wait_for():
    assert ahead.wait_until_compiled("kernels", {}) == ""


def test_a_trainer_waits_until_the_other_process_is_gone(tmp_path):
    path = tmp_path / "told"
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print('here', flush=True);"
        "sys.stdin.read(); file.write('all compiled')"
    )
    command = [sys.executable, "-c", code, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        environ = {f"{ahead.FILE}_KERNELS": str(path)}
        told = ahead.wait_until_compiled("kernels", environ, longest_s=0.2)
        assert told == "Triton's kernels: still being compiled after 0 s; not waiting any longer"
        assert ahead.wait_until_compiled("attention_forward", environ) == ""  # another process's
        process.stdin.close()
        assert ahead.wait_until_compiled("kernels", environ) == "all compiled"


def test_the_process_ends_when_the_launcher_does():
    code = "from flame.launch import ahead; import time; ahead.end_with_the_launcher(); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    process.stdin.close()
    assert process.wait(timeout=50) == 1


@pytest.fixture
def compiling(tmp_path, monkeypatch):
    """Runs the process's ``main`` here, with a function in the place of what a work names; returns what was told."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "not" / "there" / "yet"))
    monkeypatch.setattr(ahead, "end_with_the_launcher", lambda: None)
    monkeypatch.setattr(os, "nice", lambda increment: increment)

    def run(function, **changes) -> str:
        monkeypatch.setattr(ahead, "import_module", lambda name: SimpleNamespace(compile_kernels=function))
        monkeypatch.setitem(WORKS, "kernels", replace(WORKS["kernels"], **changes))
        with open(tmp_path / "told", "w+") as file:
            ahead.main(str(os.dup(file.fileno())), "kernels", "3", *JOB)
            return Path(file.name).read_text()

    return run


def has_stamp():
    return ahead.stamp_of(WORKS["kernels"], parse_args(JOB), os.environ).exists()


def test_what_is_done_is_told_and_stamped(compiling):
    told = compiling(lambda config, world_size: f"{world_size} of {config.model.config}")
    assert re.fullmatch(r"Triton's kernels: 3 of configs/gla_340M.json compiled ahead in \d+\.\d s", told)
    assert has_stamp()


def test_nothing_to_do_is_not_told_and_found_once(compiling):
    assert compiling(lambda config, world_size: "") == ""
    assert has_stamp()


def test_what_goes_wrong_is_told_and_leaves_no_stamp(compiling):
    def broken(config, world_size):
        raise RuntimeError("no such luck\nand more")

    told = compiling(broken)
    assert told == "Triton's kernels: not compiled ahead, but when needed: RuntimeError: no such luck"
    assert not has_stamp()


@pytest.mark.parametrize(("gpu", "is_done"), [(Gpu(9, 0, 132), True), (Gpu(8, 0, 108), False), (None, False)])
def test_what_is_for_some_gpus_sees_none_but_knows_the_kind(gpu, is_done, compiling, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ, FLAME_COMPILING_AHEAD_ATTENTION_FORWARD="of another process"))
    monkeypatch.setattr(ahead, "find_gpu", lambda environ: gpu)
    seen = []
    told = compiling(lambda *_: seen.append(dict(os.environ)) or "all", gpus=(9, 10))
    assert told.startswith("Triton's kernels: all") == is_done == has_stamp() == bool(seen)
    for environ in seen:
        assert (environ["CUDA_VISIBLE_DEVICES"], environ["CUTE_DSL_ARCH"]) == ("", "sm_90a")
        assert not any(name.startswith(ahead.FILE) for name in environ)


def test_the_started_process_holds_the_lock(tmp_path, monkeypatch):
    (tmp_path / "told").touch()
    started = []

    def popen(command, pass_fds, **options):
        started.append((command, os.dup(pass_fds[0])))

    monkeypatch.setattr(subprocess, "Popen", popen)
    environ = {}
    ahead.start("kernels", JOB, 8, environ)
    ((command, number),) = started
    assert command[:3] == [sys.executable, "-m", "flame.launch.ahead"] and command[4:] == ["kernels", "8", *JOB]
    with open(environ["FLAME_COMPILING_AHEAD_KERNELS"]) as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.close(number)
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_a_process_without_a_gpu_has_nothing_to_say(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    environ = {}
    process = ahead.start("attention_forward", JOB, 1, environ)
    assert ahead.wait_until_compiled("attention_forward", environ) == ""
    assert process.wait(timeout=50) == 0


def test_a_process_that_is_killed_is_not_waited_for(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(100)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    environ = {}
    process = ahead.start("attention_backward", JOB, 1, environ)
    assert "not waiting" in ahead.wait_until_compiled("attention_backward", environ, longest_s=0.1)
    process.kill()
    assert ahead.wait_until_compiled("attention_backward", environ) == ""
    process.wait()


@pytest.mark.parametrize("error", [OSError("no locks here"), subprocess.TimeoutExpired("nvidia-smi", 60)])
def test_a_machine_that_does_not_let_it_goes_on_without(error, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr(ahead, "count_gpus", lambda environ: 1)
    monkeypatch.setattr(ahead, "start", fail)
    environ = {"TRITON_CACHE_DIR": str(tmp_path)}
    assert ahead.start_if_worthwhile(parse_args(JOB), JOB, 1, environ) == []
    assert capsys.readouterr().out == f"flame: not all kernels are compiled ahead: {error}\n"
    assert environ.keys() == {"TRITON_CACHE_DIR"}


def test_a_file_that_cannot_be_waited_for_ends_no_run(tmp_path):
    said = ahead.wait_until_compiled("kernels", {"FLAME_COMPILING_AHEAD_KERNELS": str(tmp_path)})  # a folder
    assert said.startswith("Triton's kernels: not waited for: ")
    (tmp_path / "said").write_bytes(b"\xff")
    assert ahead.wait_until_compiled("kernels", {"FLAME_COMPILING_AHEAD_KERNELS": str(tmp_path / "said")})


def test_other_nodes_are_not_kept_waiting_until_they_give_up():
    assert ahead.longest_wait({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, 300) == ahead.LONGEST_WAIT_S
    assert ahead.longest_wait({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 300) == 150
    assert ahead.longest_wait({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 7200) == ahead.LONGEST_WAIT_S


@pytest.mark.parametrize("option", ["--training.batch_size=auto", "--activation_checkpoint.mode=auto"])
def test_a_job_that_auto_decides_is_told_that_nothing_is_compiled(option, capsys):
    config = parse_args(["--job.config_file", "configs/debug.toml", "--job.compile_ahead", option])
    assert ahead.start_if_worthwhile(config, [], 1, {}) == []
    assert "Triton's kernels are not compiled ahead: auto decides their shapes" in capsys.readouterr().out
