import importlib
import logging
import multiprocessing
import os
import resource
import signal

import pytest
import torch

from flame.checkpoint import folders
from flame.checkpoint.manager import CheckpointManager, check_plain
from flame.checkpoint.manifest import reading
from flame.checkpoint.names import model_tensors, optimizer_tensors
from flame.checkpoint.writer import SaveError
from flame.errors import UserError

from .tiny import assert_equal, make_model, make_state

STATE = {"step": 7, "tokens": 2**60, "lr": 0.1, "dataloader": {"streams": [[1, 2], [3, 4]], "name": None}}


def save_steps(root, *steps, **options):
    manager = CheckpointManager(root, **options)
    for step in steps:
        manager.save(step, make_state(seed=step), {"step": step})
    return manager


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_round_trip_is_exact(tmp_path):
    saved, loaded = make_state(), make_state(seed=1, trained=False)
    folder = CheckpointManager(tmp_path).save(7, saved, STATE)
    assert folder == tmp_path / "step-7"
    assert CheckpointManager(tmp_path).load(7, loaded) == STATE
    assert_equal(saved, loaded)


def test_latest_steps_and_contents(tmp_path):
    assert CheckpointManager(tmp_path / "none").latest() is None
    manager = save_steps(tmp_path, 1, 10, 2)
    assert manager.steps() == [1, 2, 10]
    assert manager.latest() == 10
    assert manager.contents(10) == ("model", "optimizer", "train_state")


def test_keep_latest_k(tmp_path):
    manager = save_steps(tmp_path, 1, 2, 3, keep_latest_k=2)
    assert manager.steps() == [2, 3]


def test_a_step_saved_behind_newer_ones_is_kept(tmp_path):
    save_steps(tmp_path, 10, 20)
    assert save_steps(tmp_path, 5, keep_latest_k=1).steps() == [5, 20]


def test_a_step_that_is_being_read_is_kept(tmp_path):
    save_steps(tmp_path, 1)
    with reading(tmp_path / "step-1"):
        assert save_steps(tmp_path, 2, 3, keep_latest_k=1).steps() == [1, 3]


def test_bad_step(tmp_path):
    manager = save_steps(tmp_path, 1, 2)
    with pytest.raises(UserError, match=r"load_step = 999: no such step in .*; steps there are: 1, 2"):
        manager.find_step(999)
    with pytest.raises(UserError, match="no such step"):
        manager.load(999, make_state())


def test_newer_steps_left_behind_are_named(tmp_path, caplog):
    manager = save_steps(tmp_path, 1, 2, 3)
    assert manager.find_step(1) == 1
    assert "leaves newer checkpoints" in caplog.text
    assert "(2, 3)" in caplog.text
    caplog.clear()
    assert manager.find_step(-1) == 3
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("fault", ["remove", "truncate", "flip"])
def test_every_damaged_file_is_found_and_the_previous_step_used(tmp_path, caplog, fault):
    manager = save_steps(tmp_path, 1, 2)
    for path in sorted((tmp_path / "step-2").iterdir()):
        good = path.read_bytes()
        middle = len(good) // 2
        if fault == "remove":
            path.unlink()
        elif fault == "truncate":
            path.write_bytes(good[:-1])
        else:
            path.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
        caplog.clear()
        assert manager.latest() == 1, path.name
        assert "passed over" in caplog.text
        assert "step-2" in caplog.text
        path.write_bytes(good)
    assert manager.latest() == 2


def test_sizes_alone_do_not_find_a_flipped_bit(tmp_path):
    manager = save_steps(tmp_path, 1, 2, verify="size")
    shard = next((tmp_path / "step-2").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"~")
    assert manager.latest() == 2
    shard.write_bytes(shard.read_bytes()[:-1])
    assert manager.latest() == 1


def test_half_files(tmp_path):
    manager = save_steps(tmp_path, 3)
    next((tmp_path / "step-3").glob("*.distcp")).unlink()
    with pytest.raises(UserError, match="step-3 is broken: 0 of 1 shard files found"):
        manager.find_step(3)


