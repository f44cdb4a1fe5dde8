"""What the launcher kills: children of its own that still run, whose end it waits for, and nothing else."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flame.launch import notes
from tests.processes import running

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"

pytestmark = pytest.mark.skipif(not hasattr(os, "waitid"), reason="asks how children are")


def test_what_is_killed_has_ended_and_keeps_its_exit_code(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
    child.stdout.readline()
    (tmp_path / "id.0").write_text(str(child.pid))
    notes.kill_rest(tmp_path)
    assert child.pid not in running()
    assert child.poll() == -signal.SIGKILL
    began = time.monotonic()
    notes.kill_rest(tmp_path)
    assert time.monotonic() - began < 1, "there is nothing to wait for"


def test_another_process_with_the_same_id_is_left_alone(tmp_path):
    """A grandchild's stands for it: it is another process's to wait for."""
    parent = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    other = int(parent.stdout.readline())
    (tmp_path / "id.0").write_text(str(other))
    try:
        notes.kill_rest(tmp_path)
        assert other in running()
    finally:
        os.kill(other, signal.SIGKILL)
        parent.communicate()


def test_a_note_is_whole_or_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv(notes.FOLDER, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "1")
    write_text, seen = Path.write_text, []

    def write_slowly(path: Path, text: str) -> None:
        path.touch()
        seen.append(notes.read_codes(tmp_path))
        notes.kill_rest(tmp_path)
        write_text(path, text)

    monkeypatch.setattr(Path, "write_text", write_slowly)
    notes.leave_code(3)
    monkeypatch.setattr(notes.os, "getpid", lambda: 2**22 + 1)  # no process has it
    notes.leave_id()
    assert [codes.keys() for codes in seen] == [set(), {1}]
    assert notes.read_codes(tmp_path)[1][0] == 3
    assert (tmp_path / "id.1").read_text() == str(2**22 + 1)
