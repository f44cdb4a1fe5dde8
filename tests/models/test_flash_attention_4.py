"""FlashAttention-4's operators: a stand-in for the package computes what it promises, on the CPU."""

from __future__ import annotations

import inspect
import itertools
import os
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch

from flame.models import attention, flash_attention_4
from flame.models.attention_kernels import Documents, Window, grouped_sdpa
from flame.parallel.recompute import _keep_expensive
from tests.models.test_attention import make_inputs

BOUNDS = [0, 1, 2, 9, 40, 64]


class Package:
    """`flash_attn.cute.interface`: both passes by their formulas, with the checks that the kernels would make."""

    def __init__(self):
        self.calls = []

    def _flash_attn_fwd(self, q, k, v, return_lse, **options):
        self.calls.append(("forward", options))
        assert return_lse and all(x.shape[-1] % 8 == 0 for x in (q, k, v))
        o, logsumexp = q.new_zeros(*q.shape[:2], v.shape[-1]), q.new_zeros(q.shape[1], len(q), dtype=torch.float32)
        for queries, keys, scores in self._scores(q, k, **options):
            o[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), _repeat(v[keys], q))
            logsumexp[:, queries] = scores.logsumexp(-1).float()
        return o, logsumexp, None  # later releases return more

    def _flash_attn_bwd(self, q, k, v, o, o_gradient, logsumexp, deterministic, **options):
        self.calls.append(("backward", options | {"deterministic": deterministic}))
        assert o_gradient.is_contiguous()
        gradients = dq, dk, dv = [torch.zeros_like(x) for x in (q, k, v)]
        for queries, keys, scores in self._scores(q, k, **options):
            torch.testing.assert_close(logsumexp[:, queries], scores.logsumexp(-1).float())
            weights, outwards = scores.softmax(-1), o_gradient[queries]
            weight_gradient = torch.einsum("qhd,khd->hqk", outwards, _repeat(v[keys], q))
            mean = (outwards * o[queries]).sum(-1).T[..., None]
            score_gradient = options["softmax_scale"] * weights * (weight_gradient - mean)
            dq[queries] = torch.einsum("hqk,khd->qhd", score_gradient, _repeat(k[keys], q))
            dk[keys] = _gather(torch.einsum("hqk,qhd->khd", score_gradient, q[queries]), k)
            dv[keys] = _gather(torch.einsum("hqk,qhd->khd", weights, outwards), v)
        return gradients

    def _scores(self, q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, **windows):
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert max_seqlen_q >= cu_seqlens_q.diff().max() and max_seqlen_k >= cu_seqlens_k.diff().max()
        left = windows["window_size_left"]
        right = 0 if windows["causal"] else windows["window_size_right"]
        window = Window(-1 if left is None else left, -1 if right is None else right)
        bounds = zip(itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist()), strict=True)
        for queries, keys in itertools.starmap(lambda q_ends, k_ends: (slice(*q_ends), slice(*k_ends)), bounds):
            scores = softmax_scale * torch.einsum("qhd,khd->hqk", q[queries], _repeat(k[keys], q))
            visible = window.mask(*scores.shape[1:], q.device)
            yield queries, keys, scores if visible is None else scores.masked_fill(~visible, -torch.inf)


def _repeat(x, q):
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _gather(gradient, x):
    """Of repeated heads, to that of the heads."""
    return gradient.unflatten(1, (x.shape[1], -1)).sum(2)


@pytest.fixture
def package(monkeypatch):
    stand_in = Package()
    monkeypatch.setattr(flash_attention_4, "_package", lambda work: stand_in)
    return stand_in


def documents(bounds_q=BOUNDS, bounds_k=None):
    cu_q = torch.tensor(bounds_q, dtype=torch.int32)
    cu_k = cu_q if bounds_k is None else torch.tensor(bounds_k, dtype=torch.int32)
    return Documents(cu_q, cu_k, 40, 40)


inputs_of = partial(make_inputs, num_queries=BOUNDS[-1], num_keys=BOUNDS[-1], num_kv_heads=2, head_dim=16)


@pytest.mark.parametrize("window", [Window(-1, 0), Window(3, 0), Window(-1, -1), Window(2, 5)])
@pytest.mark.parametrize("shape", [{}, {"num_kv_heads": 4, "head_dim": 36}, {"value_dim": 12}], ids=str)
def test_outputs_and_gradients_are_those_of_the_reference(package, window, shape):
    inputs = inputs_of(**shape)
    twins = [x.detach().clone().requires_grad_() for x in inputs]
    o = flash_attention_4.flash_attention_4(*inputs, documents(), None, window)
    expected = grouped_sdpa(*twins, documents(), None, window)
    torch.testing.assert_close(o, expected)
    cotangent = torch.randn_like(o)
    o.backward(cotangent)
    expected.backward(cotangent)
    for x, twin in zip(inputs, twins, strict=True):
        torch.testing.assert_close(x.grad, twin.grad)
    assert [name for name, _ in package.calls] == ["forward", "backward"]


def test_fewer_queries_than_keys(package):
    """As over the pieces of a sequence that ranks share."""
    inputs, some = inputs_of(num_queries=6), documents([0, 1, 2, 3, 4, 6])
    both = Documents(some.bounds_q, documents().bounds_k, 40, 40)
    o = flash_attention_4.flash_attention_4(*inputs, both, 0.3, Window(-1, 0))
    torch.testing.assert_close(o, grouped_sdpa(*inputs, both, 0.3, Window(-1, 0)))