def test_weights_only_resumes_with_a_fresh_optimizer(tmp_path, caplog):
    manager = CheckpointManager(tmp_path)
    saved = make_state()
    manager.save(7, saved, STATE, weights_only=True, export_dtype="bfloat16")
    assert manager.contents(7) == ("model", "train_state")
    loaded = make_state(seed=1, trained=False)
    fresh = {name: tensor.clone() for name, tensor in loaded.items() if name.startswith("optimizer.")}
    assert manager.load(7, loaded) == STATE
    assert "the optimizer starts fresh" in caplog.text
    for name, tensor in loaded.items():
        expected = saved[name].bfloat16().float() if name.startswith("model.") else fresh[name]
        assert torch.equal(tensor, expected), name


def test_no_line_about_the_optimizer_when_it_is_not_wanted(tmp_path, caplog):
    manager = save_steps(tmp_path, 1)
    manager.load(1, {name: t for name, t in make_state().items() if name.startswith("model.")})
    assert "starts fresh" not in caplog.text


def test_missing_and_unexpected_names_are_counted(tmp_path):
    manager = save_steps(tmp_path, 1)
    other = make_state(trained=False)
    other["model.norm.weight"] = other.pop("model.embeddings.weight")
    with pytest.raises(UserError, match=r"1 missing \(model.norm.weight\); 1 unexpected \(model.embeddings.weight\)"):
        manager.load(1, other)
    manager.load(1, other, strict=False)


