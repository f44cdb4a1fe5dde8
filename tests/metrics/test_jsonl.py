import errno
import json
import math
import os

import pytest

from flame.errors import UserError
from flame.metrics.jsonl import JsonlWriter, last_validation, read_rows


def write_steps(path, steps, last_step=0):
    writer = JsonlWriter(path, last_step)
    for step in steps:
        writer.write({"step": step, "loss": 1 / step})
    writer.close()


def steps_of(path):
    return [row["step"] for row in read_rows(path)]


def test_rows_are_readable_before_the_file_is_closed(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write({"step": 1, "loss": 2.5})
    assert list(read_rows(writer.path)) == [{"step": 1, "loss": 2.5}]


def test_the_last_validation_is_found(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_validation(path) == -1
    write_steps(path, [1, 2])
    assert last_validation(path) == -1
    path.write_text(
        '{"step": 2, "val_loss": 3.0}\n{"step": 3, "loss": 1.0}\n{"step": 3, "val_loss": null}\n{"step": 4, "val_'
    )
    assert last_validation(path) == 3


def test_resume_leaves_no_step_missing_or_doubled(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 8))
    write_steps(path, range(5, 11), last_step=4)
    assert steps_of(path) == list(range(1, 11))


def test_new_run_in_a_used_folder_starts_an_empty_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 4))
    write_steps(path, [1])
    assert steps_of(path) == [1]


def test_kept_rows_keep_their_bytes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 8))
    before = path.read_bytes().splitlines()[:4]
    write_steps(path, [], last_step=4)
    assert path.read_bytes().splitlines() == before


def test_validation_rows_are_trimmed_by_their_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"step": 4, "loss": 1.0},
        {"step": 4, "val_loss": 1.1},
        {"step": 5, "loss": 0.9},
        {"step": 5, "val_loss": 1},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert JsonlWriter(path, last_step=4).num_removed == 2
    assert list(read_rows(path)) == rows[:2]


@pytest.mark.parametrize("torn", ['{"step": 4, "lo', '{"step": 4, "loss": 1.0}', "\x00\x00"])
def test_torn_last_line_of_a_killed_run_is_tolerated(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 4))
    with open(path, "a") as file:
        file.write(torn)
    assert steps_of(path)[:3] == [1, 2, 3]
    write_steps(path, [4, 5], last_step=3)
    assert steps_of(path) == [1, 2, 3, 4, 5]


def test_broken_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        list(read_rows(path))


def test_not_a_number_becomes_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "epochs": {"a": -math.inf}})

    def refuse(constant):
        raise AssertionError(constant)

    row = json.loads(path.read_text(), parse_constant=refuse)
    assert row == {"step": 1, "loss": None, "grad_norm": None, "epochs": {"a": None}}


def test_floats_survive_exactly(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write({"step": 1, "loss": 0.1 + 0.2})
    assert next(read_rows(writer.path))["loss"] == 0.1 + 0.2


def test_text_with_a_line_separator_stays_one_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write({"step": 1, "epochs": {"a\u2028b\nc": 0.5}})
    writer.close()
    assert JsonlWriter(path, last_step=1).num_removed == 0
    assert len(list(read_rows(path))) == 1


class FullDisk:
    """Stands for ``os.write``: takes ``room`` bytes in all, then says that the disk is full."""

    def __init__(self):
        self.room, self.write = 10**9, os.write

    def __call__(self, descriptor, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= (done := self.write(descriptor, data[: self.room]))
        return done


def test_rows_wait_for_room_on_a_full_disk(tmp_path, monkeypatch, caplog):
    disk = FullDisk()
    monkeypatch.setattr(os, "write", disk)
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write({"step": 1})
    disk.room = 5  # a torn row
    for step in (2, 3):
        writer.write({"step": step})
    assert [record.message.count("kept in memory") for record in caplog.records] == [1]
    assert steps_of(writer.path) == [1]
    with pytest.raises(UserError, match="No space left"):
        writer.sync()
    disk.room = 10**9
    writer.write({"step": 4})
    assert steps_of(writer.path) == [1, 2, 3, 4]


def test_other_faults_are_raised(tmp_path, monkeypatch):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    os.close(writer._descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        writer.write({"step": 1})
