"""Checkpoints written in the background: what they hold, what they wait for, what becomes of a failure."""

from __future__ import annotations

import threading

import pytest
import torch

from flame.checkpoint import writer
from flame.checkpoint.manager import CheckpointManager
from flame.checkpoint.snapshot import HostMemory
from flame.checkpoint.writer import SaveError

from .tiny import assert_equal, make_state


@pytest.fixture
def gate(monkeypatch):
    """Writing starts when the gate is opened."""
    gate, write = threading.Event(), writer.write_tensors

    def write_later(*args, **kwargs):
        assert gate.wait(30)
        write(*args, **kwargs)

    monkeypatch.setattr(writer, "write_tensors", write_later)
    return gate


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_the_values_at_the_save_count(tmp_path, gate, mode):
    manager = CheckpointManager(tmp_path, async_mode=mode)
    state = make_state()
    expected = {name: tensor.clone() for name, tensor in state.items()}
    manager.start_save(3, state, {"step": 3})
    manager.wait_for_snapshot()
    for tensor in state.values():
        tensor.zero_()
    assert manager.take_finished() is None
    assert manager.steps() == []
    gate.set()
    saved = manager.finish_save()
    assert (saved.step, saved.error) == (3, None)
    assert saved.total_seconds > 0 and saved.blocked_seconds > 0
    loaded = make_state(seed=1, trained=False)
    assert manager.load(3, loaded) == {"step": 3}
    assert_equal(loaded, expected)


def test_training_that_waits_for_the_disk_does_not_wait_for_the_snapshot(tmp_path, gate):
    manager = CheckpointManager(tmp_path, async_mode="async")
    manager.start_save(3, make_state(), {})
    manager.wait_for_snapshot()
    blocked_seconds = manager.background._save.blocked_seconds
    threading.Timer(0.1, gate.set).start()
    assert manager.finish_save().blocked_seconds == blocked_seconds


def test_the_files_are_those_of_an_ordinary_save(tmp_path):
    """Bit for bit, but for the random name that DCP gives each save."""
    state = make_state()
    plain, background = CheckpointManager(tmp_path / "a"), CheckpointManager(tmp_path / "b", async_mode="async")
    plain.save(1, state, {"step": 1})
    background.start_save(1, state, {"step": 1})
    background.finish_save()
    for path in (tmp_path / "a" / "step-1").iterdir():
        if path.name not in (".metadata", "manifest.json"):
            assert path.read_bytes() == (tmp_path / "b" / "step-1" / path.name).read_bytes()


def test_memory_is_taken_once(tmp_path):
    manager = CheckpointManager(tmp_path, keep_latest_k=1, async_mode="async")
    state = make_state()
    manager.prepare(state)
    memory = manager.background._memory
    for step in (1, 2):
        manager.start_save(step, state, {})
        assert manager.finish_save().error is None
    assert manager.background._memory is memory
    assert manager.steps() == [2]
    manager.prepare(make_state() | {"model.more": torch.zeros(3)})
    assert manager.background._memory is not memory


def test_a_failure_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path, async_mode="async")
    manager.save(1, make_state(), {})

    def refuse(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_manifest", refuse)
        manager.start_save(2, make_state(), {})
        failed = manager.finish_save()
    assert isinstance(failed.error, SaveError)
    assert "checkpoint of step 2 was not saved" in str(failed.error) and "No space left" in str(failed.error)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert manager.finish_save() is None
    manager.start_save(3, make_state(), {})
    assert manager.finish_save().error is None
    assert manager.steps() == [1, 3]


def test_steps_of_a_course_that_was_left_are_set_aside_once(tmp_path):
    CheckpointManager(tmp_path).save(5, make_state(), {})
    CheckpointManager(tmp_path).save(9, make_state(), {})
    manager = CheckpointManager(tmp_path, async_mode="async")
    manager.load(5, make_state())
    for step in (7, 9):
        manager.start_save(step, make_state(), {})
        assert manager.finish_save().error is None
    assert manager.steps() == [5, 7, 9]
    assert (tmp_path / "step-9.replaced").is_dir()


def test_each_tensor_has_a_storage_of_its_own():
    tensors = {"a": torch.ones(3), "b": torch.ones((), dtype=torch.int64), "c": torch.ones(2, 5).bfloat16().T}
    memory = HostMemory(tensors | {"none": torch.empty(0, 4)}, pinned=False)
    for name, tensor in memory.tensors.items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
    assert memory.fits(tensors | {"none": torch.empty(0, 4)})
    assert not memory.fits(tensors)
    assert memory.tensors["c"].shape == (5, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_on_a_gpu_the_update_waits_for_the_copy(tmp_path, mode):
    """A gigabyte that is overwritten right after the save: what was there at the save is what is kept."""
    manager = CheckpointManager(tmp_path, async_mode=mode)
    tensors = {f"model.{i}": torch.full((2**25,), float(i), device="cuda") for i in range(8)}
    manager.prepare(tensors)
    assert manager.background._memory.is_pinned == (mode == "async_with_pinned_mem")
    for tensor in tensors.values():
        tensor.add_(1)  # queued when the snapshot is begun
    manager.start_save(1, tensors, {})
    manager.wait_for_snapshot()
    for tensor in tensors.values():
        tensor.zero_()
    assert manager.finish_save().error is None
    loaded = {name: torch.empty(2**25) for name in tensors}
    manager.load(1, loaded)
    assert all((loaded[f"model.{i}"] == i + 1).all() for i in range(8))
