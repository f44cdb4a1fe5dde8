"""flame.models.model_config: where a config comes from and how it is fitted."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoConfig, LlamaConfig, PreTrainedTokenizerFast

from flame.errors import UserError
from flame.models.backend import setup_backend
from flame.models.build import build_model
from flame.models.model_config import apply_norm_type, load_model_config
from tests.models.families import tiny_config

TINY = {"model_type": "gla", "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": 200}


def section(config, norm_type: str = "", trust_remote_code: bool = False) -> SimpleNamespace:
    return SimpleNamespace(config=str(config), norm_type=norm_type, trust_remote_code=trust_remote_code)


@pytest.fixture
def write(tmp_path):
    def write_values(values) -> str:
        path = tmp_path / "model.json"
        path.write_text(values if isinstance(values, str) else json.dumps(values))
        return str(path)

    return write_values


def tokenizer(num_tokens: int, **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer with ``num_tokens`` entries, its special tokens added after them."""
    vocab = {f"t{i}": i for i in range(num_tokens)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="t0")), **special)


def test_file_and_folder(write, tmp_path):
    config = load_model_config(section(write(TINY)))
    assert (config.model_type, config.hidden_size, config.fuse_norm) == ("gla", 64, True)
    config.save_pretrained(tmp_path / "run")
    saved = load_model_config(section(tmp_path / "run"))
    assert saved.to_json_string(use_diff=False) == config.to_json_string(use_diff=False)


def test_vocab_plus_1(write, tmp_path):
    """A BOS added after the tokenizer's own entries needs one row more than its vocab_size says."""
    tok = tokenizer(201 - 1, bos_token="<s>")
    assert (tok.vocab_size, tok.bos_token_id, len(tok)) == (200, 200, 201)
    config = load_model_config(section(write(TINY)), tok)
    assert config.vocab_size == 201

    setup_backend("reference", "cpu")
    model = build_model(config).model
    assert model.get_input_embeddings().weight.shape[0] == 201
    assert model.get_output_embeddings().weight.shape[0] == 201
    config.save_pretrained(tmp_path / "run")
    assert AutoConfig.from_pretrained(tmp_path / "run").vocab_size == 201


def test_a_larger_vocabulary_stays(write):
    assert load_model_config(section(write(TINY)), tokenizer(100)).vocab_size == 200


def test_special_ids_are_the_tokenizers(write):
    tok = tokenizer(100, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    config = load_model_config(section(write(TINY)), tok)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (100, 101, 102)

    config = load_model_config(section(write(TINY)), tokenizer(100, eos_token="t1"))
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, 1, None)


def test_an_eos_that_pads_is_still_trained(write):
    config = load_model_config(section(write(TINY)), tokenizer(100, eos_token="t1", pad_token="t1"))
    assert config.pad_token_id is None
    setup_backend("reference", "cpu")
    assert build_model(config).model.get_input_embeddings().padding_idx is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "one JSON object"),
        ("[" * 100_000, "not valid JSON"),
        ({"hidden_size": 64}, "model_type is missing"),
        (TINY | {"model_type": "gated_deltnet"}, "gated_deltanet"),
        (TINY | {"num_hidden_layer": 3, "num_hidden_layers": 2}, None),
        ({"model_type": "gla", "num_hidden_layer": 3}, "did you mean num_hidden_layers"),
        ({"model_type": "gla", "hiden_size": 3}, "did you mean hidden_size"),
        (TINY | {"fuse_cross_entropy": True, "fuse_linear_cross_entropy": True}, "refuses the values"),
        (TINY | {"attn": {"layers": [9], "num_heads": 4}}, "out-of-range layer"),
    ],
)
def test_faults_in_the_file(write, values, message):
    path = write(values)
    if message is None:
        load_model_config(section(path))
        return
    with pytest.raises(UserError, match=message) as caught:
        load_model_config(section(path))
    assert path in str(caught.value)


def test_a_saved_config_reads_back(write, caplog):
    """FLA keeps gsa's expand_k under another name than it takes it; JSON has no infinity."""
    for config in (AutoConfig.for_model("gsa", expand_k=0.5), AutoConfig.for_model("mamba2", hidden_size=64)):
        saved = json.loads(config.to_json_string(use_diff=False))
        again = load_model_config(section(write(saved)))
        assert json.loads(again.to_json_string(use_diff=False)) == saved
    assert again.dt_limit[1] == float("inf")
    assert "does not use" not in caplog.text


def test_unknown_keys_are_named(write, caplog):
    load_model_config(section(write(TINY | {"colour": "red"})))
    assert "does not use colour" in caplog.text


def test_missing_files(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        load_model_config(section(tmp_path / "none.json"))
    with pytest.raises(UserError, match="no such file or folder"):
        load_model_config(section("a" * 300 + ".json"))  # longer than a file's name may be
    with pytest.raises(UserError, match=r"did you mean configs/gla_340M\.json"):
        load_model_config(section("configs/gla_34M.json"))
    with pytest.raises(UserError, match=r"no config\.json"):
        load_model_config(section(tmp_path))
    with pytest.raises(UserError, match=r"model\.config is empty"):
        load_model_config(section(""))
    with pytest.raises(UserError, match="the hub says"):
        load_model_config(section("nobody/no-such-model"))


def test_custom_code_needs_trust(write):
    path = write({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}})
    with pytest.raises(UserError, match="trust_remote_code"):
        load_model_config(section(path))


@pytest.mark.parametrize(
    ("family", "norm_type", "fused"),
    [
        ("GLA", "rmsnorm", False),
        ("GLA", "fused_rmsnorm", True),
        ("GLA", "", True),
        ("GLA", "layernorm", None),
        ("GLA", "np_layernorm", None),
        ("RWKV7", "layernorm", True),
        ("RWKV7", "rmsnorm", None),
    ],
)
def test_norm_type(family, norm_type, fused):
    config = tiny_config(family)
    if fused is None:
        with pytest.raises(UserError, match=f"norm_type = {norm_type}: the {config.model_type} family has"):
            apply_norm_type(config, norm_type)
    else:
        apply_norm_type(config, norm_type)
        assert config.fuse_norm == fused


def test_norm_type_chooses_the_layer():
    setup_backend("reference", "cpu")
    config = tiny_config("GLA")
    apply_norm_type(config, "rmsnorm")
    assert type(build_model(config).model.model.norm).__module__.startswith("torch.nn")
    apply_norm_type(config, "fused_rmsnorm")
    assert type(build_model(config).model.model.norm).__module__.startswith("fla.")


def test_norm_type_of_other_models_is_refused():
    with pytest.raises(UserError, match="only the kind its config names"):
        apply_norm_type(LlamaConfig(), "rmsnorm")
