"""The loss in blocks of rows: what exists at a time, when gradients are computed, and FLA's kernels in it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from flame.models import linear_cross_entropy
from flame.models.backend import find_operator, setup_backend, uninstall
from flame.models.linear_cross_entropy import make_fused_loss
from flame.models.reference.cross_entropy import _loss_and_gradient, fused_linear_cross_entropy_loss, scale_and_cap

TARGET = torch.tensor([0, 3, -100, 6, 2, -100, 1])
OPTIONS = [{}, {"label_smoothing": 0.1}, {"logit_scale": 0.3, "logit_softcapping": 2.0}, {"use_l2warp": True}]
NAMES = ("x", "weight", "bias")


def make_inputs(device="cpu", dtype=torch.float64, shape=(7, 4, 9)):
    rows, width, vocabulary = shape
    generator = torch.Generator().manual_seed(0)
    sizes = [(rows, width), (vocabulary, width), (vocabulary,)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_() for s in sizes]


@pytest.fixture
def blocks_of_two_rows(monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "CPU_BLOCK", 18)


def test_all_the_logits_never_exist_at_once(blocks_of_two_rows, monkeypatch):
    rows = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: rows.append(len(x)) or linear(x, *rest))
    x, weight, _ = make_inputs()
    fused_linear_cross_entropy_loss(x, TARGET, weight)
    assert rows == [2, 2, 2, 1]


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_computed_only_where_they_are_asked_for(frozen):
    factors = []

    def of_logits(logits, target, factor):
        factors.append(factor)
        return logits.sum(), None if factor is None else torch.ones_like(logits)

    inputs = [x.requires_grad_(not frozen) for x in make_inputs()]
    run = partial(linear_cross_entropy.linear_cross_entropy, *inputs, TARGET, of_logits)
    assert run().requires_grad is not frozen
    with torch.no_grad():
        run()
    assert factors == [None if frozen else 1.0, None]


@pytest.fixture
def plain_kernels(monkeypatch):
    """FLA's two functions of logits, in plain PyTorch."""
    ops = pytest.importorskip("fla.modules.fused_cross_entropy.ops")

    def forward(logits, target, ignore_index, label_smoothing, logit_scale, logit_softcapping):
        shaped = scale_and_cap(logits.detach(), logit_scale, logit_softcapping)
        smooth = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        return F.cross_entropy(shaped, target, reduction="none", **smooth), None, shaped.logsumexp(-1), 9, 0

    def backward(logits, target, lse, dloss, inplace_backward, **options):
        assert inplace_backward and dloss.shape == target.shape
        _, gradient = _loss_and_gradient(logits.detach(), target, dloss[0], **options)
        return logits.copy_(gradient)

    monkeypatch.setattr(ops, "cross_entropy_fwd", forward)
    monkeypatch.setattr(ops, "cross_entropy_bwd", backward)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_kernels_place_among_the_blocks(plain_kernels, blocks_of_two_rows, options, reduction):
    inputs, twins = make_inputs(), make_inputs()
    loss = make_fused_loss(original=None)(inputs[0], TARGET, *inputs[1:], reduction=reduction, **options)
    expected = fused_linear_cross_entropy_loss(twins[0], TARGET, *twins[1:], reduction=reduction, **options)
    torch.testing.assert_close(loss, expected)
    (3 * loss).backward()
    (3 * expected).backward()
    for name, x, twin in zip(NAMES, inputs, twins, strict=True):
        torch.testing.assert_close(x.grad, twin.grad, msg=name)


def test_half_precision_does_not_lose_the_penalty(plain_kernels):
    """Gradients of about -0.6 and 0.6 by one logit, the largest of its rows, in steps of 0.004, and 0.002 besides."""
    logits = 2 + torch.tensor([[0.4, 0.3, 0.3], [0.6, 0.2, 0.2]]).log()
    x, weight = torch.eye(2).bfloat16(), logits.T.bfloat16().requires_grad_()
    gradients = []
    for warps in (False, True):
        bias = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
        options = {"reduction": "sum", "use_l2warp": warps, "l2_penalty_factor": 0.002}  # divided by two rows
        make_fused_loss(original=None)(x, torch.tensor([0, 1]), weight, bias, **options).backward()
        gradients.append(bias.grad[0].item())
    assert gradients[1] - gradients[0] == pytest.approx(0.001 * logits[:, 0].sum().item(), rel=0.1)


def test_a_vocabulary_that_ranks_share_is_flas_own():
    seen = {}
    fused = make_fused_loss(lambda *args, **options: seen.update(options, args=args) or "its loss")
    assert fused(1, 2, 3, None, -1, 0.1, 0.2, 0.3, 4, "sum", True, 0.5, False, process_group="ranks") == "its loss"
    assert seen == {
        "args": (1, 2, 3, None),
        "ignore_index": -1,
        "label_smoothing": 0.1,
        "logit_scale": 0.2,
        "logit_softcapping": 0.3,
        "num_chunks": 4,
        "reduction": "sum",
        "use_l2warp": True,
        "l2_penalty_factor": 0.5,
        "accumulate_grad_in_fp32": False,
        "process_group": "ranks",
    }


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_it_agrees_with_the_reference_without_waiting_for_the_device(options, dtype):
    """In several blocks."""
    shape = (9000, 64, 32_001)
    setup_backend("triton", "cuda")
    try:
        operator = find_operator("fla.modules.fused_linear_cross_entropy", "fused_linear_cross_entropy_loss")
        inputs = make_inputs("cuda", dtype, shape)
        twins = [x.detach().double().requires_grad_() for x in inputs]
        target = torch.arange(shape[0], device="cuda") % shape[2]
        target[::7] = -100
        operator(inputs[0], target, *inputs[1:], reduction="sum", **options)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = operator(inputs[0], target, *inputs[1:], reduction="sum", **options)
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    finally:
        uninstall()
    expected = fused_linear_cross_entropy_loss(twins[0], target, *twins[1:], reduction="sum", **options)
    expected.backward()
    assert loss.dtype == torch.float32
    # Logits in bfloat16, with a deviation of 8 here, are off by up to 2^-9 of their size, and with them the exponents
    # of the softmax: in float64 with nothing else rounded, that is 1.5 % of the gradients. In the loss it averages out.
    of_loss, of_gradients = (1e-2, 1.8e-2) if dtype == torch.bfloat16 else (1e-4, 1e-4)
    torch.testing.assert_close(loss.double(), expected, rtol=of_loss, atol=0)
    for name, x, twin in zip(NAMES, inputs, twins, strict=True):
        assert (x.grad.double() - twin.grad).norm() <= of_gradients * twin.grad.norm(), name


@pytest.mark.gpu
def test_on_a_gpu_it_needs_little_memory():
    """Two blocks of logits and the weight's gradient, where all logits alone would take 2 GiB."""
    x = torch.randn(32_768, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32_000, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(32_000, (32_768,), device="cuda")
    loss_of = make_fused_loss(original=None)
    loss_of(x, target, weight).backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss_of(x, target, weight).backward()
    assert torch.cuda.max_memory_allocated() - before < 800 << 20
