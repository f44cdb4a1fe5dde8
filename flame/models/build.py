"""Build a causal language model without memory, with all that training needs to know before it is sharded."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from flame.errors import UserError
from flame.models.init import InitRecipe, build_recipe, tied_groups

# Parameters of recurrences that must not be pulled towards zero, for classes that do not mark them themselves.
_NO_DECAY_NAMES = frozenset({"bias", "A_log", "D", "dt_bias"})

# What constructors raise for values that they cannot use, on purpose or not.
_REFUSALS = (ValueError, TypeError, LookupError, AttributeError, AssertionError, ZeroDivisionError, RuntimeError)


@dataclass(frozen=True)
class BuiltModel:
    """A model on the meta device and what sharding would make hard to find out.

    Attributes:
        model: the model in float32, on the meta device.
        recipe: its initial weights, for :func:`flame.models.init.init_weights`.
        tied: names of parameters that are one object, a list for each such object.
        no_decay: names of the parameters without weight decay.
    """

    model: nn.Module
    recipe: InitRecipe
    tied: list[list[str]]
    no_decay: frozenset[str]


def build_model(config: PretrainedConfig, trust_remote_code: bool = False) -> BuiltModel:
    """Build the causal LM that ``config`` describes, on the meta device in float32.

    Call :func:`flame.models.backend.setup_backend` first: some layers cannot be built without it.

    Raises:
        UserError: the config names no causal language model, or its class refuses the values.
    """

    def build() -> nn.Module:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)

    try:
        model, recipe = build_recipe(build)
    except _REFUSALS as fault:
        raise UserError(f"model.config: no {config.model_type} model can be built from it: {_reason(fault)}") from fault
    return BuiltModel(model, recipe, tied_groups(model), no_decay_names(model))


def check_positions(model: nn.Module, length: int, option: str) -> None:
    """Refuse documents longer than a model's table of learned positions.

    Args:
        length: tokens of the longest stretch that the model will see as one.
        option: that says so.

    Raises:
        UserError: names the table, its size and the length.
    """
    for name, module in model.named_modules():
        is_positions = isinstance(module, nn.Embedding) and re.search(r"wpe|position", name.rpartition(".")[2])
        if is_positions and module.num_embeddings < length:
            raise UserError(
                f"{option} = {length}: the model's learned positions ({name}) end at {module.num_embeddings}; use that "
                "at most, or make the table longer; with training.varlen it is training.context_len that counts"
            )


def no_decay_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that weight decay leaves alone.

    These are vectors (normalisation weights, biases and other parameters with one dimension larger than 1), every
    parameter of a normalisation layer, those that the model class marks with ``_no_weight_decay``, and the decay and
    step parameters of recurrences by their usual names. Marks do not survive sharding, so call this before it.
    """
    names = set()
    for module_name, module in model.named_modules():
        is_norm = "Norm" in type(module).__name__
        for name, parameter in module.named_parameters(recurse=False):
            if is_norm or name in _NO_DECAY_NAMES or _is_marked(parameter) or _is_vector(parameter):
                names.add(f"{module_name}.{name}" if module_name else name)
    return frozenset(names)


def _reason(fault: Exception) -> str:
    """The first line of a message; where it says too little, also the line of code that raised."""
    message = next(iter(str(fault).strip().splitlines()), "")
    if message and not isinstance(fault, (LookupError, AttributeError)):
        return message
    kind = type(fault).__name__ + (f": {message}" if message else "")
    frames = [frame for frame in traceback.extract_tb(fault.__traceback__) if not frame.name.startswith("__get")]
    return f"{kind}, in {frames[-1].line}"  # not in the look-up that failed, but where it was asked for


def _is_marked(parameter: nn.Parameter) -> bool:
    return getattr(parameter, "_no_weight_decay", False)


def _is_vector(parameter: nn.Parameter) -> bool:
    # A [1, 1, D] parameter is a vector that broadcasts; a [1, D] one is the weight of a linear layer.
    return parameter.ndim != 2 and sum(size > 1 for size in parameter.shape) <= 1
