import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from flame.checkpoint.manager import CheckpointManager
from flame.checkpoint.sources import find_source, find_step
from flame.errors import UserError

from .tiny import make_state


@pytest.fixture
def run(tmp_path):
    run = tmp_path / "exp" / "run"
    for step in (1, 2):
        CheckpointManager(run / "checkpoint").save(step, make_state(), {})
    return run


def test_newest_or_named_step(run):
    assert find_step(run).folder == run / "checkpoint" / "step-2"
    assert find_step(run, 1).folder == run / "checkpoint" / "step-1"
    assert find_step(run / "checkpoint", 1).run == run
    assert find_step(run / "checkpoint" / "step-1").run == run


def test_relative_paths_know_their_run(run, monkeypatch):
    monkeypatch.chdir(run / "checkpoint" / "step-1")
    with pytest.raises(UserError, match="holds no checkpoint"):
        find_step(run.parent)
    assert find_step("../step-2").manifest.step == 2


def test_checkpoint_folder_of_another_name(run):
    (run / "checkpoint").rename(run / "saved")
    with pytest.raises(UserError, match="it has no checkpoint/step-N"):
        find_step(run)
    (run / "config.toml").write_text('[checkpoint]\nfolder = "saved"\n')
    assert find_step(run).folder == run / "saved" / "step-2"


def test_checkpoint_folder_of_several_parts(run):
    (run / "deep").mkdir()
    (run / "checkpoint").rename(run / "deep" / "saved")
    (run / "config.toml").write_text('[checkpoint]\nfolder = "deep/saved"\n')
    source = find_step(run)
    assert source.folder == run / "deep" / "saved" / "step-2"
    assert source.run == run


def test_bad_step(run):
    with pytest.raises(UserError, match="steps there are: 1, 2"):
        find_step(run, 999)
    with pytest.raises(UserError, match="is one checkpoint and not step 2"):
        find_step(run / "checkpoint" / "step-1", 2)


def test_half_files(run, caplog):
    next((run / "checkpoint" / "step-2").glob("*.distcp")).unlink()
    with pytest.raises(UserError, match="step-2 is broken: 0 of 1 shard files found"):
        find_step(run, 2)
    assert find_step(run).folder.name == "step-1"
    assert "passed over" in caplog.text


def test_another_programs_checkpoint(tmp_path, caplog):
    folder = tmp_path / "checkpoint" / "step-3"
    torch_dcp.save({"model": {"a": torch.ones(2)}, "train_state": {"x": object}}, checkpoint_id=folder, no_dist=True)
    source = find_step(tmp_path, 3)
    assert source.manifest is None
    assert "has no manifest.json" in caplog.text


def test_a_runs_checkpoint_goes_before_its_export(run, tmp_path):
    (run / "model.safetensors").write_bytes(b"")
    assert find_source(run).folder == run / "checkpoint" / "step-2"
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"")
    assert find_source(tmp_path / "hf") == tmp_path / "hf"
