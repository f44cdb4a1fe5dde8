from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flame.errors import UserError
from flame.models import backend
from flame.models.backend import resolve_backend, setup_backend, uninstall
from flame.models.reference import activations, delta_rule, norms
from flame.paths import find_resource

FAMILIES = (*backend.REFERENCE_FAMILIES, "hybrid")
HYBRID = {"attn": {"layers": [1], "num_heads": 2, "num_kv_heads": 1, "window_size": 8}}
# What a tiny model of the family needs besides fewer and smaller layers.
TINY = {
    "gated_deltanet": {"head_dim": 16},
    "hgrn2": {"expand_ratio": 16},
    "hybrid": HYBRID | {"head_dim": 16},
    "kda": {"head_dim": 16},
    "mamba2": {"head_dim": 16, "num_heads": 4},
    "samba": HYBRID,
}


@pytest.fixture(autouse=True)
def clean():
    yield
    uninstall()


def tiny_model(family, **overrides):
    setup_backend("reference", "cpu")
    config = json.loads(find_resource(f"configs/debug/{family}.json").read_text())
    config |= {"num_hidden_layers": 2, "hidden_size": 32, "num_heads": 2, "vocab_size": 64, "intermediate_size": 48}
    config |= TINY.get(family, {})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**(config | overrides))).eval()


def bound(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_functions_are_replaced_wherever_fla_has_bound_them_and_put_back():
    uninstall()
    backend.import_fla()
    paths = {
        "fla.layers.gated_deltanet.chunk_gated_delta_rule": delta_rule.chunk_gated_delta_rule,
        "fla.layers.delta_net.chunk_delta_rule": delta_rule.chunk_delta_rule,
        "fla.ops.gated_delta_rule.chunk.chunk_gated_delta_rule": delta_rule.chunk_gated_delta_rule,
        "fla.modules.norm.layernorm.rms_norm": norms.rms_norm,
        "fla.modules.mlp.swiglu_linear": activations.swiglu_linear,
    }
    originals = {path: bound(path) for path in paths}
    table = bound("fla.modules.activations.ACT2FN")
    swish = table["swish"]
    for _ in range(2):  # a second call replaces what the first installed
        setup_backend("reference", "cpu")
        assert {path: bound(path) for path in paths} == paths
        assert table["swish"] is activations.swish
    uninstall()
    assert {path: bound(path) for path in paths} == originals
    assert table["swish"] is swish


def test_attention_layers_build_without_flash_attn():
    setup_backend("auto", "cpu")
    assert bound("fla.layers.attn.flash_attn_func") is not None
    uninstall()
    if importlib.util.find_spec("flash_attn") is None:
        assert bound("fla.layers.attn.flash_attn_func") is None
        assert not hasattr(importlib.import_module("fla.layers.attn"), "flash_attn_varlen_func")


def test_an_fla_release_whose_functions_moved_is_named(monkeypatch):
    backend.import_fla()
    monkeypatch.delattr("fla.ops.gla.chunk_gla")
    with pytest.raises(UserError, match=r"has no fla\.ops\.gla\.chunk_gla; .* knows release 0\.6"):
        setup_backend("reference", "cpu")


@pytest.mark.parametrize(
    ("name", "device_type", "expected"),
    [
        ("auto", "cpu", "reference"),
        ("auto", "cuda", "triton"),
        ("reference", "cuda", "reference"),
        ("triton", "cuda", "triton"),
    ],
)
def test_choice(name, device_type, expected):
    assert resolve_backend(name, device_type) == expected


def test_refusals_give_the_reason():
    with pytest.raises(UserError, match="needs a CUDA device, this is cpu; use 'reference'"):
        setup_backend("triton", "cpu")
    with pytest.raises(UserError, match="allowed: auto, triton, reference"):
        setup_backend("cuda", "cpu")
    with pytest.raises(UserError, match="needs a CUDA device"):
        setup_backend("auto", "cpu", attention_backend="varlen")


@pytest.mark.parametrize(
    ("triton", "capability", "tilelang", "expected"),
    [
        ("3.6.0", (9, 0), False, True),
        ("3.4.0+git1", (9, 0), False, True),
        ("3.7.1", (9, 0), False, False),
        ("3.3.1", (9, 0), False, False),
        ("3.6.0", (8, 0), False, False),
        ("3.6.0", (9, 0), True, False),
    ],
)
def test_which_gpus_need_the_torch_backward(triton, capability, tilelang, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: triton)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if tilelang else None)
    assert backend.needs_chunk_backward() is expected


def test_set_up_is_silent():
    code = "from flame.models.backend import setup_backend; setup_backend('auto', 'cpu')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_changing_a_document_leaves_the_others_logits_bit_equal(family):
    """Documents of one token, shorter and longer than a chunk and than the convolution."""
    model = tiny_model(family)
    bounds = [0, 1, 3, 80, 81, 160]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    ids = torch.randint(64, (1, 160), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids, cu_seqlens=cu_seqlens, use_cache=False).logits
        for start, end in [(0, 1), (3, 80)]:
            changed = ids.clone()
            changed[:, start:end] = (ids[:, start:end] + 1) % 64
            other = model(changed, cu_seqlens=cu_seqlens, use_cache=False).logits
            assert torch.equal(logits[:, :start], other[:, :start])
            assert torch.equal(logits[:, end:], other[:, end:])
            assert not torch.equal(logits[:, start:end], other[:, start:end])
        alone = model(ids[:, 3:80], use_cache=False).logits
    torch.testing.assert_close(logits[:, 3:80], alone, rtol=1e-4, atol=1e-5)


VARIANTS = {
    "gated_deltanet": [{}, {"num_v_heads": 4, "allow_neg_eigval": True}, {"use_gate": False}, HYBRID],
    "hybrid": [{}],
    "hgrn2": [{}, {"use_short_conv": True}, HYBRID],
    "gsa": [{}, {"use_short_conv": True, "num_kv_heads": 1}, {"feature_map": "relu"}],
    "retnet": [{}, {"num_kv_heads": 1, "feature_map": "silu", "use_output_gate": False}, {"attn_mode": "fused_chunk"}],
    "kda": [{}, {"num_v_heads": 4, "allow_neg_eigval": True}, {"safe_gate": True, "lower_bound": -5.0}],
    "delta_net": [{}, {"use_gate": True, "use_short_conv": False}],
    "gla": [{}, {"use_short_conv": True, "use_output_gate": False}],
    "mamba": [{}, {"conv_kernel": 3, "use_conv_bias": False, "hidden_act": "gelu"}],
    "mamba2": [{}, {"n_groups": 1, "rmsnorm": False, "D_has_hdim": True}, {"dt_limit": (0.0, 0.02)}],
    "samba": [{}],
    "transformer": [{}, {"num_kv_heads": 1, "window_size": 8, "qk_norm": True}],
}


@pytest.mark.parametrize(
    ("family", "overrides"), [(family, o) for family, variants in VARIANTS.items() for o in variants], ids=str
)
def test_decoding_with_a_cache_equals_the_whole_forward(family, overrides):
    model = tiny_model(family, **overrides)
    ids = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        out = model(ids[:, :10], use_cache=True)
        logits = [out.logits]
        for t in range(10, 24):
            out = model(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), whole, rtol=1e-4, atol=1e-5)


def test_training_and_decoding_modes_agree():
    """FLA's layers call the recurrent operators for short inputs and the chunked ones in training."""
    model = tiny_model("gated_deltanet")
    ids = torch.randint(64, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        short = model(ids, use_cache=False).logits
    torch.testing.assert_close(model(ids, use_cache=False).logits, short, rtol=1e-4, atol=1e-5)
