import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import Metadata

from flame.checkpoint.dcp import METADATA, read_metadata, read_tensors, tensor_metadata, write_tensors
from flame.checkpoint.manifest import BrokenCheckpoint


def tensors():
    torch.manual_seed(0)
    return {
        "model.a": torch.randn(4, 3),
        "model.b": torch.randn(5).bfloat16(),
        "model.scalar": torch.tensor(2.0),
        "model.ids": torch.arange(6, dtype=torch.int64),
        "model.empty": torch.zeros(0, 3),
    }


def test_round_trip(tmp_path):
    saved = tensors()
    write_tensors(tmp_path, saved)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    read_tensors(tmp_path, loaded)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert tensor_metadata(read_metadata(tmp_path))["model.b"].properties.dtype == torch.bfloat16


def test_files_are_cut(tmp_path):
    saved = tensors()
    write_tensors(tmp_path, saved, file_bytes=48)
    assert sum(path.suffix == ".distcp" for path in tmp_path.iterdir()) == 3
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    read_tensors(tmp_path, loaded)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_dtypes_are_converted_and_first_rows_filled(tmp_path):
    saved = {"model.a": torch.randn(3, 2).bfloat16()}
    write_tensors(tmp_path, saved)
    larger = {"model.a": torch.full((5, 2), 7.0)}
    read_tensors(tmp_path, larger)
    assert torch.equal(larger["model.a"][:3], saved["model.a"].float())
    assert (larger["model.a"][3:] == 7).all()


def test_tensors_are_fetched_one_by_one(tmp_path):
    saved = tensors()
    asked = []

    def fetch(name):
        asked.append(name)
        return saved[name]

    write_tensors(tmp_path, {name: t.to("meta") for name, t in saved.items()}, fetch=fetch)
    assert sorted(asked) == sorted(saved)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    read_tensors(tmp_path, loaded)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_stock_dcp_reads_what_is_written(tmp_path):
    saved = tensors()
    write_tensors(tmp_path, saved)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    torch_dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_what_stock_dcp_writes_is_read(tmp_path):
    saved = tensors()
    torch_dcp.save({**saved, "note": {"text": "not a tensor"}}, checkpoint_id=tmp_path, no_dist=True)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    read_tensors(tmp_path, loaded)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert "note.text" not in tensor_metadata(read_metadata(tmp_path))


class Command:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_hostile_metadata_is_refused_and_nothing_runs(tmp_path):
    folder, marker = tmp_path / "step-1", tmp_path / "ran"
    folder.mkdir()
    write_tensors(folder, tensors())
    (folder / METADATA).write_bytes(pickle.dumps(Command(marker)))
    with pytest.raises(BrokenCheckpoint, match="system, which has no place in a checkpoint; refused"):
        read_metadata(folder)
    assert not marker.exists()
    with pytest.raises(BaseException):  # noqa: B017 - whatever stock DCP makes of it, it has run the command
        torch_dcp.load({"model.a": torch.zeros(4, 3)}, checkpoint_id=folder, no_dist=True)
    assert marker.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [("builtins", "eval"), ("torch", "load"), ("torch", "Tensor"), ("pathlib", "Path.home"), ("os", "system")],
)
def test_other_globals_are_refused(tmp_path, module, name):
    (tmp_path / METADATA).write_bytes(f"c{module}\n{name}\n.".encode())
    with pytest.raises(BrokenCheckpoint, match="has no place in a checkpoint"):
        read_metadata(tmp_path)


def test_getattr_reaches_enum_members_only(tmp_path):
    payload = b"cbuiltins\ngetattr\n(ctorch\nSize\nVcount\ntR."
    (tmp_path / METADATA).write_bytes(payload)
    with pytest.raises(BrokenCheckpoint, match="asks for attribute 'count'"):
        read_metadata(tmp_path)


def test_hostile_tensor_file_is_refused_and_nothing_runs(tmp_path):
    folder, marker = tmp_path / "step-1", tmp_path / "ran"
    folder.mkdir()
    write_tensors(folder, {"model.a": torch.zeros(4000)})
    shard = next(folder.glob("*.distcp"))
    shard.write_bytes(pickle.dumps(Command(marker)).ljust(shard.stat().st_size, b"\0"))
    with pytest.raises(RuntimeError, match="rank 0"):
        read_tensors(folder, {"model.a": torch.ones(4000)})
    assert not marker.exists()


def test_entries_that_are_no_tensors_are_not_unpickled(tmp_path):
    folder, marker = tmp_path / "step-1", tmp_path / "ran"
    folder.mkdir()
    torch_dcp.save({"model.a": torch.zeros(2), "state": Command(marker)}, checkpoint_id=folder, no_dist=True)
    assert not marker.exists()
    read_tensors(folder, {"model.a": torch.ones(2)})
    with pytest.raises(RuntimeError, match="state"):
        read_tensors(folder, {"state": torch.ones(2)})
    assert not marker.exists()


@pytest.mark.parametrize("path", ["../other.distcp", "/etc/passwd"])
def test_metadata_cannot_name_files_outside(tmp_path, path):
    write_tensors(tmp_path, tensors())
    metadata = read_metadata(tmp_path)
    for info in metadata.storage_data.values():
        info.relative_path = path
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(BrokenCheckpoint, match="leads out of the checkpoint folder"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("data", [b"", b"garbage", pickle.dumps(Metadata({})), pickle.dumps(3)])
def test_damaged_metadata(tmp_path, data):
    (tmp_path / METADATA).write_bytes(data)
    with pytest.raises(BrokenCheckpoint, match=r"\.metadata is damaged"):
        read_metadata(tmp_path)


def test_missing_and_short_files(tmp_path):
    write_tensors(tmp_path, tensors(), file_bytes=48)
    shards = sorted(tmp_path.glob("*.distcp"))
    shards[0].write_bytes(b"x")
    with pytest.raises(BrokenCheckpoint, match="has 1 bytes instead of"):
        read_metadata(tmp_path)
    shards[0].unlink()
    with pytest.raises(BrokenCheckpoint, match="2 of 3 shard files found"):
        read_metadata(tmp_path)
