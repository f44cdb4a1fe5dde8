"""Both conversions on whole models: names, bits, dtypes, ties, vocabulary, interruption."""

import errno
import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from flame.checkpoint import save_run_artifacts
from flame.checkpoint.from_hf import convert_hf_to_dcp
from flame.checkpoint.hf_writer import SafetensorsFile
from flame.checkpoint.manager import CheckpointManager
from flame.checkpoint.names import model_tensors
from flame.checkpoint.to_hf import convert_dcp_to_hf
from flame.errors import UserError
from flame.models.backend import setup_backend
from flame.paths import find_resource

from .test_manager import die, in_child

VOCAB = 100


@pytest.fixture(scope="module", autouse=True)
def backend():
    setup_backend("auto", "cpu")


def make_config(family="llama", tied=False, vocab_size=VOCAB):
    shared = {"vocab_size": vocab_size, "hidden_size": 32, "num_hidden_layers": 2, "tie_word_embeddings": tied}
    if family == "llama":
        return LlamaConfig(**shared, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
    return AutoConfig.for_model(family, **shared, num_heads=2, head_dim=16)


def make_model(config, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).to(dtype)


def read_weights(folder):
    """All tensors of a Hugging Face folder, as the files have them."""
    tensors = {}
    for path in folder.glob("model*.safetensors"):
        tensors |= load_file(path)
    return tensors


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name


def make_run(root, step=3, seed=0, **options):
    """A run folder with one checkpoint of a small model; the model."""
    config = make_config(**options)
    model = make_model(config, seed=seed)
    save_run_artifacts(root, config)
    CheckpointManager(root / "checkpoint").save(step, model_tensors(model), {"step": step})
    return model


@pytest.mark.parametrize("family", ["llama", "gated_deltanet"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hf_to_dcp_to_hf_is_bit_equal(tmp_path, family, tied, dtype):
    hf, run = tmp_path / "hf", tmp_path / "run"
    make_model(make_config(family, tied), dtype).save_pretrained(hf, max_shard_size="20KB")
    assert convert_hf_to_dcp(hf, run / "checkpoint" / "step-0") == run / "checkpoint" / "step-0"
    assert convert_dcp_to_hf(run, max_shard_size="30KB") == run
    assert_same_bits(read_weights(hf), read_weights(run))
    assert len(list(run.glob("model-*.safetensors"))) > 1
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (run, hf))
    assert ours == theirs


def test_export_loads(tmp_path):
    model = make_run(tmp_path, family="gated_deltanet")
    (tmp_path / "metrics.jsonl").write_text("{}")
    convert_dcp_to_hf(tmp_path, tokenizer=find_resource("configs/tokenizer"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_bits(dict(model.state_dict()), dict(loaded.state_dict()))
    assert len(AutoTokenizer.from_pretrained(tmp_path)) > 4000
    assert sorted(path.name for path in tmp_path.iterdir() if "token" not in path.name) == [
        "checkpoint",
        "config.json",
        "generation_config.json",
        "metrics.jsonl",
        "model.safetensors",
        "model_config.json",
    ]


def test_the_runs_tokenizer_is_found_and_its_ids_stated(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(find_resource("configs/tokenizer"))
    model = make_run(tmp_path)
    save_run_artifacts(tmp_path, model.config, tokenizer)
    convert_dcp_to_hf(tmp_path)
    ids = json.loads((tmp_path / "generation_config.json").read_text())
    assert (ids.get("bos_token_id"), ids.get("eos_token_id")) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    text = "def f(x): return x"
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == tokenizer(text).input_ids


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_export_dtype(tmp_path, dtype):
    model = make_run(tmp_path)
    convert_dcp_to_hf(tmp_path, export_dtype=dtype)
    wanted = getattr(torch, dtype)
    assert_same_bits(read_weights(tmp_path), {name: t.to(wanted) for name, t in model.state_dict().items()})
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype


def test_export_dtype_of_the_run(tmp_path):
    make_run(tmp_path)
    (tmp_path / "config.toml").write_text('[checkpoint]\nexport_dtype = "bfloat16"\n')
    convert_dcp_to_hf(tmp_path)
    assert {tensor.dtype for tensor in read_weights(tmp_path).values()} == {torch.bfloat16}
    with pytest.raises(UserError, match="allowed: float32, float16, bfloat16"):
        convert_dcp_to_hf(tmp_path, export_dtype="int4")


def test_vocab_plus_one(tmp_path):
    """Trained with a row more than the original config has: the export follows the weights and loads."""
    make_run(tmp_path, vocab_size=VOCAB + 1)
    original = tmp_path / "original.json"
    original.write_text(json.dumps(make_config(vocab_size=VOCAB).to_dict()))
    convert_dcp_to_hf(tmp_path, config=original)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == loaded.get_input_embeddings().num_embeddings == VOCAB + 1


def test_weights_only_converts(tmp_path):
    config = make_config(tied=True)
    model = make_model(config)
    save_run_artifacts(tmp_path, config)
    tensors = model_tensors(model) | {"optimizer.lm_head.weight.exp_avg": torch.zeros(2)}
    CheckpointManager(tmp_path / "checkpoint").save(1, tensors, {}, weights_only=True, export_dtype="bfloat16")
    convert_dcp_to_hf(tmp_path)
    assert {tensor.dtype for tensor in read_weights(tmp_path).values()} == {torch.bfloat16}
    assert "lm_head.weight" not in read_weights(tmp_path)


def test_tied_weights_saved_twice_are_written_once(tmp_path):
    config = make_config(tied=True)
    save_run_artifacts(tmp_path, config)
    tensors = {f"model.{name}": tensor for name, tensor in make_model(config).state_dict().items()}
    assert "model.lm_head.weight" in tensors
    CheckpointManager(tmp_path / "checkpoint").save(1, tensors, {})
    convert_dcp_to_hf(tmp_path)
    assert "lm_head.weight" not in read_weights(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_newest_or_named_step(tmp_path):
    first = make_run(tmp_path, step=1, seed=1)
    second = make_run(tmp_path, step=2, seed=2)
    for step, model in ((-1, second), (1, first)):
        convert_dcp_to_hf(tmp_path, step=step)
        assert_same_bits(read_weights(tmp_path), dict(model.state_dict()))
    with pytest.raises(UserError, match="steps there are: 1, 2"):
        convert_dcp_to_hf(tmp_path, step=999)


def test_output_elsewhere(tmp_path):
    make_run(tmp_path / "run")
    convert_dcp_to_hf(tmp_path / "run" / "checkpoint" / "step-3", output=tmp_path / "export")
    AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert not (tmp_path / "run" / "config.json").exists()


def test_half_files(tmp_path):
    make_run(tmp_path)
    next((tmp_path / "checkpoint" / "step-3").glob("*.distcp")).unlink()
    with pytest.raises(UserError, match="0 of 1 shard files found"):
        convert_dcp_to_hf(tmp_path, step=3)
    assert not (tmp_path / "config.json").exists()


def test_missing_config_and_other_model(tmp_path):
    make_run(tmp_path)
    with pytest.raises(UserError, match=r"does not fit this model: .* missing"):
        convert_dcp_to_hf(tmp_path, config=find_resource("configs/debug/gated_deltanet.json"))
    (tmp_path / "model_config.json").unlink()
    with pytest.raises(UserError, match=r"keeps no model_config.json; give the model's config with --config"):
        convert_dcp_to_hf(tmp_path)


def convert_and_die(run):
    from flame.checkpoint import to_hf

    setup_backend("auto", "cpu")
    to_hf._write_configs = die
    convert_dcp_to_hf(run, step=2)


def test_interrupted_conversion_leaves_the_model_that_was_there(tmp_path):
    first = make_run(tmp_path, step=1, seed=1)
    second = make_run(tmp_path, step=2, seed=2)
    convert_dcp_to_hf(tmp_path, step=1)
    assert in_child(convert_and_die, tmp_path) == -signal.SIGKILL
    assert_same_bits(dict(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()), dict(first.state_dict()))
    convert_dcp_to_hf(tmp_path, step=2)
    assert_same_bits(read_weights(tmp_path), dict(second.state_dict()))
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def test_what_the_system_does_not_let_is_named(tmp_path, monkeypatch):
    model = make_run(tmp_path / "run")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file: no model in Hugging Face format was written there.*Not a directory"):
        convert_dcp_to_hf(tmp_path / "run", output=tmp_path / "file")
    convert_dcp_to_hf(tmp_path / "run")

    def write(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SafetensorsFile, "write", write)
    with pytest.raises(UserError, match="No space left on device"):
        convert_dcp_to_hf(tmp_path / "run")
    assert_same_bits(read_weights(tmp_path / "run"), dict(model.state_dict()))
    assert not [name for name in os.listdir(tmp_path / "run") if name.endswith(".tmp")]


def test_step_0_from_hf_carries_config_and_tokenizer(tmp_path):
    hf, run = tmp_path / "hf", tmp_path / "run"
    make_model(make_config()).save_pretrained(hf)
    AutoTokenizer.from_pretrained(find_resource("configs/tokenizer")).save_pretrained(hf)
    convert_hf_to_dcp(hf, run / "checkpoint" / "step-0")
    assert json.loads((run / "model_config.json").read_text())["model_type"] == "llama"
    assert (run / "tokenizer" / "tokenizer.json").is_file()
    manager = CheckpointManager(run / "checkpoint")
    assert (manager.latest(), manager.contents(0)) == (0, ("model",))


def test_from_hf_faults(tmp_path):
    hf = tmp_path / "hf"
    make_model(make_config()).save_pretrained(hf, max_shard_size="20KB")
    with pytest.raises(UserError, match="must end in step-N"):
        convert_hf_to_dcp(hf, tmp_path / "run")
    with pytest.raises(UserError, match="is no folder"):
        convert_hf_to_dcp(tmp_path / "nowhere", tmp_path / "run" / "step-0")
    shards = sorted(hf.glob("model-*.safetensors"))
    shutil.move(shards[0], tmp_path / "lost")
    with pytest.raises(UserError, match=f"{len(shards) - 1} of {len(shards)} shard files found"):
        convert_hf_to_dcp(hf, tmp_path / "run" / "checkpoint" / "step-0")
    assert not (tmp_path / "run").exists()


def test_progress_is_told(tmp_path):
    make_run(tmp_path / "run")
    told = []
    convert_dcp_to_hf(tmp_path / "run", on_bytes=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] > 0
    told.clear()
    convert_hf_to_dcp(
        tmp_path / "run", tmp_path / "other" / "checkpoint" / "step-0", on_bytes=lambda *at: told.append(at)
    )
    assert told[-1][0] == told[-1][1] > 0
