from __future__ import annotations

import pytest
import torch

from flame.models.columns import split_columns

SIZES = (4, 2, 2)


class Side(torch.autograd.Function):
    """Three tensors whose gradients are columns of one matrix, in ``order``."""

    @staticmethod
    def forward(ctx, order, gradients, *parts):
        ctx.order, ctx.gradients = order, gradients
        return parts[0].sum()

    @staticmethod
    def backward(ctx, _):
        parts = ctx.gradients.split([SIZES[i] for i in ctx.order], dim=-1)
        return None, None, *(parts[ctx.order.index(i)] for i in range(3))


@pytest.mark.parametrize(("order", "is_copied"), [((0, 1, 2), False), ((0, 2, 1), True), ((1, 0, 2), True)])
def test_gradients_that_lie_side_by_side_are_not_copied(order, is_copied):
    x, gradients = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 3, 8)
    parts = split_columns(x, SIZES)
    assert [torch.equal(part, other) for part, other in zip(parts, x.split(SIZES, -1), strict=True)] == [True] * 3
    (found,) = torch.autograd.grad(Side.apply(order, gradients, *parts), x)
    columns = gradients.split([SIZES[i] for i in order], dim=-1)
    assert torch.equal(found, torch.cat([columns[order.index(i)] for i in range(3)], dim=-1))
    assert (found.data_ptr() == gradients.data_ptr()) != is_copied


def test_gradients_of_their_own_and_of_parts_of_a_matrix_are_copied_together():
    x = torch.randn(3, 8, requires_grad=True)
    first, second, third = split_columns(x, SIZES)
    (found,) = torch.autograd.grad((first.square().sum() + third.exp().sum()), x)
    right = torch.cat([2 * x[:, :4], torch.zeros(3, 2), x[:, 6:].exp()], dim=-1)
    torch.testing.assert_close(found, right)
    wide = torch.randn(3, 9)
    (found,) = torch.autograd.grad(Side.apply((0, 1, 2), wide[:, :8], first, second, third), x)
    assert torch.equal(found, wide[:, :8])
    assert found.is_contiguous()
