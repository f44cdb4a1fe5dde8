"""What tensors are called in a checkpoint: ``model.<fqn>`` and ``optimizer.<fqn>.<slot>``, whatever wraps the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from flame.errors import UserError
from flame.fqn import clean_fqn
from flame.parallel.float8 import master_weight

MODEL = "model."
OPTIMIZER = "optimizer."

# Parts of a run that `checkpoint.exclude_from_loading` may name besides tensors.
STATE_PARTS = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of a model under their checkpoint names.

    The tensors are the model's own, so loading into them loads the model. Tied parameters appear once, under the first
    name that the module tree gives (``model.embeddings.weight`` rather than ``lm_head.weight``).
    """
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[MODEL + clean_fqn(name)] = master_weight(tensor.detach())
    return tensors


def tied_names(model: nn.Module) -> dict[str, str]:
    """Checkpoint names that are left out because they are tied, with the name that holds the tensor."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        key = MODEL + clean_fqn(name)
        if first.setdefault(id(tensor), key) != key:
            tied[key] = first[id(tensor)]
    return tied


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """State of an optimizer under its checkpoint names, such as ``optimizer.lm_head.weight.exp_avg``.

    Empty before the first step: call ``create_optimizer_state`` first when the state is to be loaded.

    Raises:
        UserError: a state entry is not a tensor.
    """
    names = {id(parameter): clean_fqn(name) for name, parameter in model.named_parameters()}
    tensors: dict[str, torch.Tensor] = {}
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            if not isinstance(value, torch.Tensor):
                raise UserError(
                    f"the optimizer keeps {slot!r} of {names[id(parameter)]} as {type(value).__name__}; "
                    "a checkpoint holds tensors only: use an optimizer whose state is made of tensors"
                )
            tensors[f"{OPTIMIZER}{names[id(parameter)]}.{slot}"] = value
    return tensors


@torch.no_grad()
def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer allocate its state without moving a parameter, so that a checkpoint can be loaded into it.

    One step with learning rate 0 and zero gradients leaves the parameters as they are, bit for bit, under AdamW, Adam
    and SGD. The state is zero afterwards, as it is before the first step, and gradients are None.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for slots in optimizer.state.values():
        for value in slots.values():
            if isinstance(value, torch.Tensor):
                value.zero_()


def is_excluded(key: str, exclude: Sequence[str]) -> bool:
    """Whether a checkpoint name falls under an entry of ``checkpoint.exclude_from_loading``.

    An entry is a part of the run (``optimizer``), a name or the start of one up to a dot (``lm_head``,
    ``model.lm_head.weight``), or a pattern with ``*`` (``*.A_log``). A parameter that is excluded takes its optimizer
    state with it.
    """
    names = [key]
    if key.startswith((MODEL, OPTIMIZER)):
        names.append(key.split(".", 1)[1])
    if key.startswith(OPTIMIZER):
        names.append(names[-1].rsplit(".", 1)[0])
    return any(
        name == entry or name.startswith(entry + ".") or fnmatchcase(name, entry) for entry in exclude for name in names
    )


def check_exclusions(exclude: Sequence[str], keys: Iterable[str]) -> None:
    """Refuse entries that name nothing, since a misspelt one would load what the user wants left out.

    Raises:
        UserError: an entry matches no tensor and is no part of a run.
    """
    keys = list(keys)
    idle = [e for e in exclude if e not in STATE_PARTS and not any(is_excluded(key, [e]) for key in keys)]
    if idle:
        raise UserError(
            f"checkpoint.exclude_from_loading: {', '.join(map(repr, idle))} matches no tensor; allowed are "
            f"{', '.join(STATE_PARTS)}, a parameter's name or its beginning, or a pattern with *"
        )
