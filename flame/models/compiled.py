"""FLA's operators as compiled blocks call them: kernels stay outside of graphs, norms and activations become part.

torch.compile cannot look into a Triton kernel behind FLA's dispatch, and a recurrence or attention over packed
documents must not be traced at all: the number of documents changes with every step. Those are called between two
graphs, as they are called without the compiler. What works on each channel or token alone is written in plain PyTorch
while a graph is traced (``flame/models/reference``, whichever backend runs), for the compiler to fuse with what is
around it; calls outside of graphs keep FLA's kernel.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from flame.models.backend import find_operator, fusible_operators, wrap_operators
from flame.models.native_attention import NAME

# Modules of FLA's whose forward is a kernel with a table that it keeps for later steps.
_METHODS = (("fla.modules.rotary", "RotaryEmbedding.forward"),)
_SEQUENCE_MODULES = (
    ("fla.modules.causal_conv1d", "causal_conv1d"),
    ("fla.modules.causal_conv1d", "causal_conv1d_update"),
    ("fla.modules.token_shift", "token_shift"),
)
_OPERATORS = ("fla.ops.", "fla.modules.", "flame.models.", "flame.parallel.")


def prepare_operators_for_compile() -> None:
    """Make FLA's operators, as the backend and the layout left them, fit for compiled blocks; idempotent.

    Until the next ``setup_backend``.
    """
    fusible = list(fusible_operators())
    kernels = [(module, name, partial(_plain_in_graphs, plain)) for module, name, plain in fusible]
    wrap_operators(kernels)
    in_graphs = {id(find_operator(module, name)) for module, name, _ in fusible}
    outside = (*_SEQUENCE_MODULES, *_METHODS, *_operators_of_layers(in_graphs))
    wrap_operators((module, name, keep_outside) for module, name in outside)
    _keep_native_attention_outside()


def keep_outside(operator: Callable) -> Callable:
    """The operator, called between two graphs."""
    if hasattr(operator, "outside_of_graphs"):
        return operator
    outside = torch.compiler.disable(operator, reason="kernels over packed documents stay outside of graphs")
    outside.outside_of_graphs = True
    return outside


def _plain_in_graphs(plain: Callable, operator: Callable) -> Callable:
    if operator is plain or hasattr(operator, "in_graphs"):
        return operator

    def either(*args: Any, **options: Any) -> Any:
        return plain(*args, **options) if torch.compiler.is_compiling() else operator(*args, **options)

    either.in_graphs = plain
    return either


def _operators_of_layers(in_graphs: set[int]) -> Iterator[tuple[str, str]]:
    """Where FLA's layers and models have bound the operators that are no part of graphs: (module, name) of each."""
    found: dict[int, tuple[str, str]] = {}
    for module_name, module in sorted(sys.modules.items()):
        if module_name.startswith(("fla.layers.", "fla.models.")):
            for name, value in vars(module).items():
                if _is_operator(value) and id(value) not in in_graphs:
                    found.setdefault(id(value), (module_name, name))
    yield from found.values()


def _is_operator(value: Any) -> bool:
    # What torch compiled in an earlier job of the process has left functions there that have no module.
    return inspect.isfunction(value) and str(value.__module__).startswith(_OPERATORS)


def _keep_native_attention_outside() -> None:
    """Also flame's attention in models of transformers."""
    interface = importlib.import_module("transformers").AttentionInterface
    if NAME in interface().valid_keys():
        interface.register(NAME, keep_outside(interface()[NAME]))
