"""Activation checkpointing of blocks: the same gradients, fewer kept, parameter names as before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flame.config import ActivationCheckpoint
from flame.parallel.recompute import recompute_blocks
from tests.parallel.calls import Calls


class Block(nn.Module):
    """Counts how often it runs."""

    def __init__(self):
        super().__init__()
        self.linear, self.runs = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + torch.tanh(self.linear(x))


def run(options: ActivationCheckpoint) -> tuple[list[Tensor], list[int], int]:
    """Gradients, runs of each block, and the number of blocks that recompute."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(5)))
    names = [name for name, _ in model.named_parameters()]
    number = recompute_blocks(model.named_children(), options)
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert [name for name, _ in model.named_parameters()] == names
    return [parameter.grad for parameter in model.parameters()], [block.runs for block in model], number


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        (ActivationCheckpoint(mode="none"), [1, 1, 1, 1, 1]),
        (ActivationCheckpoint(mode="full"), [2, 2, 2, 2, 2]),
        (ActivationCheckpoint(mode="selective", selective_ac_option="op"), [2, 2, 2, 2, 2]),
        (ActivationCheckpoint(mode="selective", selective_ac_option="1"), [2, 2, 2, 2, 2]),
        (ActivationCheckpoint(mode="selective", selective_ac_option="2"), [2, 1, 2, 1, 2]),
        (ActivationCheckpoint(mode="selective", selective_ac_option="3"), [2, 1, 1, 2, 1]),
    ],
)
def test_gradients_stay_and_chosen_blocks_run_twice(options, runs):
    plain = run(ActivationCheckpoint(mode="none"))[0]
    grads, actual, number = run(options)
    assert actual == runs
    assert number == runs.count(2)
    assert all(torch.equal(a, b) for a, b in zip(plain, grads, strict=True))


class Attends(nn.Module):
    """Torch's variable-length attention between two matrix products."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = (nn.Linear(8, 8, dtype=torch.bfloat16, device="meta") for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        q = self.inner(x).view(-1, 1, 8)
        bounds = torch.empty(3, dtype=torch.int32, device="meta")
        return self.outer(varlen_attn(q, q, q, bounds, bounds, 4, 4, window_size=(-1, 0)).flatten(1))


@pytest.mark.parametrize(("mode", "runs"), [("none", 1), ("selective", 1), ("full", 2)])
def test_variable_length_attention_is_kept(mode, runs):
    model = nn.Sequential(Attends())
    recompute_blocks(model.named_children(), ActivationCheckpoint(mode=mode, selective_ac_option="op"))
    with Calls() as calls:
        y = model(torch.empty(8, 8, dtype=torch.bfloat16, device="meta", requires_grad=True))
        y.backward(torch.empty_like(y))
    assert calls.names.count("torch_attn::_varlen_attn") == runs
    assert calls.names.count("torch_attn::_varlen_attn_backward") == 1


@pytest.mark.gpu
def test_attention_of_a_gpu_is_kept_and_gives_the_same_gradients():
    from flame.models.attention import make_attention

    _, attend = make_attention("varlen", context_len=128)
    bounds = torch.tensor([0, 1, 100, 256], dtype=torch.int32, device="cuda")
    x = torch.randn(256, 2, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return attend(x, x * 0.5, x * 2, bounds, bounds, 256, 256, causal=True)

    results = {}
    for mode in ("none", "selective", "full"):
        model = nn.Sequential(Layer())
        recompute_blocks(model.named_children(), ActivationCheckpoint(mode=mode, selective_ac_option="op"))
        with Calls() as calls:
            gradient = torch.autograd.grad(model(x).square().sum(), x)[0]
        results[mode] = calls.names.count("torch_attn::_varlen_attn"), gradient
    assert [runs for runs, _ in results.values()] == [1, 1, 2]
    assert torch.equal(results["selective"][1], results["none"][1])
