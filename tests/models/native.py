"""Tiny configs for causal language models that are native to transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

# Applied wherever the config class has the key with a value of its own.
_SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
    "n_embd": 32, "n_layer": 2, "n_head": 2, "n_inner": 48, "n_positions": 64,
    "d_model": 32, "n_layers": 2, "n_heads": 2, "ffn_dim": 48, "word_embed_proj_dim": 32, "num_heads": 2,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "output_router_logits": False,
    "state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_expand": 2,
    "mamba_n_groups": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "attention_dropout": 0.0, "attn_pdrop": 0.0, "attention_probs_dropout_prob": 0.0,
    "rotary_dim": 8, "lru_width": 32,
    "dropout": 0.0, "hidden_dropout_prob": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
_MAMBA2 = {"num_heads": 4, "head_dim": 16, "n_groups": 1}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
# What else a model needs to be tiny, or to show all its kinds of layers.
_SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "gemma2": {"sliding_window": 4},
    "gemma3_text": _SLIDING,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48},
    "mamba2": _MAMBA2,
    "mistral": {"sliding_window": 4},
    "nemotron": {"num_key_value_heads": 1},
    "olmo_hybrid": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_next": _HYBRID,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
    },
}
# FLA registers models of its own under these names; transformers' are reached by their classes.
_SHADOWED = {"mamba": "Mamba", "mamba2": "Mamba2"}


def tiny_native(model_type: str, **overrides: Any) -> nn.Module:
    """The model with random weights (the same at every call), float32."""
    name = _SHADOWED.get(model_type)
    config_class = getattr(transformers, f"{name}Config") if name else CONFIG_MAPPING[model_type]
    default = config_class()
    known = {
        key: value for key, value in _SMALL.items() if getattr(default, key, None) is not None and _is_own(default, key)
    }
    config = config_class(vocab_size=64, pad_token_id=0, **known | _SPECIAL.get(model_type, {}) | overrides)
    torch.manual_seed(0)
    if name:
        return getattr(transformers, f"{name}ForCausalLM")(config)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _is_own(config: Any, key: str) -> bool:
    """Whether the key can be set: some classes compute it from others."""
    computed = getattr(type(config), key, None)
    return not isinstance(computed, property) or computed.fset is not None
