"""What the log says of saves in the background, above all when one has to wait for the one before."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from flame.checkpoint import writer
from flame.checkpoint.manager import CheckpointManager
from flame.config import Checkpoint
from flame.training.saving import Saves
from tests.checkpoint.tiny import make_state


@pytest.fixture(autouse=True)
def slow_disk(monkeypatch):
    """Writing takes longer than a save needs to begin."""
    write = writer.write_tensors

    def write_slowly(*args, **kwargs):
        time.sleep(0.5)
        write(*args, **kwargs)

    monkeypatch.setattr(writer, "write_tensors", write_slowly)


def make_saves(folder: Path, is_main: bool = True) -> Saves:
    checkpoints = CheckpointManager(folder, async_mode="async")
    return Saves(checkpoints, Checkpoint(interval=12), MagicMock(is_main=is_main), sync_metrics=MagicMock())


def try_save(saves: Saves, step: int) -> None:
    saves.try_save(step, make_state(), {})
    saves.checkpoints.wait_for_snapshot()


def warnings_of(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_save_that_waits_for_the_one_before_says_so(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    saves = make_saves(tmp_path)
    for step in (12, 24):
        try_save(saves, step)
    [warning] = warnings_of(caplog)
    waited = re.fullmatch(
        r"training waited (\S+) s to save step 24, since step 12 was still being saved: "
        r"a longer checkpoint\.interval \(12 steps\) or a faster disk helps",
        warning,
    )
    assert float(waited[1]) > 0
    assert re.search(r"checkpoint of step 12 saved in \S+ s; training waited \S+ s for its copy", caplog.text)
    saves.close(timeout=30)


def test_other_ranks_say_nothing(tmp_path, caplog):
    saves = make_saves(tmp_path, is_main=False)
    for step in (12, 24):
        try_save(saves, step)
    saves.close(timeout=30)
    assert not warnings_of(caplog)


def test_a_save_after_the_one_before_was_written_waits_for_nothing(tmp_path, caplog):
    saves = make_saves(tmp_path)
    try_save(saves, 12)
    assert saves.checkpoints.background._save.done.wait(30)
    try_save(saves, 24)
    assert saves.saved_step == 12
    saves.close(timeout=30)
    assert not warnings_of(caplog)


def test_the_last_save_waits_without_a_warning(tmp_path, caplog):
    saves = make_saves(tmp_path)
    try_save(saves, 12)
    saves.save(20, make_state(), {}, last=True)
    assert saves.checkpoints.steps() == [12, 20]
    assert not warnings_of(caplog)
