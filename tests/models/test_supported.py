import importlib.util

import pytest
from transformers import AutoConfig, LlamaConfig

from flame.errors import UserError
from flame.models.backend import REFERENCE_FAMILIES, setup_backend
from flame.models.supported import check_supported


def test_families_without_reference_operators_are_refused():
    setup_backend("auto", "cpu")
    for family in REFERENCE_FAMILIES:
        check_supported(AutoConfig.for_model(family), "reference")
    check_supported(LlamaConfig(), "reference")
    check_supported(AutoConfig.for_model("rwkv6"), "triton")
    with pytest.raises(UserError, match="'rwkv6'; it runs delta_net, gated_deltanet, gla"):
        check_supported(AutoConfig.for_model("rwkv6"), "reference")


@pytest.mark.parametrize(("family", "mode"), [("gla", "fused_chunk"), ("hgrn2", "fused_chunk"), ("retnet", "parallel")])
def test_modes_that_a_layer_does_not_carry_out_are_refused(family, mode):
    setup_backend("auto", "cpu")
    for name in ("reference", "triton"):
        with pytest.raises(UserError, match=f"attn_mode '{mode}' of model_type '{family}' is refused"):
            check_supported(AutoConfig.for_model(family, attn_mode=mode), name)


@pytest.mark.parametrize("family", ["comba", "gated_deltanet", "gated_deltaproduct", "kda", "mom", "precond_kda"])
def test_a_mode_that_a_layer_only_decodes_in_is_refused(family):
    setup_backend("auto", "cpu")
    check_supported(AutoConfig.for_model(family), "triton")
    with pytest.raises(UserError, match=f"attn_mode 'fused_recurrent' of model_type '{family}' is refused: .*train"):
        check_supported(AutoConfig.for_model(family, attn_mode="fused_recurrent"), "triton")


@pytest.mark.parametrize("family", ["mom", "rwkv7"])
def test_softmax_layers_that_a_family_cannot_call_are_refused(family):
    """Their blocks take one more result from a mixer than FLA's softmax attention gives."""
    setup_backend("auto", "cpu")
    check_supported(AutoConfig.for_model(family, attn={"layers": [], "num_heads": 4}), "triton")
    with pytest.raises(UserError, match=f"attn of model_type '{family}' is refused: .*no softmax layers"):
        check_supported(AutoConfig.for_model(family, attn={"layers": [1], "num_heads": 4}), "triton")
    with pytest.raises(UserError, match="no softmax layers"):
        check_supported(AutoConfig.for_model(family, attn=[{"layers": [1], "num_heads": 4}]), "triton")


@pytest.mark.parametrize("window_size", [0, -1, 2.5, "64", True])
def test_a_window_that_holds_no_key_is_refused(window_size):
    """FLA's layers take 0 for no window at all while they train, and for an empty cache when they decode."""
    setup_backend("auto", "cpu")
    check_supported(AutoConfig.for_model("transformer", window_size=1), "reference")
    with pytest.raises(UserError, match=f"window_size {window_size!r} of model_type 'transformer'.* or null"):
        check_supported(AutoConfig.for_model("transformer", window_size=window_size), "reference")


def test_a_family_built_on_flash_attn_is_refused_without_it(monkeypatch):
    setup_backend("auto", "cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="'moba' needs the flash_attn package"):
        check_supported(AutoConfig.for_model("moba"), "triton")
