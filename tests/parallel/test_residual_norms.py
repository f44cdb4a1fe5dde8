"""Norms that add up the gradient of a block's input: the same numbers, without sums of their own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from flame.config import ActivationCheckpoint
from flame.models.backend import import_fla, setup_backend, uninstall
from flame.parallel.recompute import recompute_blocks
from flame.parallel.residual_norms import add_residual_gradients
from flame.parallel.shared_inputs import share_input_gradients
from tests.parallel.calls import Calls

WIDTH = 16


@pytest.fixture(autouse=True)
def _reference():
    setup_backend("reference", "cpu", "auto")
    yield
    uninstall()


class Block(nn.Module):
    """As FLA's blocks with ``fuse_norm``."""

    def __init__(self):
        super().__init__()
        import_fla()
        from fla.modules import RMSNorm

        self.attn_norm, self.mlp_norm = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.attn, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor) -> Tensor:
        residual = hidden_states
        x = self.attn(self.attn_norm(hidden_states))
        x, residual = self.mlp_norm(x, residual, True)
        return residual + self.mlp(x).tanh()


class Unfused(Block):
    """The sum is the block's own."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states + self.attn(self.attn_norm(hidden_states))
        return x + self.mlp(self.mlp_norm(x)).tanh()


class Scaled(Block):
    """What is normed and added is not the block's input."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states * 1.0
        return super().forward(hidden_states)


class AddsTwice(Block):
    """The input is normed a second time, and added again."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = self.attn(self.attn_norm(hidden_states.clone()))
        x = x + self.attn_norm(hidden_states)
        x, residual = self.mlp_norm(x, hidden_states, True)
        x2, residual = self.mlp_norm(x, hidden_states + residual, True)
        return residual + self.mlp(x2)


def make_models(block: type[Block]) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    plain = nn.Sequential(block(), block()).double()
    shared = copy.deepcopy(plain)
    add_residual_gradients(shared.named_children())
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in shared.named_parameters()]
    return plain, shared


def numbers(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


def draw() -> Tensor:
    return torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("block", [Block, Unfused, Scaled, AddsTwice])
def test_numbers_are_the_same(block):
    plain, shared = make_models(block)
    for _ in range(2):
        x = draw()
        assert torch.equal(plain(x), shared(x))
        torch.testing.assert_close(numbers(shared, x), numbers(plain, x), rtol=1e-12, atol=1e-12)


class RMSNorm(nn.Module):
    """One node of autograd's, as FLA's kernels are."""

    def forward(self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False) -> Tensor:
        return _Norm.apply(x, residual, prenorm)


RMSNorm.__module__ = "fla.modules.norm.layernorm"


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, prenorm):
        ctx.has_residual = residual is not None
        total = x + residual if ctx.has_residual else x
        return (2 * total, total.view_as(total)) if prenorm else 2 * total

    @staticmethod
    def backward(ctx, grad, *grad_total):
        grad = sum(grad_total, 2 * grad)
        return grad, grad if ctx.has_residual else None, None


def test_the_first_norm_is_the_inputs_only_reader():
    plain = Block().double()
    plain.attn_norm, plain.mlp_norm = RMSNorm(), RMSNorm()
    shared = copy.deepcopy(plain)
    add_residual_gradients([("0", shared)])
    x = draw() * 1.0
    gradients = [torch.autograd.grad(block(x).sum(), x)[0] for block in (plain, shared)]
    torch.testing.assert_close(*gradients)
    assert [count_readers(block(x), x) for block in (plain, shared)] == [2, 1]


class WritesTo(Block):
    """The input is another by the time it is added."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = self.attn(self.attn_norm(hidden_states))
        x, residual = self.mlp_norm(x, hidden_states.mul_(3), True)
        return residual + self.mlp(x).tanh()


def test_an_input_that_is_written_to_is_left_alone():
    plain = WritesTo().double()
    plain.attn_norm, plain.mlp_norm = RMSNorm(), RMSNorm()  # which, unlike FLA's, keep nothing of their input
    shared = copy.deepcopy(plain)
    add_residual_gradients([("0", shared)])
    x = draw()
    (y, gradient), expected = [(y, torch.autograd.grad(y.sum(), x)[0]) for y in (shared(x * 1.0), plain(x * 1.0))]
    assert torch.equal(y, expected[0])
    torch.testing.assert_close(gradient, expected[1])


def count_readers(y: Tensor, x: Tensor) -> int:
    """How many nodes of y's graph hand a gradient to x."""
    nodes, seen, readers = [y.grad_fn], set(), 0
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            following = [each for each, _ in node.next_functions if each is not None]
            readers += following.count(x.grad_fn)
            nodes += following
    return readers


def test_a_block_that_adds_by_itself_is_asked_once(monkeypatch):
    _, shared = make_models(Unfused)
    asked = []
    for block in shared:
        inner = block.attn_norm.forward.args[0]
        monkeypatch.setattr(
            block.attn_norm,
            "forward",
            type(block.attn_norm.forward)(
                block.attn_norm.forward.func, lambda *a, inner=inner, **k: asked.append(k) or inner(*a, **k)
            ),
        )
    for _ in range(3):
        shared(draw())
    assert [bool(each.get("prenorm")) for each in asked] == [True, True, *[False] * 4]


@pytest.mark.parametrize("mode", ["full", "op", "norm"])
def test_with_what_is_computed_again(mode):
    plain, shared = make_models(Block)
    blocks = list(shared.named_children())
    share_input_gradients(blocks, recompute_norms=mode == "norm")
    if mode != "norm":
        recompute_blocks(
            blocks, ActivationCheckpoint(mode="full" if mode == "full" else "selective", selective_ac_option="op")
        )
    x = draw()
    torch.testing.assert_close(numbers(shared, x), numbers(plain, x), rtol=1e-12, atol=1e-12)


def test_without_gradients_nothing_is_asked():
    plain, shared = make_models(Block)
    x = draw()
    with torch.no_grad(), Calls() as calls:
        y = shared(x)
    assert torch.equal(y, plain(x))
    with torch.no_grad(), Calls() as plain_calls:
        plain(x)
    assert calls.names == plain_calls.names
