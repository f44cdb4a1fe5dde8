"""Initialise a sharded model so that it starts as the plainly built one would, whatever the layout.

:func:`build_recipe` runs the constructor once without memory and keeps what it did to every parameter, buffer and
plain tensor attribute. :func:`init_weights` does that again for one full tensor at a time on the target device and
keeps this rank's shard, without communication. Every random draw is seeded by (seed, name, ordinal of the draw), so
the weights do not depend on the number of ranks, on the sharding or on the order of the parameters. CPU and CUDA
generators differ, so the device type does matter.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from flame.errors import UserError
from flame.fqn import clean_fqn
from flame.models.recorder import Constant, Recorder, RecordError, Tape, TensorRef, recording

logger = logging.getLogger(__name__)


class InitRecipe(Protocol):
    """What :func:`init_weights` needs to know about a model."""

    def tensors(self, names: Iterable[str], seed: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each name with its full initial tensor on ``device``."""


@dataclass(frozen=True)
class TapeRecipe:
    """Initialisation by replaying the constructor's operations, one tensor at a time."""

    tape: Tape
    targets: dict[str, TensorRef | Constant]
    slices: dict[str, list[int]]  # of the targets that the tape holds
    draws: dict[int, str]  # random event -> "name/ordinal", its part of the seed

    @classmethod
    def from_recording(cls, recorder: Recorder, named: dict[str, torch.Tensor]) -> TapeRecipe:
        tape = recorder.tape
        targets = {name: recorder.name(tensor) for name, tensor in named.items()}
        slices = {name: tape.slice(ref.storage) for name, ref in targets.items() if isinstance(ref, TensorRef)}
        draws: dict[int, str] = {}
        for name, indices in slices.items():
            # A draw that several tensors depend on belongs to the first of them, so that they stay consistent.
            own = [index for index in tape.random_among(indices) if index not in draws]
            draws.update({index: f"{name}/{ordinal}" for ordinal, index in enumerate(own)})
        return cls(tape, targets, slices, draws)

    def tensors(self, names: Iterable[str], seed: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            target = self.targets[name]
            if isinstance(target, Constant):
                yield name, target.value.to(device)
                continue
            with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=_rng_type(device)):
                environment = self.tape.replay(self.slices[name], device, lambda i: _seed_draw(seed, self.draws[i]))
            yield name, environment.tensor(target)


