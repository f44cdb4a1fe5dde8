import json
import logging
import os

import pytest
import torch
from safetensors.torch import save_file

from flame.checkpoint.initial import load_initial
from flame.checkpoint.manager import CheckpointManager
from flame.checkpoint.names import MODEL, model_tensors, tied_names
from flame.errors import UserError

from .tiny import assert_equal, make_model, make_state


def weights(seed=0, vocab_size=7):
    return {name: tensor.clone() for name, tensor in make_model(seed, vocab_size).state_dict().items()}


def write_hf(folder, tensors, vocab_size=7, sharded=False):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    if not sharded:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{i}.safetensors" for i, name in enumerate(tensors)}
    for name, file in weight_map.items():
        save_file({name: tensors[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def model_part(state):
    return {name: tensor for name, tensor in state.items() if name.startswith(MODEL)}


@pytest.mark.parametrize("sharded", [False, True])
def test_from_a_hugging_face_folder(tmp_path, sharded):
    source = weights()
    folder = write_hf(tmp_path / "hf", source, sharded=sharded)
    state = make_state(seed=1)
    optimizer = {name: tensor.clone() for name, tensor in state.items() if not name.startswith(MODEL)}
    assert load_initial(folder, state) == {}
    assert_equal(model_part(state), {MODEL + name: tensor for name, tensor in source.items()})
    assert_equal({name: state[name] for name in optimizer}, optimizer)


def test_from_torch_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    torch.save(weights(), tmp_path / "pytorch_model.bin")
    state = make_state(seed=1)
    load_initial(tmp_path, state)
    assert_equal(model_part(state), {MODEL + name: tensor for name, tensor in weights().items()})


class Command:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_hostile_torch_file_is_refused_and_nothing_runs(tmp_path):
    torch.save({"embeddings.weight": Command(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot be read"):
        load_initial(tmp_path, make_state())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("part", ["run", "folder", "step"])
def test_from_another_run(tmp_path, part):
    root = tmp_path / "run" / "checkpoint"
    CheckpointManager(root).save(5, make_state(seed=0), {"step": 5})
    path = {"run": tmp_path / "run", "folder": root, "step": root / "step-5"}[part]
    state = make_state(seed=1)
    optimizer = {name: tensor.clone() for name, tensor in state.items() if not name.startswith(MODEL)}
    assert load_initial(path, state) == {}
    assert_equal(model_part(state), model_part(make_state(seed=0)))
    assert_equal({name: state[name] for name in optimizer}, optimizer)


def test_from_another_run_with_its_optimizer(tmp_path):
    CheckpointManager(tmp_path / "checkpoint").save(5, make_state(seed=0), {"step": 5})
    state = make_state(seed=1)
    assert load_initial(tmp_path, state, weights_only=False) == {"step": 5}
    assert_equal(state, make_state(seed=0))


def test_a_source_without_optimizer_leaves_it_fresh(tmp_path, caplog):
    folder = write_hf(tmp_path / "hf", weights())
    state = make_state(seed=1, trained=False)
    with caplog.at_level(logging.INFO):
        load_initial(folder, state, weights_only=False)
    assert "the optimizer starts fresh" in caplog.text
    assert_equal(model_part(state), {MODEL + name: tensor for name, tensor in weights().items()})


def test_exclusions(tmp_path):
    folder = write_hf(tmp_path / "hf", weights())
    state = model_part(make_state(seed=1))
    before = {name: tensor.clone() for name, tensor in state.items()}
    load_initial(folder, state, exclude=["head", "block.0.*"])
    for name in state:
        kept = "head" in name or "block.0" in name
        assert torch.equal(state[name], before[name] if kept else weights()[name.removeprefix(MODEL)]), name


def test_more_rows_than_the_source(tmp_path, caplog):
    """A larger vocabulary keeps its own first values in the rows that the source does not have."""
    folder = write_hf(tmp_path / "hf", weights(vocab_size=5), vocab_size=5)
    state = model_part(make_state(seed=1))
    before = state["model.head.weight"].clone()
    with caplog.at_level(logging.INFO):
        load_initial(folder, state)
    assert torch.equal(state["model.head.weight"][:5], weights(vocab_size=5)["head.weight"])
    assert torch.equal(state["model.head.weight"][5:], before[5:])
    assert "model.head.weight has 7 rows, 5 of them from the source" in caplog.text


def test_other_shapes_are_refused(tmp_path):
    fewer = write_hf(tmp_path / "fewer", weights(vocab_size=9), vocab_size=9)
    with pytest.raises(UserError, match=r"model.embeddings.weight is \[9, 6\] there and \[7, 6\] here"):
        load_initial(fewer, model_part(make_state()))
    unsaid = write_hf(tmp_path / "unsaid", weights(vocab_size=5), vocab_size=99)
    with pytest.raises(UserError, match="2 shapes differ"):
        load_initial(unsaid, model_part(make_state()))


def test_tied_names_in_the_source_are_no_surplus(tmp_path):
    folder = write_hf(tmp_path / "hf", weights())
    model = make_model(seed=1)
    model.head.weight = model.embeddings.weight
    with pytest.raises(UserError, match=r"1 unexpected \(model.head.weight\)"):
        load_initial(folder, model_tensors(model))
    load_initial(folder, model_tensors(model), tied=tied_names(model))
    assert torch.equal(model.head.weight, weights()["embeddings.weight"])


def test_half_files(tmp_path):
    folder = write_hf(tmp_path / "hf", weights(), sharded=True)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(UserError, match=r"5 of 6 shard files found; missing: model-1\.safetensors"):
        load_initial(folder, make_state())


def test_index_cannot_name_files_outside(tmp_path):
    folder = write_hf(tmp_path / "hf", weights(), sharded=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(UserError, match="leads out of the folder"):
        load_initial(folder, make_state())


def test_a_dtype_that_is_no_weights_is_named(tmp_path):
    folder = write_hf(tmp_path / "hf", {"packed": torch.zeros(2, dtype=torch.uint16)})
    with pytest.raises(UserError, match=r"model\.safetensors: packed is U16; known are F64"):
        load_initial(folder, make_state())


def test_nothing_to_load(tmp_path):
    with pytest.raises(UserError, match="is no folder"):
        load_initial(tmp_path / "nowhere", make_state())
    with pytest.raises(UserError, match="holds no checkpoint"):
        load_initial(tmp_path, make_state())
