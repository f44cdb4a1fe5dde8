"""Parameter groups and skipped steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flame.config import Optimizer
from flame.training.optimizer import build_optimizer, set_lr, step_unless

BAD, GOOD = torch.tensor(1.0), torch.tensor(0.0)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))


def give_gradients(model: nn.Module, value: float = 1.0) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def snapshot(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_no_decay_parameters_have_a_group_of_their_own():
    model = make_model()
    excluded = {"0.bias", "1.weight", "1.bias", "2.bias"}
    optimizer = build_optimizer(model, Optimizer(weight_decay=0.3), excluded)
    decayed, kept = optimizer.param_groups
    assert {id(p) for p in decayed["params"]} == {id(model[0].weight), id(model[2].weight)}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    assert len(kept["params"]) == len(excluded)


def test_decay_moves_only_the_decayed():
    model = make_model()
    before = snapshot(model)
    optimizer = build_optimizer(model, Optimizer(lr=0.1, weight_decay=0.5), {"0.bias", "1.weight", "1.bias", "2.bias"})
    give_gradients(model, 0.0)
    step_unless(optimizer, None)
    for (name, parameter), old in zip(model.named_parameters(), before, strict=True):
        factor = 0.95 if name in ("0.weight", "2.weight") else 1.0
        torch.testing.assert_close(parameter.detach(), old * factor)


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_a_skipped_step_leaves_parameters_and_state_alone(name, implementation):
    skipped, plain = make_model(), make_model()
    config = Optimizer(name=name, implementation=implementation, lr=0.1)
    optimizers = [build_optimizer(model, config, ()) for model in (skipped, plain)]
    step_twice = ((skipped, optimizers[0], (BAD, GOOD, BAD, GOOD)), (plain, optimizers[1], (GOOD, GOOD)))
    for model, optimizer, flags in step_twice:
        for flag in flags:
            give_gradients(model, float("nan") if flag is BAD else 0.5)
            step_unless(optimizer, flag)
    for one, other in zip(skipped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_set_lr_reaches_every_group():
    optimizer = build_optimizer(make_model(), Optimizer(lr=0.1), {"0.bias"})
    set_lr(optimizer, 0.02)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.02]


def test_sgd_takes_beta1_as_momentum():
    optimizer = build_optimizer(make_model(), Optimizer(name="SGD", beta1=0.7), ())
    assert optimizer.defaults["momentum"] == 0.7
