import json

import pytest
import torch
from safetensors.torch import load_file

from flame.checkpoint.hf_writer import (
    INDEX,
    SINGLE,
    SafetensorsFile,
    TensorSpec,
    free_tag,
    move_in,
    parse_size,
    plan_shards,
    write_index,
)
from flame.errors import UserError


def tensors():
    torch.manual_seed(0)
    return {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.randn(4),
        "scalar": torch.tensor(3.0),
        "ids": torch.arange(5),
        "flags": torch.tensor([True, False, True]),
        "transposed": torch.randn(2, 3).T,
        "empty": torch.zeros(0, 2),
    }


def specs_of(values):
    return {name: TensorSpec(tensor.size(), tensor.dtype) for name, tensor in values.items()}


def test_the_library_reads_what_is_written(tmp_path):
    values = tensors()
    with SafetensorsFile(tmp_path / "x.safetensors", specs_of(values)) as file:
        for name in file.names:
            file.write(name, values[name])
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == values.keys()
    for name, tensor in values.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name


def test_only_the_planned_tensor_is_taken(tmp_path):
    with SafetensorsFile(tmp_path / "x", specs_of({"a": torch.zeros(2)})) as file:
        with pytest.raises(ValueError, match="is not what comes next"):
            file.write("a", torch.zeros(3))
        file.write("a", torch.zeros(2))


def test_plan_shards():
    specs = specs_of({name: torch.zeros(10) for name in "abcde"})
    assert list(plan_shards(specs, 1000)) == [SINGLE]
    shards = plan_shards(specs, 80)
    assert list(shards) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [list(part) for part in shards.values()] == [["a", "b"], ["c", "d"], ["e"]]
    assert all(len(part) == 1 for part in plan_shards(specs, 1).values())


def write(folder, value, max_bytes, target):
    """An export of one value in every tensor, in a folder beside the target's files."""
    values = {name: torch.full((10,), float(value)) for name in "abc"}
    folder.mkdir()
    shards = plan_shards(specs_of(values), max_bytes, free_tag(target, specs_of(values), max_bytes))
    for file_name, part in shards.items():
        with SafetensorsFile(folder / file_name, part) as file:
            for name in file.names:
                file.write(name, values[name])
    if len(shards) > 1:
        write_index(folder, shards)
    (folder / "config.json").write_text(str(value))


def read(folder):
    """The value that a reader who prefers the single file, as transformers does, would find in every tensor."""
    if (folder / SINGLE).exists():
        loaded = load_file(folder / SINGLE)
    else:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        loaded = {name: load_file(folder / file)[name] for name, file in weight_map.items()}
    assert sorted(loaded) == ["a", "b", "c"]
    found = {float(value) for tensor in loaded.values() for value in tensor}
    assert len(found) == 1, f"a mixture of {found}"
    return found.pop()


SINGLE_FILE, SHARDED = 10_000, 50


@pytest.mark.parametrize("first", [SINGLE_FILE, SHARDED])
@pytest.mark.parametrize("second", [SINGLE_FILE, SHARDED])
def test_move_in_replaces_an_earlier_export(tmp_path, first, second):
    target = tmp_path / "run"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    for value, size in enumerate([first, second, second]):
        write(target / ".aside", value, size, target)
        move_in(target / ".aside", target)
        assert read(target) == value
    weights = {path.name for path in target.iterdir()} - {"notes.txt", "config.json"}
    assert len(weights) == (1 if second == SINGLE_FILE else 4)
    assert (target / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("first", [SINGLE_FILE, SHARDED])
@pytest.mark.parametrize("second", [SINGLE_FILE, SHARDED])
def test_interrupted_move_leaves_a_whole_model(tmp_path, monkeypatch, first, second):
    """Stopped before any of its file operations, a move has put all of the new weights in place or none."""
    seen = set()
    for stop in range(30):
        target = tmp_path / f"run{stop}"
        target.mkdir()
        write(target / ".aside", 0, first, target)
        move_in(target / ".aside", target)
        write(target / ".aside", 1, second, target)
        stopped = move_until(monkeypatch, stop, target)
        seen.add(read(target))
        if not stopped:
            break
    assert seen == {0.0, 1.0}


class Stop(Exception):
    pass


def move_until(monkeypatch, stop, target):
    """Move in, but stop before file operation number ``stop``; whether it was stopped."""
    left = [stop]

    def counted(operation):
        def run(*args, **kwargs):
            if left[0] == 0:
                raise Stop
            left[0] -= 1
            return operation(*args, **kwargs)

        return run

    with monkeypatch.context() as patch:
        path = type(target)
        patch.setattr(path, "replace", counted(path.replace))
        patch.setattr(path, "unlink", counted(path.unlink))
        try:
            move_in(target / ".aside", target)
        except Stop:
            return True
    return False


def test_parse_size():
    assert parse_size("5GB") == 5_000_000_000
    assert parse_size("1.5mb") == 1_500_000
    assert parse_size("40KB") == 40_000
    assert parse_size(123) == 123
    for wrong in ("", "five", "-1GB", "0"):
        with pytest.raises(UserError, match="is no size"):
            parse_size(wrong)
