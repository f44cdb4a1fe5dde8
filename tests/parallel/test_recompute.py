"""Activation checkpointing of blocks: the same gradients, fewer kept, parameter names as before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flame.config import ActivationCheckpoint
from flame.errors import UserError
from flame.parallel.recompute import recompute_blocks


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


@pytest.mark.parametrize("choice", ["0", "-1", "ops", "1.5", ""])
def test_an_unknown_choice_is_named(choice):
    with pytest.raises(UserError, match=rf"selective_ac_option = {choice}: must be op, or n"):
        recompute_blocks([], ActivationCheckpoint(mode="selective", selective_ac_option=choice))
