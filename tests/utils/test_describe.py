"""flame.utils.describe: a model on paper, for every shipped config."""

from __future__ import annotations

import json

import pytest

from flame.paths import find_resource
from flame.utils.describe import main
from utils.family_table import PAGE, config_row

CONFIGS = find_resource("configs")
SHIPPED = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.json") if "tokenizer" not in path.parts)


def describe(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config(name, capsys):
    code, out, _ = describe(capsys, "--model.config", f"configs/{name}", "--lengths", "8,16,2048,65536", "--json")
    assert code == 0
    found = json.loads(out)
    assert sum(found["parts"].values()) == found["total"]
    assert found["parts"]["embedding"] > 0 and found["parts"]["mixers"] > 0 and found["parts"]["norms"] > 0
    assert found["without_embedding"] == found["total"] - found["parts"]["embedding"]
    assert found["uncounted"] == [] and all(kind["formula"] and kind["source"] for kind in found["mixers"])
    assert sum(kind["count"] for kind in found["mixers"]) == sum(found["blocks"].values())
    short, long = found["lengths"][:2]
    assert short["linear_flops"] == long["linear_flops"] > 0
    has_cache = any(kind["cache"] for kind in found["mixers"])
    assert (long["decode_bytes"] > short["decode_bytes"]) == has_cache
    assert (long["mixer_flops"] > short["mixer_flops"]) == has_cache
    assert has_cache or short["decode_bytes"] == found["state_bytes"] > 0
    assert found["training_bytes"] == 16 * found["total"]
    if "/" not in name:
        assert config_row(name.removesuffix(".json"), found) in PAGE.read_text(encoding="utf-8").splitlines()


def test_numbers_of_a_model_by_hand(capsys):
    _, out, _ = describe(capsys, "--model.config=configs/debug/transformer.json", "--lengths=64", "--json")
    found = json.loads(out)
    assert found["parts"]["embedding"] == 4096 * 128 and found["parts"]["head"] == 0
    assert found["parts"]["mixers"] == 4 * 4 * 128 * 128
    assert found["parts"]["norms"] == 128 * (2 * 4 + 1)
    (row,) = found["lengths"]
    # The head is tied, and a matrix product all the same; on average a query of 64 sees 32.5 keys.
    assert row["linear_flops"] == 6 * (found["total"] - found["parts"]["norms"])
    assert row["mixer_flops"] == 3 * 4 * (4 * 128) * 32.5
    assert found["cache_bytes"] == 4 * 2 * 128 * 2 and row["decode_bytes"] == 64 * found["cache_bytes"]
    assert found["state_bytes"] == 0
    assert found["block_input_bytes"] == 4 * 128 * 2
    # Attention: the input of q, k and v, and that of the output; SwiGLU of width 512: its input and its product.
    assert found["linear_input_bytes"] == 2 * 4 * (128 + 128 + 512)


def test_convolutions_keep_their_last_inputs(capsys):
    _, out, _ = describe(capsys, "--model.config", "configs/debug/gated_deltanet.json", "--json")
    # 4 layers: 4 heads with a 32 x 32 state in float32; q, k and v of 128 channels, 4 inputs each, in bfloat16.
    assert json.loads(out)["state_bytes"] == 4 * (4 * 4 * 32 * 32 + 2 * 3 * 128 * 4)


def test_the_text_names_everything(capsys):
    code, out, err = describe(capsys, "--model.config", "configs/debug/gla.json", "--lengths", "1_024")
    assert (code, err) == (0, "")
    for words in ("4 GLABlock", "tied to the embedding", "Yang et al. 2023", "1,024", "bytes per parameter", "state"):
        assert words in out


def test_a_tokenizer_may_raise_the_vocabulary(capsys):
    options = ("--model.config", "configs/debug/gla.json", "--model.tokenizer_path", "configs/tokenizer", "--json")
    assert describe(capsys, *options)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model.config", "configs/debug/gla.json", "--lengths", "0"), "--lengths 0"),
        (("--model.config", "configs/debug/gla.json", "--lengths", "2k"), "--lengths 2k"),
        (("--model.config", "configs/debug/glas.json"), "did you mean configs/debug/gla.json"),
        (("--model.confg", "configs/debug/gla.json"), "did you mean --model.config"),
        ((), "model.config"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    code, out, err = describe(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