def test_layers_call_it_packed_and_in_rows(package, monkeypatch):
    monkeypatch.setattr(attention, "fits_flash", lambda *_: True)  # here in float64
    dense, varlen = attention.make_attention("fa4", context_len=40)
    inputs, cu = inputs_of(), documents().bounds_q
    expected = attention.make_attention("sdpa")[1](*inputs, cu, cu, 64, 64, causal=True)
    torch.testing.assert_close(varlen(*inputs, cu, cu, 64, 64, causal=True), expected)
    rows = [x.unflatten(0, (2, 32)) for x in inputs]
    expected = attention.make_attention("sdpa")[0](*rows, causal=True)
    torch.testing.assert_close(dense(*rows, causal=True), expected)
    longest = [options["max_seqlen_q"] for _, options in package.calls]
    assert longest == [40, 32]


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "hopper", "blackwell"),
    [(64, 64, True, True), (127, 128, True, True), (160, 160, True, False), (192, 128, True, True),
     (256, 256, True, True), (264, 264, False, False)],
)  # fmt: skip
def test_which_heads_a_gpu_takes(head_dim, value_dim, hopper, blackwell, monkeypatch):
    q, v = torch.empty(1, 1, head_dim), torch.empty(1, 1, value_dim)
    for major, takes in ((9, hopper), (10, blackwell)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, major=major: (major, 0))
        assert flash_attention_4.takes_heads(q, v) is takes


def test_repeatable_runs_say_so(package, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    o = flash_attention_4.flash_attention_4(*inputs_of(), documents(), None, Window(-1, 0))
    o.sum().backward()
    assert package.calls[1][1]["deterministic"] is True


def test_torch_agrees_with_what_the_operators_say_of_themselves(package):
    """Shapes without memory, aliasing, gradients."""
    inputs, two = inputs_of(), documents()
    arguments = (two.bounds_q, two.bounds_k, 40, 40, 0.25, -1, 0)
    torch.library.opcheck(flash_attention_4._forward, (*inputs, *arguments))
    q, k, v = (x.detach() for x in inputs)
    o, logsumexp = flash_attention_4._forward(q, k, v, *arguments)
    torch.library.opcheck(flash_attention_4._backward, (torch.ones_like(o), q, k, v, o, logsumexp, *arguments))


def test_blocks_that_keep_expensive_operators_keep_it(package):
    inputs = inputs_of()

    def block(*tensors):
        return flash_attention_4.flash_attention_4(*tensors, documents(), None, Window(-1, 0)).sin()

    o = torch.utils.checkpoint.checkpoint(block, *inputs, use_reentrant=False, context_fn=_keep_expensive)
    o.sum().backward()
    assert [name for name, _ in package.calls] == ["forward", "backward"]


@pytest.mark.parametrize("given", [None, "mine"])
def test_what_the_package_compiles_is_kept(given, monkeypatch, tmp_path):
    monkeypatch.setattr(flash_attention_4.importlib, "import_module", lambda name: SimpleNamespace(name=name))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    if given:
        monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", given)
    assert flash_attention_4._package.__wrapped__("attention_forward").name == "flash_attn.cute.interface"
    expected = given or str(tmp_path / "flame" / "flash_attention_4")
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == expected
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"


def test_a_folder_that_cannot_be_made_costs_compiling_again(monkeypatch, tmp_path):
    monkeypatch.setattr(flash_attention_4.importlib, "import_module", lambda name: SimpleNamespace(name=name))
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", raising=False)
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", raising=False)
    flash_attention_4._package.__wrapped__("attention_forward")
    assert "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED" not in os.environ
    assert not flash_attention_4.keeps_kernels()


def test_each_pass_waits_once_for_the_process_that_compiles_it(monkeypatch, tmp_path, caplog):
    order = []
    monkeypatch.setattr(flash_attention_4.importlib, "import_module", lambda name: order.append(name) or Package())
    monkeypatch.setattr(flash_attention_4, "_package", cache(flash_attention_4._package.__wrapped__))
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")

    def wait(work, environ, longest_s):
        order.append(work)
        return f"{work} is done"

    monkeypatch.setattr(flash_attention_4, "wait_until_compiled", wait)
    with caplog.at_level("INFO", logger="flame.models.flash_attention_4"):
        for _ in range(2):
            o = flash_attention_4.flash_attention_4(*inputs_of(), documents(), None, Window(-1, 0))
            o.sum().backward()
    name = "flash_attn.cute.interface"  # imported first: the other process works meanwhile
    assert order == [name, "attention_forward", name, "attention_backward"]
    assert caplog.messages[0].startswith("attention_forward is done; waited for ")


def test_heads_of_a_gpu_that_is_hidden(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", None)
    q = torch.empty(1, 1, 160)
    for kind, takes in (("sm_90", True), ("sm_100", False)):
        monkeypatch.setenv("FLASH_ATTENTION_ARCH", kind)
        assert flash_attention_4.takes_heads(q, q) is takes


def test_the_package_takes_what_it_is_given():
    """Names only: its kernels run on GPUs."""
    interface = pytest.importorskip("flash_attn.cute.interface")
    both = flash_attention_4._options(*documents().__dict__.values(), 1.0, -1, 0)
    for function, more in (("_flash_attn_fwd", {"return_lse"}), ("_flash_attn_bwd", {"deterministic"})):
        assert both.keys() | more <= inspect.signature(getattr(interface, function)).parameters.keys()
