"""The mixers' forward passes against FLA's own slow ones, which are right for one unpacked document."""

from __future__ import annotations

import logging

import pytest
import torch
from fla.layers.mamba import Mamba
from fla.layers.mamba2 import Mamba2
from fla.models.cache_utils import Cache

from flame.models.backend import setup_backend, uninstall
from tests.models.reference.recurrences import assert_same_with_gradients, relative_error

MAMBA = dict(hidden_size=8, intermediate_size=16, state_size=4, layer_idx=0)
MAMBA2 = dict(hidden_size=8, expand=2, head_dim=4, state_size=6, chunk_size=16, layer_idx=0)
LAYERS = {
    "mamba": (Mamba, MAMBA),
    "mamba, other options": (
        Mamba,
        MAMBA | dict(conv_kernel=3, use_conv_bias=False, use_bias=True, hidden_act="gelu"),
    ),
    "mamba2": (Mamba2, MAMBA2),
    "mamba2, no norm": (Mamba2, MAMBA2 | dict(rmsnorm=False, D_has_hdim=True)),
    "mamba2, other options": (
        Mamba2,
        MAMBA2 | dict(norm_before_gate=True, use_bias=True, use_conv_bias=False, dt_limit=(0.01, 0.05)),
    ),
}


@pytest.fixture(autouse=True, scope="module")
def reference_backend():
    setup_backend("reference", "cpu")
    yield
    uninstall()


def make_layer(name, **overrides):
    layer_class, options = LAYERS[name]
    torch.manual_seed(0)
    return layer_class(**(options | overrides)).double()


@pytest.mark.parametrize("name", LAYERS)
def test_one_document_is_what_flas_own_forward_gives(name):
    layer = make_layer(name)
    slow = layer.torch_forward if isinstance(layer, Mamba2) else layer.slow_forward
    parameters = {f"p{i}": p.detach() for i, p in enumerate(layer.parameters())}
    names = [name for name, _ in layer.named_parameters()]

    def call(function):
        def run(x, **values):
            def forward(x):
                return function(x)[0]

            weights = dict(zip(names, values.values(), strict=True))
            return (
                torch.func.functional_call(
                    _Wrapper(layer, forward), {f"layer.{k}": v for k, v in weights.items()}, (x,)
                ),
            )

        return run

    # FLA's slow forward computes in float32 whatever the layer's dtype.
    inputs = {"x": torch.randn(2, 37, 8, dtype=torch.float64)} | parameters
    assert_same_with_gradients(call(layer), call(slow), inputs, 1e-5, torch.float64)


class _Wrapper(torch.nn.Module):
    def __init__(self, layer, forward):
        super().__init__()
        self.layer, self.call = layer, forward

    def forward(self, x):
        return self.call(x)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("cuts", [(1, 1, 1), (2, 9), (20, 1, 5)], ids=str)
def test_a_sequence_may_arrive_in_pieces_of_any_length(name, cuts):
    layer = make_layer(name)
    x = torch.randn(2, 30, 8, dtype=torch.float64)
    cache, pieces = Cache(), []
    for piece in x.split([30 - sum(cuts), *cuts], dim=1):
        pieces.append(layer(piece, past_key_values=cache, use_cache=True)[0])
    torch.testing.assert_close(torch.cat(pieces, dim=1), layer(x)[0], rtol=1e-6, atol=1e-8)
    assert cache.get_seq_length() == 30


@torch.no_grad()
def test_heads_that_follow_each_other_share_a_group():
    """As in the paper; FLA's slow forward gives head h the group h % G while it reads a prompt."""
    layer = make_layer("mamba2, no norm", n_groups=2)
    layer.out_proj = torch.nn.Identity()
    x = torch.randn(1, 20, 8, dtype=torch.float64)
    first, second = layer(x)[0].chunk(2, dim=-1)
    start = 2 * layer.intermediate_size + layer.ssm_state_size  # B of the second group, behind gate and input
    layer.in_proj.weight[start : start + layer.ssm_state_size] += 1
    changed_first, changed_second = layer(x)[0].chunk(2, dim=-1)
    assert torch.equal(first, changed_first)
    assert ((second - changed_second).abs() > 0).float().mean() > 0.9


def test_building_is_silent(caplog):
    caplog.set_level(logging.DEBUG)
    make_layer("mamba")
    make_layer("mamba2")
    assert caplog.records == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_triton_gives_what_the_reference_gives(name):
    """Packed documents with all gradients, and a sequence in pieces."""
    check_backends(name, "cuda", "triton")
    setup_backend("reference", "cpu")


def check_backends(name, device, backend):
    sizes = dict(head_dim=16) if "mamba2" in name else dict(intermediate_size=128)
    layer = make_layer(name, hidden_size=64, state_size=16, **sizes).float().to(device)
    x = torch.randn(1, 300, 64, device=device, requires_grad=True)
    cu_seqlens = torch.tensor([0, 1, 70, 300], dtype=torch.int32, device=device)

    def results(backend):
        setup_backend(backend, device)
        y = layer(x, cu_seqlens=cu_seqlens)[0]
        gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
        cache = Cache()
        with torch.no_grad():
            pieces = [layer(piece, past_key_values=cache)[0] for piece in x.split([200, 1, 1, 98], dim=1)]
        return y.detach(), *gradients, torch.cat(pieces, dim=1), layer(x)[0].detach()

    expected = results("reference")
    *actual, in_pieces, whole = results(backend)
    for result, target in zip([*actual, in_pieces, whole], expected, strict=True):
        assert relative_error(result, target) < 5e-3  # Triton's float32 products are TF32
    assert relative_error(in_pieces, whole) < 5e-3
