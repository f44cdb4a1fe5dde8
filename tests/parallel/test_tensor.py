"""Models that two ranks share, against the same on one process: loss and every gradient."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, PretrainedConfig

from flame.errors import UserError
from flame.models import build_model, init_weights
from flame.models.backend import setup_backend
from flame.models.custom import load_entry
from flame.models.loss import attach_training_forward
from flame.parallel.tensor_plans import share_model
from tests.parallel.ranks import run_cases
from tests.runs.harness import ROOT

TOKENS = 96
_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
_NATIVE = {
    **_SMALL,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "attention_bias": True,
}
# Name -> what its config changes in that of configs/debug (the part before the first space), or a config of its own.
MODELS: dict[str, dict] = {
    "transformer": {"qkv_bias": True, "qk_norm": True, "num_kv_heads": 2},
    "gla": {},
    "gla short convolutions, grouped": {"use_short_conv": True, "num_kv_heads": 2},
    "gated_deltanet": {"head_dim": 16, "num_v_heads": 8},
    "delta_net": {},
    "hybrid": {"head_dim": 16},
    "gsa": {},
    "gsa grouped, short convolutions": {"num_kv_heads": 2, "use_short_conv": True},
    "hgrn2": {"expand_ratio": 16},
    "hgrn2 without bounds": {"expand_ratio": 16, "use_lower_bound": False, "use_short_conv": True},
    "retnet": {},
    "retnet grouped, with a feature map": {"num_kv_heads": 2, "feature_map": "relu", "use_short_conv": True},
    "kda": {"head_dim": 16},
    "kda more value heads": {"head_dim": 16, "num_v_heads": 8, "expand_v": 2.0},
    "rwkv7": {"head_dim": 16},
    "rwkv7 unfused": {"head_dim": 16, "fuse_norm": False},
    "mamba": {"use_bias": True},
    "mamba2": {"head_dim": 16, "state_size": 16, "use_bias": True},
    "mamba2 one group": {"head_dim": 16, "state_size": 16, "n_groups": 1},
    "mamba2 one group, norm before gate": {
        **{"head_dim": 16, "state_size": 16, "n_groups": 1, "norm_before_gate": True, "D_has_hdim": True}
    },
    "samba": {},
    "stickbreaking_attn": {"num_kv_heads": 2, "qkv_bias": True, "qk_norm": True},
    "sba": {"intermediate_size": 96},
    "llama": {"model_type": "llama", **_NATIVE},
    "qwen3": {"model_type": "qwen3", **_NATIVE},
}


def make_config(name: str, **changes) -> PretrainedConfig:
    path = ROOT / "configs" / "debug" / f"{name.partition(' ')[0]}.json"
    values = json.loads(path.read_text()) if path.exists() else {}
    values |= _SMALL | MODELS[name] | changes
    if values["model_type"] == "sba":
        load_entry(str(ROOT / "custom_models" / "sba"), "test")
    if values.get("attn"):
        values["attn"]["layers"] = [1]
    return AutoConfig.for_model(**values)


def make_model(config: PretrainedConfig, mesh: DeviceMesh | None = None, loss_parallel: bool = True) -> nn.Module:
    built = build_model(config)
    loss = None if mesh is None else share_model(built.model, mesh, loss_parallel=loss_parallel)
    attach_training_forward(built.model, loss)
    built.model.to_empty(device="cpu")
    init_weights(built.model, built.recipe, 0, built.tied)
    return built.model


def disturb(model: nn.Module) -> nn.Module:
    """Move every weight at random, so that no gradient is zero because something starts at zero or one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            change = 0.05 * torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                change = distribute_tensor(change, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter += change
    return model


def loss_and_gradients(model: nn.Module, packed: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (1 if packed else 2, TOKENS), generator=generator)
    bounds = {"cu_seqlens": torch.tensor([0, 41, 70, TOKENS], dtype=torch.int32)} if packed else {}
    loss = model(ids, labels=ids.roll(-1), **bounds)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in gradients.items()}
    return {"loss": loss.detach(), **whole}


def compare(config: PretrainedConfig, packed: bool = True, loss_parallel: bool = True) -> None:
    """Raises AssertionError: the loss or a gradient of two ranks is not that of one process."""
    mesh = init_device_mesh("cpu", (2,))
    expected = loss_and_gradients(disturb(make_model(config)), packed)
    got = loss_and_gradients(disturb(make_model(config, mesh, loss_parallel)), packed)
    assert list(expected) == list(got)
    errors = {name: float((got[name] - value).norm() / value.norm()) for name, value in expected.items()}
    wrong = {name: error for name, error in errors.items() if not error < 1e-4}
    assert not wrong, ", ".join(f"{name}: {error:.1e}" for name, error in wrong.items())


class Same:
    """One model's case."""

    def __init__(self, name: str, **options: bool):
        self.name, self.options = name, options
        self.__name__ = " ".join([name, *options])

    def __call__(self) -> None:
        setup_backend("reference", "cpu")
        compare(make_config(self.name), **self.options)


class Refused:
    """A config that two ranks cannot share, and words of the reason."""

    def __init__(self, name: str, words: str, **changes):
        self.name, self.words, self.changes = name, words, changes
        self.__name__ = f"{name} refused for {words}"

    def __call__(self) -> None:
        setup_backend("reference", "cpu")
        with pytest.raises(UserError, match=self.words):
            make_model(make_config(self.name, **self.changes), init_device_mesh("cpu", (2,)))


CASES = [
    *(Same(name) for name in MODELS),
    *(Same(name, packed=False) for name in ("gla", "llama", "qwen3", "mamba", "rwkv7")),
    *(Same(name, loss_parallel=False) for name in ("transformer", "llama")),
    Refused("transformer", "num_kv_heads = 1", num_kv_heads=1),
    Refused("llama", "num_key_value_heads = 1", num_key_value_heads=1),
    Refused("mamba2", "n_groups = 3", n_groups=3, head_dim=32, hidden_size=96),
    Refused("rwkv7", "num_heads = 1", head_dim=64),
    Refused("gla", "vocab", vocab_size=127),
    Refused("gla", "attn_res_proj", attnres_block_size=2),
    Refused("qwen3", "sliding_attention", use_sliding_window=True, sliding_window=8, max_window_layers=0),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, list[str]]:
    return run_cases(CASES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_two_ranks(outcomes, case):
    assert outcomes[case] == ["passed", "passed"]
