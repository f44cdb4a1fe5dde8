"""The shipped model configs: sizes as their names say, and blocks to shard."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from flame.models.backend import setup_backend
from flame.models.blocks import find_blocks
from flame.models.build import build_model
from flame.models.flops import FlopCounter, num_parameters
from flame.models.model_config import load_model_config
from flame.paths import find_resource

CONFIGS = find_resource("configs")
SIZED = sorted(path.name for path in CONFIGS.glob("*.json"))
DEBUG = sorted(path.name for path in (CONFIGS / "debug").glob("*.json"))
UNITS = {"M": 1e6, "B": 1e9}


def build(path: Path):
    setup_backend("reference", "cpu")
    return build_model(load_model_config(SimpleNamespace(config=str(path), norm_type="", trust_remote_code=False)))


@pytest.mark.parametrize("name", SIZED)
def test_parameters_as_the_name_says(name, caplog):
    model = build(CONFIGS / name).model
    size, unit = re.fullmatch(r".+_(\d+)([MBmb])\.json", name).groups()
    assert num_parameters(model) == pytest.approx(float(size) * UNITS[unit.upper()], rel=0.05)
    assert len(find_blocks(model)) == model.config.num_hidden_layers
    assert FlopCounter(model).uncounted == []
    assert "does not use" not in caplog.text


# What the command line's contract promises; a hybrid mixes linear and softmax layers.
SHIPPED = {
    "transformer": {"340M", "1B", "7B"},
    "gla": {"340M", "7B"},
    "gated_deltanet": {"340M", "1B"},
    "delta_net": {"340M", "1B"},
    "gsa": {"340M", "1B"},
    "hgrn2": {"340M"},
    "retnet": {"340M"},
    "kda": {"340M"},
    "mamba": {"340M", "1B"},
    "mamba2": {"340M", "1B"},
    "samba": {"1B"},
    "rwkv7": {"400M"},
    "hybrid": {"340M"},
    "sba": {"340m"},
}


@pytest.mark.parametrize("family", SHIPPED)
def test_families_shipped(family):
    sizes = {size for name, size in (name[:-5].rsplit("_", 1) for name in SIZED) if name == family}
    assert sizes == SHIPPED[family]
    assert f"{family}.json" in DEBUG


def test_the_hybrid_mixes():
    mixers = FlopCounter(build(CONFIGS / "hybrid_340M.json").model).mixers
    num_softmax = sum(mixer.per_pair > 0 for mixer in mixers)
    assert 0 < num_softmax < len(mixers) / 2


@pytest.mark.parametrize("name", DEBUG)
def test_debug_configs_are_small_but_not_trivial(name):
    model = build(CONFIGS / "debug" / name).model
    assert num_parameters(model) < 2e6
    assert model.config.vocab_size == 4096
    assert getattr(model.config, "num_heads", 4) >= 4
    assert len(find_blocks(model)) >= 2


def test_demo_config():
    model = build(CONFIGS / "demo" / "gated_deltanet.json").model
    assert (model.config.hidden_size, len(find_blocks(model))) == (128, 2)
    assert num_parameters(model) < 2e6
