"""Outputs of norms that are computed again: the same gradients, bit for bit, from fewer tensors that are kept."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from flame.config import ActivationCheckpoint
from flame.parallel.recompute import recompute_blocks
from flame.parallel.shared_inputs import share_input_gradients

WIDTH = 16


class Norm(nn.RMSNorm):
    """Counts how often it runs."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(x)


class AddingNorm(nn.Module):
    """Of input and residual, with their sum, as FLA's."""

    runs = 0

    def __init__(self):
        super().__init__()
        self.inner = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor, residual: Tensor, prenorm: bool) -> tuple[Tensor, Tensor]:
        self.runs += 1
        assert prenorm
        return self.inner(x + residual), x + residual


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Norm(WIDTH), AddingNorm()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, o = self.maps
        y = self.first(x)
        y = q(y).tanh() * k(y) + v(y)
        y, residual = self.second(y, x, True)
        return residual + o(y)


def make_model(option: str | None, block=Block) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(3)))
    share_input_gradients(model.named_children(), recompute_norms=option == "norm")
    return model


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()], materialize_grads=True)]


def test_gradients_are_the_same_and_first_norms_run_twice():
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    plain, forgetful = make_model(None), make_model("norm")
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in forgetful.named_parameters()]
    for _ in range(2):
        for a, b in zip(gradients(plain, x), gradients(forgetful, x), strict=True):
            assert torch.equal(a, b)
    assert [(block.first.runs, block.second.runs) for block in plain] == [(2, 2)] * 3
    assert [(block.first.runs, block.second.runs) for block in forgetful] == [(4, 2)] * 3


def test_a_backward_may_be_repeated():
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    y = make_model("norm")(x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y, x)[0])


def test_without_gradients_nothing_is_computed_twice():
    model = make_model("norm")
    with torch.no_grad():
        model(torch.randn(2, 5, WIDTH))
    assert [block.first.runs for block in model] == [1] * 3


class Copies(Block):
    """Its norm's output is kept by products only."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.maps[0](y) + self.maps[1](y)


@pytest.mark.parametrize(("option", "kept"), [(None, 3), ("norm", 0)])
def test_outputs_are_not_kept(option, kept):
    model, x, storages = make_model(option, Copies), torch.randn(2, 5, WIDTH, requires_grad=True), []
    for block in model:
        block.first.register_forward_hook(lambda *hook: storages.append(weakref.ref(hook[-1].untyped_storage())))
    y = model(x)
    assert sum(storage() is not None for storage in storages) == kept
    y.sum().backward()


class Writes(Block):
    """Changes a norm's output before it is used."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.mul_(2)
        return x + self.maps[0](y)


class Parts(Block):
    """Uses half of a norm's output, and the whole of it transposed."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        half = torch.cat([y[..., : WIDTH // 2]] * 2, -1)
        return x + self.maps[0](half) + self.maps[1](y.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("block", [Writes, Parts])
def test_what_is_not_the_output_is_kept_as_it_is(block):
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    plain, forgetful = (gradients(make_model(option, block), x) for option in (None, "norm"))
    for a, b in zip(plain, forgetful, strict=True):
        assert torch.equal(a, b)


class Slices(Block):
    """A norm whose output shares its storage with another tensor as large."""

    class TwoNorm(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            self.both = torch.stack([x, 2 * x])
            return self.both[0]

    def __init__(self):
        super().__init__()
        self.norm = self.TwoNorm()

    def forward(self, x: Tensor) -> Tensor:
        return self.maps[0](self.norm(x)) + self.maps[1](self.norm.both[1])


def test_a_neighbour_is_not_taken_for_the_output():
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    for a, b in zip(gradients(make_model(None, Slices), x), gradients(make_model("norm", Slices), x), strict=True):
        assert torch.equal(a, b)


class Spoils(Block):
    """Writes to the input of a norm."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        y = self.maps[0](self.first(x))
        return y + x.mul_(2)


@pytest.mark.parametrize("option", [None, "norm"])
def test_writing_to_what_is_needed_is_an_error(option):
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(make_model(option, Spoils), x)


@pytest.mark.parametrize("option", [None, "norm"])
def test_a_forward_without_a_backward_leaves_nothing(option):
    class Exponential(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).exp()  # keeps its own result
            seen.append(weakref.ref(y.untyped_storage()))
            return self.maps[0](y)

    seen: list[weakref.ref] = []
    make_model(option, Exponential)(torch.randn(2, 5, WIDTH, requires_grad=True))
    gc.collect()
    assert [reference() for reference in seen] == [None] * 3


class LosesLast(Block):
    """The last layer that reads a norm's output gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.maps[0](y) + self.maps[1](y)
        self.maps[2](y)
        return x + z


@pytest.mark.parametrize("block", [Block, LosesLast])
def test_a_backward_frees_inputs_and_outputs_of_norms(block):
    seen: list[weakref.ref] = []

    def remember(_norm: nn.Module, args: tuple, output: Tensor) -> None:
        seen.extend(weakref.ref(x.untyped_storage()) for x in (args[0], output))

    model = make_model("norm", block)
    recomputed = model[1].first.forward

    def again(x: Tensor) -> Tensor:
        output = recomputed(x)
        seen.append(weakref.ref(output.untyped_storage()))
        return output

    model[1].first.forward = again
    model[1].first.register_forward_hook(remember)
    gc.disable()  # by reference counts alone
    try:
        loss = model(torch.randn(2, 5, WIDTH, requires_grad=True)).sum()
        loss.backward()  # whoever holds the loss goes on to the next micro-batch
        assert len(seen) == 4
        assert [each() for each in seen] == [None] * 4
    finally:
        gc.enable()


def test_blocks_of_libraries_with_norms_are_counted(monkeypatch):
    options = ActivationCheckpoint("selective", "norm")
    assert recompute_blocks([("of a user", Block())], options) == 0
    monkeypatch.setattr(Block, "__module__", "fla.models.modeling")
    blocks = {"plain": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "both": Block()}
    assert recompute_blocks(blocks.items(), options) == 1
    assert all("forward" not in vars(block) for block in blocks.values())
