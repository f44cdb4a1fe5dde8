"""The run folder's lock, between processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flame.errors import UserError
from flame.training.lock import RunFolderLock

HOLDER = """
import sys, time
from flame.training.lock import RunFolderLock
lock = RunFolderLock(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"process {holder.pid} on .* is training there"):
            RunFolderLock(tmp_path / "run")
    finally:
        holder.kill()
        holder.wait()
    RunFolderLock(tmp_path / "run").release()


def test_a_job_that_never_started_leaves_no_folder(tmp_path):
    RunFolderLock(tmp_path / "run").release()
    assert not (tmp_path / "run").exists()


def test_what_the_run_wrote_stays(tmp_path):
    lock = RunFolderLock(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    lock.release()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written to"):
        RunFolderLock(tmp_path / "file" / "run")
