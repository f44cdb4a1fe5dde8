"""train.sh and tests/run.sh: help without set-up, which Python is used, what an interrupted installation leaves."""

import os
import shutil
import subprocess
import time

import pytest

from flame.paths import PACKAGE_ROOT

ROOT = PACKAGE_ROOT.parent
pytestmark = pytest.mark.skipif(not (ROOT / "train.sh").exists(), reason="scripts are part of a checkout")

# Stands for Python: it notes its calls, and is ready to run flame when the file `ready` lies beside it.
FAKE_PYTHON = """#!/bin/bash
here="$(dirname "$0")"
echo "$here: $*" >> "$CALLS"
case "$1 $2" in
    "-m flame.launch.versions") [[ -e "$here/ready" ]] ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip") [[ -z "${BREAK_PIP:-}" ]] && touch "$here/ready" ;;
    "-m pytest") shift 2; printf '<%s>' "$@"; [[ -z "${FAILING:-}" || "$*" != $FAILING ]] ;;
    "-m flame.launch") shift 2; printf '<%s>' "$@"; exit "${TRAINER_CODE:-0}" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A copy of the scripts in a folder with a blank in its name, and a PATH with a stand-in for Python."""
    root, commands = tmp_path / "a checkout", tmp_path / "bin"
    for name in ("train.sh", "tests/run.sh", "utils/setup_env.sh"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    commands.mkdir()
    for name in ("bash", "dirname", "mkdir", "touch", "rm", "cp"):
        (commands / name).symlink_to(shutil.which(name))
    (commands / "python3").write_text(FAKE_PYTHON)
    (commands / "python3").chmod(0o755)
    monkeypatch.setenv("PATH", str(commands))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.chdir(tmp_path)
    return root


def bash(script, *words, **environment):
    return subprocess.run(
        ["bash", str(script), *words], capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_help_is_quick_and_needs_no_set_up(tmp_path):
    start = time.monotonic()
    done = subprocess.run(["bash", str(ROOT / "train.sh"), "-h"], cwd=tmp_path, capture_output=True, text=True)
    assert time.monotonic() - start < 2
    assert done.returncode == 0
    assert "--training.seq_len" in done.stdout
    assert done.stderr == ""


def test_a_wrong_job_ends_with_two(tmp_path):
    done = subprocess.run(["bash", str(ROOT / "train.sh"), "--training.step=1"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 2
    assert b"did you mean --training.steps?" in done.stderr


def test_the_current_environment_is_used_when_it_is_ready(checkout, tmp_path):
    (tmp_path / "bin" / "ready").touch()
    words = ["--training.steps=10", "--job.dump_folder=x y", "--job.description", "a  b"]
    done = bash(checkout / "train.sh", *words)
    assert (done.stdout, done.stderr) == ("".join(f"<{word}>" for word in words), "")
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("code", ["1", "2", "75"])
def test_the_trainers_code_is_handed_on(checkout, tmp_path, code):
    (tmp_path / "bin" / "ready").touch()
    assert bash(checkout / "train.sh", "--x", TRAINER_CODE=code).returncode == int(code)


def test_an_environment_is_made_once(checkout, tmp_path):
    first = bash(checkout / "train.sh", "--x=1")
    assert first.stdout == "<--x=1>"
    assert first.stderr.splitlines() == [
        f"flame: installing into {checkout}/.venv (once, a few minutes)",
        "flame: installed",
    ]
    second = bash(checkout / "train.sh", "--x=2")
    assert (second.stdout, second.stderr) == ("<--x=2>", "")
    calls = (tmp_path / "calls").read_text()
    assert calls.count("-m pip") == 1
    assert f"-c {checkout}/constraints.txt -e {checkout}\n" in calls


def test_an_interrupted_installation_is_taken_up_again(checkout):
    assert bash(checkout / "train.sh", BREAK_PIP="1").returncode != 0
    (checkout / ".venv" / "bin" / "ready").touch()
    again = bash(checkout / "train.sh", "--x")
    assert again.stdout == "<--x>"
    assert "installing" in again.stderr


def test_tests_install_what_they_need(checkout, tmp_path):
    done = bash(checkout / "tests" / "run.sh", "-k", "a or b")
    assert done.stdout == "<-k><a or b>"
    calls = (tmp_path / "calls").read_text()
    assert f"-e {checkout}[dev]\n" in calls
    assert "-m flame.launch.versions pytest hypothesis xdist\n" in calls


@pytest.mark.parametrize("failing", ["", "*reorder --ignore*", "*tests/faults tests/launch*", "*tests/data *"])
def test_all_parts_of_the_tests_run_and_each_can_fail(checkout, tmp_path, failing):
    (tmp_path / "bin" / "ready").touch()
    (checkout / ".lowest").mkdir()
    (checkout / ".lowest" / "installed").touch()
    done = bash(checkout / "tests" / "run.sh", FAILING=failing)
    assert done.returncode == (failing != "")
    calls = [line.split()[3:] for line in (tmp_path / "calls").read_text().splitlines() if "-m pytest" in line]
    together, alone, lowest = (call[call.index("--durations-min=5") + 1 :] for call in calls)
    two = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    assert together == [*two, *(f"--ignore={path}" for path in alone)]
    assert lowest[:6] == [*two, "tests/data"]
    assert all((ROOT / path).exists() for path in alone)


def test_without_python_it_says_so(checkout, tmp_path):
    (tmp_path / "bin" / "python3").unlink()
    for words in (["-h"], ["--x"]):
        done = bash(checkout / "train.sh", *words)
        assert done.returncode == 1
        assert done.stderr.startswith("flame: needs Python 3.11 or newer, and found none")
