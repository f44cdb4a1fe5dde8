from __future__ import annotations

import itertools

import pytest
import torch

from flame.errors import UserError
from flame.models import attention
from flame.models.attention import make_attention, resolve_attention_backend

CU_SEQLENS = [0, 1, 2, 9, 42, 43, 107]


def attend_token_by_token(q, k, v, bounds_q, bounds_k, window=(-1, -1), causal=True):
    """softmax(q k^T / sqrt(D)) v of [T, H, D] rows, one query at a time; queries are the last of their document."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    outputs = []
    for (q_start, q_end), (k_start, k_end) in zip(
        itertools.pairwise(bounds_q), itertools.pairwise(bounds_k), strict=True
    ):
        for t in range(q_start, q_end):
            own = k_end - (q_end - t)  # the key at the query's position
            first = k_start if window[0] < 0 else max(k_start, own - window[0])
            last = own if causal else k_end - 1
            keys, values = k[first : last + 1], v[first : last + 1]
            weights = torch.einsum("hd,khd->hk", q[t], keys / q.shape[-1] ** 0.5).softmax(-1)
            outputs.append(torch.einsum("hk,khd->hd", weights, values))
    return torch.stack(outputs)


def make_inputs(num_queries=CU_SEQLENS[-1], num_keys=CU_SEQLENS[-1], num_heads=4, num_kv_heads=4, head_dim=8):
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (num_queries, num_heads, head_dim),
        (num_keys, num_kv_heads, head_dim),
        (num_keys, num_kv_heads, head_dim),
    ]
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


def run_varlen(function, inputs, bounds_q, bounds_k=None, **options):
    device = inputs[0].device
    cu_q = torch.tensor(bounds_q, dtype=torch.int32, device=device)
    cu_k = cu_q if bounds_k is None else torch.tensor(bounds_k, dtype=torch.int32, device=device)
    # FLA's layers know the row's length only, or pass max_position_embeddings.
    return function(*inputs, cu_q, cu_k, len(inputs[0]), len(inputs[1]), causal=True, **options)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [(-1, -1), (3, 0), (0, 0)])
def test_sdpa_keeps_documents_apart_forward_and_backward(window, num_kv_heads):
    _, varlen = make_attention("sdpa")
    inputs = make_inputs(num_kv_heads=num_kv_heads)
    twins = [x.detach().clone().requires_grad_() for x in inputs]
    o = run_varlen(varlen, inputs, CU_SEQLENS, window_size=window)
    expected = attend_token_by_token(*twins, CU_SEQLENS, CU_SEQLENS, window)
    torch.testing.assert_close(o, expected)
    cotangent = torch.randn_like(o)
    o.backward(cotangent)
    expected.backward(cotangent)
    for x, twin in zip(inputs, twins, strict=True):
        torch.testing.assert_close(x.grad, twin.grad)


def test_queries_are_the_last_of_their_keys():
    """Decoding: one query a document over documents of different lengths."""
    _, varlen = make_attention("sdpa")
    q, k, v = make_inputs(num_queries=3, num_keys=11)
    bounds_q, bounds_k = [0, 1, 2, 3], [0, 4, 5, 11]
    for window in ((-1, -1), (2, 0)):
        o = run_varlen(varlen, (q, k, v), bounds_q, bounds_k, window_size=window)
        torch.testing.assert_close(o, attend_token_by_token(q, k, v, bounds_q, bounds_k, window))


@pytest.mark.parametrize("window", [(-1, -1), (3, 0)])
@pytest.mark.parametrize("num_queries", [9, 4, 1])
def test_dense_rows(num_queries, window):
    dense, _ = make_attention("sdpa")
    q, k, v = make_inputs(num_queries=2 * num_queries, num_keys=18, num_kv_heads=2)
    rows = (q.view(2, num_queries, 4, 8), k.view(2, 9, 2, 8), v.view(2, 9, 2, 8))
    o = dense(*rows, causal=True, window_size=window)
    expected = attend_token_by_token(q, k, v, [0, num_queries, 2 * num_queries], [0, 9, 18], window)
    torch.testing.assert_close(o.flatten(0, 1), expected)


def test_without_causality_no_padding_is_seen():
    _, varlen = make_attention("sdpa")
    inputs = make_inputs()
    cu = torch.tensor(CU_SEQLENS, dtype=torch.int32)
    o = varlen(*inputs, cu, cu, 107, 107, causal=False)
    torch.testing.assert_close(o, attend_token_by_token(*inputs, CU_SEQLENS, CU_SEQLENS, causal=False))


def test_changing_a_document_leaves_the_others_bit_equal():
    _, varlen = make_attention("sdpa")
    inputs = [x.detach().float() for x in make_inputs()]
    changed = [x.clone() for x in inputs]
    start, end = CU_SEQLENS[3:5]
    for x in changed:
        x[start:end] = torch.nan
    o, o_changed = (run_varlen(varlen, x, CU_SEQLENS) for x in (inputs, changed))
    assert torch.equal(o[:start], o_changed[:start])
    assert torch.equal(o[end:], o_changed[end:])


@pytest.mark.parametrize(
    ("max_seqlen", "num_documents", "context_len", "expected"),
    [
        (100, 4, 32, 32),  # a packed row: FLA passes its length
        (2048, 4, 32, 32),  # or max_position_embeddings
        (100, 4, None, 100),
        (2048, 4, None, 100),
        (40, 4, 32, 40),  # a padded batch: FLA passes the true maximum
        (100, 1, 32, 100),  # one document fills the row
    ],
)
def test_longest_document(max_seqlen, num_documents, context_len, expected):
    assert attention._longest(max_seqlen, 100, num_documents, context_len) == expected


@pytest.mark.parametrize(
    ("name", "device_type", "flash_installed", "expected"),
    [
        ("auto", "cpu", True, "sdpa"),
        ("auto", "cuda", False, "varlen"),
        ("auto", "cuda", True, "flash"),
        ("sdpa", "cuda", True, "sdpa"),
        ("flex", "cuda", False, "flex"),
    ],
)
def test_choice(name, device_type, flash_installed, expected, monkeypatch):
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda package: object() if flash_installed else None)
    assert resolve_attention_backend(name, device_type) == expected


@pytest.mark.parametrize(
    ("name", "device_type", "message"),
    [
        ("varlen", "cpu", "needs a CUDA device"),
        ("flex", "cpu", "needs a CUDA device"),
        ("flash", "cuda", "needs the flash_attn package"),
        ("eager", "cpu", "allowed: auto, varlen, sdpa, flex, flash"),
    ],
)
def test_refusals_give_the_reason(name, device_type, message, monkeypatch):
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(UserError, match=message):
        resolve_attention_backend(name, device_type)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["varlen", "flex"])
@pytest.mark.parametrize("window", [(-1, -1), (15, 0)])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(4, 64), (2, 64), (4, 36)])
def test_gpu_kernels_agree_with_sdpa_without_waiting_for_the_device(backend, window, num_kv_heads, head_dim):
    if backend == "flex" and head_dim == 36:
        pytest.skip("FlexAttention takes head sizes that are powers of two here")
    inputs = [
        x.detach().cuda().bfloat16().requires_grad_() for x in make_inputs(num_kv_heads=num_kv_heads, head_dim=head_dim)
    ]
    twins = [x.detach().double().requires_grad_() for x in inputs]
    cu = torch.tensor(CU_SEQLENS, dtype=torch.int32, device="cuda")
    _, varlen = make_attention(backend, context_len=64)
    warm = varlen(*inputs, cu, cu, 107, 107, causal=True, window_size=window)  # compiles
    torch.autograd.grad(warm.sum(), inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        o = varlen(*inputs, cu, cu, 107, 107, causal=True, window_size=window)
        o.backward(torch.ones_like(o))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = run_varlen(make_attention("sdpa")[1], twins, CU_SEQLENS, window_size=window)
    expected.backward(torch.ones_like(expected))
    for x, twin in [(o, expected), *((x.grad, twin.grad) for x, twin in zip(inputs, twins, strict=True))]:
        assert ((x.double() - twin).norm() / twin.norm()).item() < 2e-2


@pytest.mark.gpu
def test_float32_on_a_gpu_falls_back_to_sdpa():
    inputs = [x.detach().cuda().float() for x in make_inputs()]
    o = run_varlen(make_attention("varlen", context_len=64)[1], inputs, CU_SEQLENS)
    expected = attend_token_by_token(*(x.double() for x in inputs), CU_SEQLENS, CU_SEQLENS)
    torch.testing.assert_close(o.double(), expected, rtol=1e-4, atol=1e-5)