def test_a_parameter_that_never_had_a_gradient_resumes_without_state(tmp_path):
    """An optimizer keeps nothing for it, and so neither does the checkpoint, though what is loaded has zeros there."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for weight in (model.head.weight, model.block[0].weight):
        weight.sum().backward()
    optimizer.step()
    saved = model_tensors(model) | optimizer_tensors(model, optimizer)
    CheckpointManager(tmp_path).save(2, saved, {})
    loaded = make_state(1, trained=False)
    CheckpointManager(tmp_path).load(2, loaded)
    assert_equal({name: tensor for name, tensor in loaded.items() if name in saved}, saved)
    assert len(loaded) > len(saved) and not any(loaded[name].any() for name in loaded.keys() - saved.keys())


def test_other_shapes_are_named(tmp_path):
    manager = save_steps(tmp_path, 1)
    other = make_state(trained=False)
    other["model.head.weight"] = torch.zeros(9, 6)
    with pytest.raises(UserError, match=r"model.head.weight is \[7, 6\] there and \[9, 6\] here"):
        manager.load(1, other)


def test_exclude_from_loading(tmp_path):
    manager = CheckpointManager(tmp_path)
    saved, loaded = make_state(), make_state(seed=1, trained=False)
    manager.save(7, saved, STATE)
    before = {name: tensor.clone() for name, tensor in loaded.items()}
    state = manager.load(7, loaded, exclude=["optimizer", "head", "dataloader"])
    assert state == {key: value for key, value in STATE.items() if key != "dataloader"}
    for name in loaded:
        left_out = name.startswith("optimizer.") or "head" in name
        assert torch.equal(loaded[name], (before if left_out else saved)[name]), name
    assert manager.load(7, loaded, exclude=["train_state"]) == {}
    with pytest.raises(UserError, match="'haed' matches no tensor"):
        manager.load(7, loaded, exclude=["haed"])


@pytest.mark.parametrize("value", [{1: 2}, {"a": (1, 2)}, {"a": torch.tensor(1)}, {"a": [{"b": b"x"}]}])
def test_train_state_is_plain_data(tmp_path, value):
    with pytest.raises(TypeError, match=r"train_state"):
        CheckpointManager(tmp_path).save(1, {}, value)
    assert not list(tmp_path.iterdir())


def test_check_plain_takes_json_data():
    check_plain(STATE, "state")


# Faults. A child process dies or fails at a chosen point. It is forked, so that torch is not imported again, but not
# where there is CUDA, which does not outlive a fork.


def in_child(function, *args):
    method = "spawn" if torch.cuda.is_available() else "fork"
    child = multiprocessing.get_context(method).Process(target=_on_one_thread, args=(function, *args))
    child.start()
    child.join(60)
    code = child.exitcode
    if code is None:  # later tests would count it
        child.kill()
    return code


def _on_one_thread(function, *args):
    torch.set_num_threads(1)  # OpenMP's other threads, if this process has used any, are not forked with it
    function(*args)


def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(root, module, name, after):
    module = importlib.import_module(f"flame.checkpoint.{module}")
    target = getattr(module, name)

    def wrapper(*args, **kwargs):
        if after:
            target(*args, **kwargs)
        die()

    setattr(module, name, wrapper)
    CheckpointManager(root, keep_latest_k=2).save(3, make_state(seed=3), {"step": 3})


KILL_POINTS = [
    ("before any file", "writer", "write_tensors", False, [1, 2]),
    ("before the train state", "writer", "write_tensors", True, [1, 2]),
    ("before the manifest", "writer", "write_manifest", False, [1, 2]),
    ("before the rename", "writer", "write_manifest", True, [1, 2]),
    ("after the rename", "folders", "purge", False, [1, 2, 3]),
    ("after the purge", "folders", "purge", True, [2, 3]),
]


@pytest.mark.parametrize("point", KILL_POINTS, ids=lambda point: point[0])
def test_kill_in_a_save_costs_nothing(tmp_path, point):
    _, module, name, after, expected = point
    save_steps(tmp_path, 1, 2)
    assert in_child(save_and_die, tmp_path, module, name, after) == -signal.SIGKILL
    assert_usable(tmp_path, expected)


def test_kill_in_a_purge_costs_nothing(tmp_path):
    save_steps(tmp_path, 1, 2)
    assert in_child(kill_in_purge, tmp_path) == -signal.SIGKILL
    assert_usable(tmp_path, [2, 3])


def assert_usable(root, expected):
    """Just these steps are there, nothing else, and the newest loads."""
    manager = CheckpointManager(root)
    assert manager.steps() == expected
    latest = manager.latest()
    assert names(root) == [f"step-{step}" for step in expected]
    loaded = make_state(seed=9, trained=False)
    assert manager.load(latest, loaded) == {"step": latest}
    assert_equal(loaded, make_state(seed=latest))


def kill_in_purge(root):
    """Die after the first file of the checkpoint that goes."""
    manager = CheckpointManager(root, keep_latest_k=2)
    purge = folders.purge

    def purge_and_die(*args, **kwargs):
        def remove_one_and_die(folder, **_):
            next(folder.iterdir()).unlink()
            die()

        folders.shutil.rmtree = remove_one_and_die
        purge(*args, **kwargs)

    folders.purge = purge_and_die
    manager.save(3, make_state(seed=3), {"step": 3})


def replace_and_die(root):
    """Die between the two renames that put a new step-2 in place of the old."""
    rename = folders.Path.rename

    def rename_once_and_die(self, target):
        rename(self, target)
        die()

    folders.Path.rename = rename_once_and_die
    CheckpointManager(root).save(2, make_state(seed=5), {"step": 2})


def test_kill_while_a_step_is_replaced(tmp_path):
    save_steps(tmp_path, 1, 2)
    assert in_child(replace_and_die, tmp_path) == -signal.SIGKILL
    manager = CheckpointManager(tmp_path)
    assert manager.latest() == 2
    loaded = make_state(seed=9, trained=False)
    manager.load(2, loaded)
    assert_equal(loaded, make_state(seed=2))


def save_with_little_space(root):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        CheckpointManager(root, keep_latest_k=1).save(3, make_state(seed=3), {"step": 3})
    except SaveError as error:
        assert "checkpoint of step 3 was not saved" in str(error)
        assert "File too large" in str(error)
        os._exit(42)


def test_full_disk_is_reported_and_earlier_checkpoints_stay(tmp_path):
    save_steps(tmp_path, 1, 2)
    assert in_child(save_with_little_space, tmp_path) == 42
    assert names(tmp_path) == ["step-1", "step-2"]
    assert CheckpointManager(tmp_path).latest() == 2


def test_a_purge_that_fails_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    save_steps(tmp_path, 1)

    def refuse(*args, **kwargs):
        raise PermissionError("not yours")

    monkeypatch.setattr(folders, "purge", refuse)
    with caplog.at_level(logging.WARNING):
        save_steps(tmp_path, 2, keep_latest_k=1)
    assert "could not remove old checkpoints" in caplog.text
    assert CheckpointManager(tmp_path).steps() == [1, 2]