@dataclass(frozen=True)
class EagerRecipe:
    """Initialisation by building the whole model on the CPU, for classes whose constructor cannot be recorded.

    Costs one full model in host memory on every rank, and renaming or reordering parameters changes the weights.
    """

    build: Callable[[], nn.Module]

    def tensors(self, names: Iterable[str], seed: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        with torch.random.fork_rng([]):
            torch.random.default_generator.manual_seed(seed)
            named = dict(named_tensors(self.build()))
        for name in names:
            yield name, named[name].detach().to(device)


def build_recipe(build: Callable[[], nn.Module]) -> tuple[nn.Module, InitRecipe]:
    """Build a model on the meta device together with the recipe of its initial weights.

    Args:
        build: constructs the model, initialised, on the default device; called once here.

    Raises:
        UserError: the model keeps parameters where no module registers them, so that they cannot be sharded.
    """
    try:
        with recording() as recorder:
            model = build()
        recipe = TapeRecipe.from_recording(recorder, dict(named_tensors(model)))
    except UserError:
        raise
    except Exception as fault:  # whatever trips over the recording; a fault of the class itself recurs just below
        with torch.random.fork_rng([]):
            model = build()
        reason = fault if isinstance(fault, RecordError) else f"{type(fault).__name__}: {fault}"
        logger.warning("initial weights: the whole model is built on the CPU by every rank, since %s", reason)
        recipe = EagerRecipe(build)
    to_meta(model)
    return model, recipe


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter, buffer and plain tensor attribute by name, tied ones once under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for module_name, module in model.named_modules():
        for attribute, value in _tensor_attributes(module):
            yield _join(module_name, attribute), value


def to_meta(model: nn.Module) -> None:
    """Replace every tensor of ``model`` by one on the meta device; tied tensors stay tied."""
    replaced: dict[int, torch.Tensor] = {}

    def meta(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in replaced:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            if getattr(tensor, "_no_weight_decay", False):
                empty._no_weight_decay = True
            replaced[id(tensor)] = empty
        return replaced[id(tensor)]

    originals = list(named_tensors(model))  # keeps the ids above unique
    for name, tensor in originals:
        module, attribute = _locate(model, name)
        setattr(module, attribute, meta(tensor))


def tied_groups(model: nn.Module) -> list[list[str]]:
    """Names of the parameters that are one object, a list for each such object."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


@torch.no_grad()
def init_weights(
    model: nn.Module,
    recipe: InitRecipe,
    seed: int,
    tied: list[list[str]] | None = None,
    device: torch.device | str | None = None,
) -> None:
    """Set every parameter, buffer and plain tensor attribute of a materialised model.

    Args:
        model: all of the built model or a part of it with the same names, after ``to_empty``; parameters may be
            DTensors.
        recipe: from :func:`build_recipe`.
        seed: the same seed gives the same full weights on every rank and for every layout.
        tied: from :func:`tied_groups` before sharding; ``to_empty`` unties them, so they are tied again here.
        device: where the full tensors are computed; default: the device of the first parameter.
    """
    _tie(model, tied or [])
    originals = {clean_fqn(name): (name, tensor) for name, tensor in named_tensors(model)}
    if device is None:
        device = next(model.parameters()).device
    done: set[int] = set()
    for name, value in recipe.tensors(originals, seed, torch.device(device)):
        tensor_name, tensor = originals[name]
        if id(tensor) in done:
            continue
        done.add(id(tensor))
        if tensor.is_meta:  # a plain attribute, which ``to_empty`` does not know
            module, attribute = _locate(model, tensor_name)
            setattr(module, attribute, value.clone())
        else:
            _write(tensor, value)


def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy the full ``value`` into ``tensor``, or this rank's part of it when ``tensor`` is a DTensor."""
    if isinstance(tensor, DTensor):
        # src_data_rank=None: every rank has the full value, so nothing is sent.
        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
        tensor = tensor.to_local()
    tensor.copy_(value)


def _tie(model: nn.Module, groups: list[list[str]]) -> None:
    present = {clean_fqn(name): name for name, _ in model.named_parameters(remove_duplicate=False)}
    for group in groups:
        names = [present[name] for name in group if name in present]
        for name in names[1:]:
            module, attribute = _locate(model, name)
            setattr(module, attribute, model.get_parameter(names[0]))


def _tensor_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Tensors that the module keeps as plain attributes."""
    for attribute, value in vars(module).items():
        if isinstance(value, torch.Tensor):
            yield attribute, value
        elif isinstance(value, (list, tuple, dict)):
            found: list[torch.Tensor] = []
            tree_map_only(torch.Tensor, found.append, value)
            if found and attribute not in ("_parameters", "_buffers"):
                raise UserError(
                    f"{type(module).__name__}.{attribute} holds tensors in a {type(value).__name__}; register them as "
                    "buffers or parameters so that they can be initialised, sharded and saved"
                )


def _locate(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    module_name, _, attribute = name.rpartition(".")
    return model.get_submodule(module_name), attribute


def _join(module_name: str, attribute: str) -> str:
    return f"{module_name}.{attribute}" if module_name else attribute


def _seed_draw(seed: int, draw: str) -> None:
    digest = hashlib.blake2b(f"{seed}/{draw}".encode(), digest_size=4).digest()
    torch.manual_seed(int.from_bytes(digest, "little"))


def _rng_type(device: torch.device) -> str:
    return device.type if device.type != "cpu" else "cuda"
