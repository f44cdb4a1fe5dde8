from __future__ import annotations

import importlib
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from flame.models import native_recurrence
from flame.models.backend import setup_backend, uninstall
from flame.models.native_recurrence import use_packed_recurrence
from tests.models.native import tiny_native

BOUNDS = (0, 1, 4, 37, 130)


@pytest.fixture(autouse=True, scope="module")
def reference_backend():
    setup_backend("reference", "cpu")
    yield
    uninstall()


@pytest.fixture(scope="module")
def mamba2():
    from transformers.models.mamba2 import modeling_mamba2

    use_packed_recurrence(tiny_native("mamba2"))
    return modeling_mamba2


def documents(*tensors, dim=1):
    return zip(*(x.split(torch.tensor(BOUNDS).diff().tolist(), dim) for x in tensors), strict=True)


@pytest.mark.parametrize("given", ["cu_seq_lens_q", "seq_idx"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_packed_convolution_is_transformers_own_of_each_document(mamba2, given, activation):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(1, 6, BOUNDS[-1]), torch.randn(6, 4), torch.randn(6)
    indices = torch.arange(4).repeat_interleave(torch.tensor(BOUNDS).diff())[None].int()
    packing = {"cu_seq_lens_q": torch.tensor(BOUNDS), "seq_idx": indices}
    y = mamba2.causal_conv1d_fn(x, weight, bias, activation=activation, **{given: packing[given]})
    own = [mamba2.causal_conv1d_fn(part, weight, bias, activation=activation) for (part,) in documents(x, dim=2)]
    torch.testing.assert_close(y, torch.cat(own, dim=2))


@pytest.mark.parametrize("dt_limit", [(0.0, float("inf")), (0.1, 0.5)])
def test_packed_state_space_layer_is_transformers_own_of_each_document(mamba2, dt_limit):
    torch.manual_seed(0)
    x, dt = torch.randn(1, BOUNDS[-1], 4, 8), torch.randn(1, BOUNDS[-1], 4)
    B, C = torch.randn(1, BOUNDS[-1], 2, 6), torch.randn(1, BOUNDS[-1], 2, 6)
    options = dict(chunk_size=16, D=torch.randn(4), dt_bias=torch.randn(4), dt_softplus=True, dt_limit=dt_limit)
    A = -torch.rand(4) * 4
    y = mamba2.mamba2_chunk_scan(x, dt, A, B, C, cu_seq_lens_q=torch.tensor(BOUNDS), **options)
    own = [mamba2.mamba2_chunk_scan(x, dt, A, B, C, **options) for x, dt, B, C in documents(x, dt, B, C)]
    torch.testing.assert_close(y, torch.cat(own, dim=1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_packed_gated_delta_rule_is_transformers_own_of_each_document(form, monkeypatch):
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid

    name = f"torch_{form}_gated_delta_rule"
    monkeypatch.delitem(sys.modules, modeling_olmo_hybrid.__name__)
    own = inspect.unwrap(vars(importlib.import_module(modeling_olmo_hybrid.__name__))[name])  # as before any model
    use_packed_recurrence(tiny_native("qwen3_next"))
    packed = vars(sys.modules["transformers.models.qwen3_next.modeling_qwen3_next"])[name]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, BOUNDS[-1], 4, 8) for _ in range(3))
    g, beta = F.logsigmoid(torch.randn(1, BOUNDS[-1], 4)), torch.rand(1, BOUNDS[-1], 4)
    y, state = packed(q, k, v, g=g, beta=beta, cu_seqlens=torch.tensor(BOUNDS), use_qk_l2norm_in_kernel=True)
    alone = [
        own(*part[:3], g=part[3], beta=part[4], use_qk_l2norm_in_kernel=True)[0] for part in documents(q, k, v, g, beta)
    ]
    assert state is None
    torch.testing.assert_close(y, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-4)


def test_calls_without_documents_and_installed_packages_stay_transformers_own(mamba2, monkeypatch):
    own = mamba2.causal_conv1d_fn.__wrapped__
    x, weight = torch.randn(1, 6, 9), torch.randn(6, 4)
    assert torch.equal(mamba2.causal_conv1d_fn(x, weight), own(x, weight))
    use_packed_recurrence(tiny_native("mamba2"))
    assert mamba2.causal_conv1d_fn.__wrapped__ is own  # not wrapped twice

    monkeypatch.setattr(mamba2, "causal_conv1d_fn", own)
    monkeypatch.setattr(native_recurrence.importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    use_packed_recurrence(tiny_native("mamba2"))
    assert mamba2.causal_conv1d_fn is own
