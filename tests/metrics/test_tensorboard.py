import errno
import os

import pytest

from flame.metrics.tensorboard import TensorBoardWriter, trim_events


def write_steps(folder, steps, last_step=0, close=True):
    writer = TensorBoardWriter(folder, last_step)
    for step in steps:
        writer.write(step, {"train/loss": 1 / step, "train/lr": 1.0})
    if close:
        writer.close()
    return writer


def steps_of(folder, tag="train/loss"):
    """What a reader of the files sees that knows nothing of restarts."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    steps = []
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime):
        for event in EventFileLoader(str(path)).Load():
            steps += [event.step for value in event.summary.value if value.tag == tag]
    return steps


def test_resume_leaves_no_step_missing_or_doubled(tmp_path):
    write_steps(tmp_path, range(1, 8))
    write_steps(tmp_path, range(5, 8), last_step=4)
    write_steps(tmp_path, range(7, 11), last_step=6)
    assert steps_of(tmp_path) == list(range(1, 11))
    assert steps_of(tmp_path, "train/lr") == list(range(1, 11))


def test_resume_behind_several_files_cuts_all_of_them(tmp_path):
    write_steps(tmp_path, range(1, 5))
    write_steps(tmp_path, range(5, 8), last_step=4)
    write_steps(tmp_path, range(8, 11), last_step=7)
    write_steps(tmp_path, range(3, 6), last_step=2)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]


def test_events_of_a_run_that_was_not_closed_are_on_the_disk(tmp_path):
    writer = write_steps(tmp_path, [1, 2, 3], close=False)
    assert steps_of(tmp_path) == [1, 2, 3]
    writer.close()


def test_record_torn_by_a_kill_is_cut_off(tmp_path):
    write_steps(tmp_path, [1, 2, 3])
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    write_steps(tmp_path, [4], last_step=3)
    assert steps_of(tmp_path, "train/loss") == [1, 2, 3, 4]


def test_nothing_to_trim_changes_nothing(tmp_path):
    write_steps(tmp_path, [1, 2, 3])
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    assert trim_events(tmp_path, 3) == 0
    assert path.read_bytes() == before


@pytest.mark.parametrize("last_step", [0])
def test_new_run_in_a_used_folder_drops_the_old_events(tmp_path, last_step):
    write_steps(tmp_path, [1, 2, 3])
    write_steps(tmp_path, [1], last_step=last_step)
    assert steps_of(tmp_path) == [1]


def test_a_full_disk_ends_tensorboard_and_not_the_run(tmp_path, monkeypatch, caplog):
    writer = write_steps(tmp_path, [1], close=False)

    def refuse():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer._writer, "flush", refuse)
    for step in (2, 3):
        writer.write(step, {"train/loss": 1.0})
    writer.close()
    assert [record.message for record in caplog.records] == [
        "TensorBoard ends at step 2, for the rest of this start: No space left on device"
    ]
