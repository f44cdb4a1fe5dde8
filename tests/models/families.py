"""A tiny config for every causal LM class that FLA registers."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import fla.models
import torch
from transformers import PretrainedConfig

from flame.models.backend import setup_backend

FAMILIES = sorted(name.removesuffix("ForCausalLM") for name in fla.models.__all__ if name.endswith("ForCausalLM"))

# Applied wherever the config class has the key.
_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "vocab_size": 128,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 16,
}
# What else a family needs to be tiny, or to be built at all.
_SPECIAL: dict[str, dict[str, Any]] = {
    "HGRN2": {"expand_ratio": 16, "num_heads": None},
    "LogLinearMamba2": {
        "hidden_size": 64,
        "vocab_size": 128,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "expand": 2,
    },
    "MLA": {
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "qk_head_dim": 32,
        "v_head_dim": 16,
    },
    "Rodimus": {"ska_attn": {"num_heads": 4}},
    "Samba": {"attn": {"layers": [1], "num_heads": 4, "window_size": 16}},
}


def tiny_config(family: str, **overrides: Any) -> PretrainedConfig:
    """The family's default config with the smallest sizes that its class takes."""
    config_class = getattr(fla.models, f"{family}Config")
    known = inspect.signature(config_class.__init__).parameters
    values = {key: value for key, value in _SMALL.items() if key in known} | _SPECIAL.get(family, {}) | overrides
    return config_class(**values)


def build_eagerly(config: PretrainedConfig) -> torch.nn.Module:
    """Build the family's model on the CPU, in the plain way."""
    setup_backend("reference", "cpu")
    family = type(config).__name__.removesuffix("Config")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(fla.models, f"{family}ForCausalLM")(config)
