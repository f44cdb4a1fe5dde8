"""Float8 matrix products in the linear layers of blocks, by torchao: products in 8 bits, weights kept in float32.

Embedding and output projection stay as they are, and so do layers whose widths the kernels do not take and those whose
weights their module uses without calling them. Parameters keep their names; see
https://github.com/pytorch/ao/tree/main/torchao/float8 for the recipes.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import types
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flame.config import Float8
from flame.errors import UserError
from flame.parallel.degrees import Degrees

logger = logging.getLogger(__name__)

WIDTH = 16  # the kernels take multiples
_CAPABILITY = (8, 9)


def convert_to_float8(
    blocks: Iterable[tuple[str, nn.Module]], options: Float8, device: torch.device, degree: int = 1
) -> None:
    """Let the blocks' linear layers compute in float8; call on the meta device, before anything else is done to them.

    Args:
        blocks: (name, module).
        options: the recipe.
        device: that the blocks will compute on.
        degree: of tensor parallelism, which divides the layers' widths.

    Raises:
        UserError: the device has no float8, or no layer fits.
    """
    check_device(options, device)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # here: torchao is slow to import

    recipe = Float8LinearConfig.from_recipe_name(options.recipe_name or "tensorwise")
    config = replace(
        recipe, emulate=options.emulate, enable_fsdp_float8_all_gather=options.enable_fsdp_float8_all_gather
    )
    converted, left, unfused = 0, [], 0
    for name, block in blocks:
        unfused += _unfuse_mlps(block, degree)
        fits = dict(_fitting_layers(block, degree))
        convert_to_float8_training(
            block, config=config, module_filter_fn=lambda layer, _name, fits=fits: fits.get(id(layer), False)
        )
        converted += sum(fits.values())
        left += [f"{name}.{each}" for each, layer in block.named_modules() if fits.get(id(layer)) is False]
    if not converted:
        raise UserError(
            f"model.converters = float8: no linear layer of the blocks has widths that are multiples of {WIDTH}"
            + (f" on each of {degree} ranks" if degree > 1 else "")
        )
    logger.info(
        "float8 (%s%s): %d linear layers of the blocks converted, %d left",
        options.recipe_name or "tensorwise",
        ", emulated" if options.emulate else "",
        converted,
        len(left),
    )
    if unfused:
        logger.info("float8: fuse_swiglu off in %d MLPs, which then call their last layer", unfused)


def check_device(options: Float8, device: torch.device) -> None:
    """Refuse a device without float8 matrix products.

    Raises:
        UserError: says what the device is.
    """
    if options.emulate:
        return
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is None or capability < _CAPABILITY:
        found = "a CPU" if capability is None else "a GPU of compute capability {}.{}".format(*capability)
        raise UserError(
            f"model.converters = float8 needs a GPU of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]} or more, "
            f"this is {found}; leave it out, or set float8.emulate to try its rounding"
        )


def check_layout(options: Float8, degrees: Degrees) -> None:
    """Refuse to gather in float8 where that cannot be.

    Raises:
        UserError: nothing is gathered, or tensor parallelism takes the gathered weights apart.
    """
    if not options.enable_fsdp_float8_all_gather:
        return
    flag = "float8.enable_fsdp_float8_all_gather = true"
    if degrees.fsdp == 1:
        raise UserError(f"{flag}: the layout ({degrees.describe()}) shards nothing that is gathered; leave it out")
    if degrees.tensor > 1:
        raise UserError(
            f"{flag} and training.tensor_parallel_degree = {degrees.tensor} do not go together: ranks use parts of the "
            "gathered weights as plain tensors; leave one of them out"
        )


def _fitting_layers(block: nn.Module, degree: int) -> Iterator[tuple[int, bool]]:
    """Each linear layer of a block by its id, and whether it can be converted."""
    for parent in block.modules():
        for name, layer in parent.named_children():
            if type(layer) is nn.Linear:
                yield id(layer), _divides(layer, degree) and _is_called(parent, name)


def _divides(layer: nn.Linear, degree: int) -> bool:
    return not (layer.in_features % (WIDTH * degree) or layer.out_features % (WIDTH * degree))


def _is_called(parent: nn.Module, name: str) -> bool:
    """Whether a module calls its layer, rather than handing the layer's weight to a fused operator."""
    if not _takes_weight(parent, name):
        return True
    return _can_call(parent, name) and getattr(parent, "fuse_swiglu", None) is False


def _unfuse_mlps(block: nn.Module, degree: int) -> int:
    """Let MLPs call the layers that can be converted; FLA's do either, as their ``fuse_swiglu`` says.

    Returns:
        How many did not.
    """
    fused = [
        parent
        for parent in block.modules()
        if getattr(parent, "fuse_swiglu", False)
        and any(
            type(layer) is nn.Linear and _divides(layer, degree) and _can_call(parent, name)
            for name, layer in parent.named_children()
            if _takes_weight(parent, name)
        )
    ]
    for parent in fused:
        parent.fuse_swiglu = False
    return len(fused)


def _takes_weight(parent: nn.Module, name: str) -> bool:
    return f"self.{name}.weight" in _forward_source(parent)


def _can_call(parent: nn.Module, name: str) -> bool:
    return f"self.{name}(" in _forward_source(parent)


def _forward_source(module: nn.Module) -> str:
    """The code of a module's forward; without it, "": a module is taken to be like most, which call their layers."""
    try:
        return inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return ""


@contextlib.contextmanager
def without_float8(model: nn.Module) -> Iterator[None]:
    """Within, converted layers compute as they did before.

    One scale for a whole tensor lets each token's rounding depend on all others; proofs that a model looks at no later
    token would see that.
    """
    layers = [module for module in model.modules() if _is_converted(module)]
    for layer in layers:
        layer.forward = types.MethodType(nn.Linear.forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _is_converted(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module).__module__.startswith("torchao.")


def keep_scales(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Compute the scales of all weights at once after each step, instead of one by one as they are gathered."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    optimizer.register_step_post_hook(lambda *_: precompute_float8_dynamic_scale_for_fsdp(model))


def master_weight(parameter: Tensor) -> Tensor:
    """A parameter without the wrapper that has it gathered in float8: the same memory, as a plain float32 tensor."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if not hasattr(local, "fsdp_pre_all_gather"):
        return parameter
    names, _ = local.__tensor_flatten__()
    inner = getattr(local, names[0]).detach()
    if not isinstance(parameter, DTensor):
        return inner
    return DTensor.from_local(
        inner,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
