from __future__ import annotations

import pytest
import torch

from flame.errors import UserError
from flame.models import linear_cross_entropy
from flame.models.reference.cross_entropy import cross_entropy_loss, fused_linear_cross_entropy_loss
from tests.models.reference.recurrences import DTYPES, TOLERANCE, assert_same_with_gradients

TARGET = torch.tensor([0, 3, -100, 6, 2, -100, 1])


def make_inputs():
    torch.manual_seed(0)
    shapes = {"x": (7, 4), "weight": (9, 4), "bias": (9,)}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def loss_sum(logits, label_smoothing=0.0, logit_scale=1.0, softcap=None, lse_square_scale=0.0):
    """Sum over valid rows, straight from the definition."""
    total = logits.new_zeros(())
    for row, target in zip(logits * logit_scale, TARGET.tolist(), strict=True):
        if target == -100:
            continue
        row = row if softcap is None else softcap * (row / softcap).tanh()
        lse = row.exp().sum().log()
        total = total + lse - (1 - label_smoothing) * row[target] - label_smoothing * row.mean()
        total = total + lse_square_scale * lse**2
    return total


@pytest.fixture(params=[1 << 22, 20], ids=["one block", "blocks of two rows"])
def block_elements(request, monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "CPU_BLOCK", request.param)


@DTYPES
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"logit_scale": 0.3, "logit_softcapping": 2.0}], ids=str
)
def test_linear_cross_entropy(options, reduction, dtype, block_elements):
    def run(x, weight, bias):
        return (fused_linear_cross_entropy_loss(x, TARGET, weight, bias, reduction=reduction, **options),)

    def expected(x, weight, bias):
        renamed = {"softcap" if name == "logit_softcapping" else name: value for name, value in options.items()}
        total = loss_sum(x @ weight.T + bias, **renamed)
        return (total / 5 if reduction == "mean" else total,)

    assert_same_with_gradients(run, expected, make_inputs(), TOLERANCE[dtype], dtype)


def test_linear_cross_entropy_l2warp_adds_its_gradient_only(block_elements):
    inputs = make_inputs()
    warped, plain = ({name: x.clone().requires_grad_() for name, x in inputs.items()} for _ in range(2))
    args = dict(reduction="sum", l2_penalty_factor=0.5)
    loss = fused_linear_cross_entropy_loss(
        warped["x"], TARGET, warped["weight"], warped["bias"], use_l2warp=True, **args
    )
    loss.backward()
    largest = (plain["x"] @ plain["weight"].T + plain["bias"]).max(-1).values
    (loss_sum(plain["x"] @ plain["weight"].T + plain["bias"]) + 0.5 / 7 * largest.square().sum() / 2).backward()
    for name in inputs:
        torch.testing.assert_close(warped[name].grad, plain[name].grad)
    assert loss.item() == pytest.approx(loss_sum(inputs["x"] @ inputs["weight"].T + inputs["bias"]).item())


@DTYPES
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "lse_square_scale": 0.01}, {"logit_scale": 0.3, "logit_softcapping": 2.0}],
    ids=str,
)  # fmt: skip
def test_cross_entropy(options, dtype):
    def expected(x):
        renamed = {"softcap" if name == "logit_softcapping" else name: value for name, value in options.items()}
        return (loss_sum(x, **renamed),)

    torch.manual_seed(0)
    inputs = {"x": torch.randn(7, 9, dtype=torch.float64)}
    run = lambda x: (cross_entropy_loss(x, TARGET, **options)[0].sum(),)  # noqa: E731
    assert_same_with_gradients(run, expected, inputs, TOLERANCE[dtype], dtype)


def test_z_loss_is_reported_without_ignored_rows():
    logits = torch.randn(7, 9)
    _, z_loss = cross_entropy_loss(logits, TARGET, lse_square_scale=0.1)
    torch.testing.assert_close(z_loss, 0.1 * logits.logsumexp(-1) ** 2 * (TARGET != -100))


def test_ignored_rows_cost_and_move_nothing():
    x, weight = torch.randn(7, 4, requires_grad=True), torch.randn(9, 4)
    loss = fused_linear_cross_entropy_loss(x, torch.full((7,), -100), weight, reduction="sum")
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_half_precision_gives_a_float32_loss():
    inputs = {name: x.bfloat16().requires_grad_() for name, x in make_inputs().items()}
    loss = fused_linear_cross_entropy_loss(inputs["x"], TARGET, inputs["weight"], inputs["bias"])
    loss.backward()
    assert loss.dtype == torch.float32
    assert inputs["weight"].grad.dtype == torch.bfloat16


def test_what_is_not_there_is_refused():
    x, weight = torch.randn(7, 4), torch.randn(9, 4)
    with pytest.raises(UserError, match="mean or sum, got 'none'"):
        fused_linear_cross_entropy_loss(x, TARGET, weight, reduction="none")
    with pytest.raises(UserError, match="vocabulary-parallel"):
        fused_linear_cross_entropy_loss(x, TARGET, weight, process_group=object())
    with pytest.raises(UserError, match="vocabulary-parallel"):
        cross_entropy_loss(x, TARGET, process_group=object())
