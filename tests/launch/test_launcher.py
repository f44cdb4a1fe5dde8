"""The launcher: checks first, one process in place, several through torchrun, and the trainer's own exit code."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from flame.cli.parse import parse_args
from flame.launch import exit_codes
from flame.launch import launcher as launch
from flame.launch.layout import Layout, check_port
from flame.launch.stop_signals import SAME_REQUEST_SECONDS
from flame.parallel.degrees import resolve_degrees
from flame.paths import PACKAGE_ROOT
from tests.processes import left_of

JOB = ["--model.config", "org/model", "--training.dataset", "builtin:stdlib"]

# Writes what it was given where the job's description says, and ends as the job's seed says.
TRAINER = """
import json, os, pathlib, signal, sys, time
def main(argv):
    folder = pathlib.Path(argv[argv.index("--job.dump_folder") + 1])
    rank = int(os.environ["RANK"])
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    (folder / f"rank{rank}.json").write_text(json.dumps({"argv": argv, **{name: os.environ[name] for name in names}}))
    print("hello from rank", rank)
    how = argv[-1]
    if how.startswith("code"):
        if rank == int(os.environ["WORLD_SIZE"]) - 1:
            return int(how[4:])
        time.sleep(60)
    if how == "raise" and rank == 1:
        raise RuntimeError("broken on purpose")
    if how == "kill" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (folder / f"id{rank}").write_text(str(os.getpid()))
        time.sleep(60)
    if how in ("wait", "kill", "raise"):
        try:
            time.sleep(60)
        except SystemExit as stop:
            return stop.code
    return 0
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """A trainer module, and a run folder with a blank in its name."""
    (tmp_path / "stub_trainer.py").write_text(TRAINER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{PACKAGE_ROOT.parent}")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "unset")
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "run folder"
    folder.mkdir()
    return folder


def job(folder, how):
    return [*JOB, "--training.steps=10", "--job.dump_folder", str(folder), "--job.description", how]


def start(folder, how, processes):
    """The launcher as ``train.sh`` starts it, with a stub in the trainer's place."""
    code = "import sys; from flame.launch.launcher import main; sys.exit(main(sys.argv[1:], trainer='stub_trainer'))"
    return subprocess.Popen(
        [sys.executable, "-c", code, *job(folder, how)],
        env={**os.environ, "NGPU": str(processes)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("how", ["ok", "my run: a = b", "--x.y=3", "code3", "code2", "code75"])
def test_one_process_trains_in_place_and_returns_the_trainers_code(stub, how, monkeypatch):
    monkeypatch.setenv("NGPU", "1")
    argv = [*job(stub, how)[:-2], f"--job.description={how}"] if how.startswith("--") else job(stub, how)
    assert launch.main(argv, trainer="stub_trainer") == (int(how[4:]) if how.startswith("code") else 0)
    seen = json.loads((stub / "rank0.json").read_text())
    assert seen["argv"] == argv
    assert (seen["RANK"], seen["WORLD_SIZE"], seen["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")


def test_two_processes(stub):
    run = start(stub, "a b", 2)
    output, errors = run.communicate(timeout=60)
    assert run.returncode == exit_codes.OK, errors
    for rank in range(2):
        seen = json.loads((stub / f"rank{rank}.json").read_text())
        assert seen["argv"] == job(stub, "a b")
        assert (seen["RANK"], seen["LOCAL_RANK"], seen["WORLD_SIZE"]) == (str(rank), str(rank), "2")
    assert "[rank 0] hello from rank 0" in output
    assert "rank 1" not in output
    logs = {path.parent.name: path.read_text() for path in stub.glob("logs/*/*/*/stdout.log")}
    assert logs == {"0": "hello from rank 0\n", "1": "hello from rank 1\n"}


@pytest.mark.parametrize(
    ("how", "expected"), [("code2", 2), ("code3", 3), ("raise", 1), ("kill", 128 + signal.SIGKILL)]
)
def test_a_failing_rank_gives_its_own_code(stub, how, expected):
    run = start(stub, how, 2)
    output, errors = run.communicate(timeout=60)
    assert run.returncode == expected
    assert f"ended with {launch.describe(expected)}; the logs of all ranks: {stub / 'logs'}" in errors
    assert "DONE" not in output
    assert ("broken on purpose" in errors) == (how == "raise")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_every_process(stub, sent):
    run = start(stub, "wait", 2)
    deadline = time.monotonic() + 60
    while not all((stub / f"rank{rank}.json").exists() for rank in range(2)) and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(sent)
    run.communicate(timeout=60)
    assert run.returncode == exit_codes.PREEMPTED


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_ends_all_at_once(stub, sent):
    """With processes that take no notice of the first."""
    run = start(stub, "stubborn", 2)
    ids = [stub / f"id{rank}" for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in ids) and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(sent)
    time.sleep(SAME_REQUEST_SECONDS + 2)  # the launcher may be slow to see the first
    assert run.poll() is None
    began = time.monotonic()
    run.send_signal(sent)
    run.communicate(timeout=60)
    assert time.monotonic() - began < 20, "torchrun alone waits another 30 s"
    assert run.returncode == exit_codes.KILLED + signal.SIGTERM
    assert not left_of(*(int(path.read_text()) for path in ids))


def test_a_wrong_job_starts_nothing(stub, capsys):
    assert launch.main([*job(stub, "ok"), "--training.seq_len", "0"], trainer="missing") == exit_codes.USER_ERROR
    assert capsys.readouterr().err == "--training.seq_len = 0: must be at least 1\n"


def test_without_options_the_demo_runs(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(launch, "run_here", lambda argv, *_: started.append(argv) or 0)
    monkeypatch.setenv("NGPU", "1")
    assert launch.main([]) == 0
    assert started == [["--job.config_file", "configs/debug.toml"]]
    assert "demo" in capsys.readouterr().out


def test_shard_degree_is_checked_against_the_processes(monkeypatch, capsys):
    monkeypatch.setenv("NGPU", "2")
    assert launch.main([*JOB, "--training.data_parallel_shard_degree", "3"], trainer="missing") == 2
    assert "the degrees must multiply to the 2 processes" in capsys.readouterr().err


def test_a_run_folder_that_cannot_be_made_starts_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NGPU", "2")
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    assert launch.main([*JOB, "--job.dump_folder", str(folder)], trainer="missing") == 2
    assert capsys.readouterr().err == f"job.dump_folder = {folder}: cannot be written to: Not a directory\n"


@pytest.mark.parametrize("num_processes", ["1", "2"])
def test_a_port_that_is_taken_starts_nothing(num_processes, monkeypatch, capsys):
    monkeypatch.setenv("NGPU", num_processes)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert launch.main(JOB, trainer="missing") == 2
        assert f"MASTER_PORT = {port}: Address already in use" in capsys.readouterr().err
        check_port(Layout(2, 1, "elsewhere", port, "0"))


def test_ranks_that_the_data_cannot_be_dealt_to_start_nothing(monkeypatch, capsys):
    monkeypatch.setenv("NGPU", "4")
    assert launch.main([*JOB, "--training.num_streams", "30"], trainer="missing") == 2
    assert "4 data-parallel ranks do not divide --training.num_streams 30" in capsys.readouterr().err


@pytest.mark.parametrize("num_gpus", [1, 2, 3, 4, 5, 6, 8, 10, 12, 16])
def test_the_demo_runs_on_any_usual_number_of_gpus(num_gpus):
    assert resolve_degrees(parse_args(launch.DEMO), num_gpus).data == num_gpus


def test_exit_codes_in_words():
    assert launch.describe(3) == "exit code 3"
    assert launch.describe(143) == "exit code 143 (killed by SIGTERM)"
    assert "out of memory" in launch.describe(137)
