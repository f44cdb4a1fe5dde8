"""The optimizer: parameter groups, learning rate and skipped steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from flame.config import Optimizer as OptimizerConfig
from flame.fqn import clean_fqn

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
}


def build_optimizer(model: nn.Module, config: OptimizerConfig, no_decay: Iterable[str]) -> torch.optim.Optimizer:
    """Build the optimizer with two parameter groups: decayed and not decayed.

    Args:
        model: the (sharded) model.
        config: name, learning rate, betas, eps, weight decay and implementation. SGD takes ``beta1`` as momentum.
        no_decay: names of the parameters that weight decay must leave alone.
    """
    excluded = set(no_decay)
    trainable = [(clean_fqn(name), param) for name, param in model.named_parameters() if param.requires_grad]
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        assert all(isinstance(param, DTensor) for _, param in trainable), "gathered parameters: reshard the model first"
    groups = [
        {"params": [p for name, p in trainable if name not in excluded], "weight_decay": config.weight_decay},
        {"params": [p for name, p in trainable if name in excluded], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    options: dict = {"lr": config.lr, "foreach": config.implementation == "foreach"}
    options["fused"] = config.implementation == "fused"
    if config.name == "SGD":
        options["momentum"] = config.beta1
    else:
        options |= {"betas": (config.beta1, config.beta2), "eps": config.eps}
    return CLASSES[config.name](groups, **options)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def step_unless(optimizer: torch.optim.Optimizer, bad: torch.Tensor | None) -> None:
    """Update the parameters, or leave parameters and state untouched where ``bad`` is 1.

    The fused implementations decide on the device, so that the host does not wait (the mechanism that
    ``torch.amp.GradScaler`` uses); the others need the answer on the host.

    Args:
        optimizer: optimizer whose gradients are ready.
        bad: float32 scalar, 1.0 to skip the step; None never skips.
    """
    fused = optimizer.defaults.get("fused", False)
    if bad is not None and fused:
        _start_momentum(optimizer)
        # torch would bring the verdict to parameters in the host's memory without waiting until it is there.
        optimizer.grad_scale, optimizer.found_inf = None, bad.to(optimizer.param_groups[0]["params"][0].device)
    elif bad is not None and bad.item():
        return
    optimizer.step()


def _start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give SGD its momentum of zero: when its first fused step is skipped, torch 2.11-2.13 leaves it unset memory."""
    if not isinstance(optimizer, torch.optim.SGD) or optimizer.state or not optimizer.defaults["momentum"]:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
