"""Activation checkpointing: activations that are computed again in the backward pass instead of being kept.

A block's ``forward`` is replaced, and no module wrapped: parameters keep their names, and the hooks that sharding hangs
on the block stay outside of what is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flame.config import ActivationCheckpoint
from flame.parallel.recompute_norms import find_norms
from flame.parallel.shared_inputs import can_share


def recompute_blocks(blocks: Iterable[tuple[str, nn.Module]], options: ActivationCheckpoint) -> int:
    """Make blocks recompute what the job says: ``full`` all of each, ``selective`` the cheap part, what norms give, or
    every n-th block.

    Returns:
        The number of blocks that recompute.
    """
    if options.mode == "none":
        return 0
    if recomputes_norms(options):  # which `share_input_gradients` has seen to
        return sum(has_norm_to_recompute(block) for _, block in blocks)
    every, context = 1, None
    if keeps_operators(options):
        context = _keep_expensive
    elif options.mode == "selective":
        every = int(options.selective_ac_option)
    chosen = [block for number, (_, block) in enumerate(blocks) if number % every == 0]
    for block in chosen:
        block.forward = _recomputing(block.forward, context)
    return len(chosen)


def recomputes_norms(options: ActivationCheckpoint) -> bool:
    """Whether what norms give is computed again, and nothing else."""
    return options.mode == "selective" and options.selective_ac_option == "norm"


def has_norm_to_recompute(block: nn.Module) -> bool:
    """Whether there is a norm, and a linear layer that may read its output and compute it again."""
    return can_share(block) and bool(find_norms(block)) and any(type(each) is nn.Linear for each in block.modules())


def keeps_operators(options: ActivationCheckpoint) -> bool:
    """Whether some operators of every block are kept and the others computed again."""
    return options.mode == "selective" and options.selective_ac_option == "op"


def _recomputing(forward: Callable, context: Callable | None) -> Callable:
    options: dict[str, Any] = {} if context is None else {"context_fn": context}
    return partial(checkpoint, forward, use_reentrant=False, **options)


def _keep_expensive() -> tuple:
    """Contexts that keep every other matrix product and all attention, whose recomputation would cost the most."""
    counts = {"forward": 0, "recompute": 0}

    def policy(context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if operator.name() in _ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if operator in _MATRIX_PRODUCTS:
            phase = "recompute" if context.is_recompute else "forward"
            counts[phase] += 1
            return CheckpointPolicy.MUST_SAVE if counts[phase] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


_aten = torch.ops.aten
_MATRIX_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default}
# By name: some are not there before the module that registers them is imported, or the package is installed.
_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_flash_attention_forward",
    "torch_attn::_varlen_attn",  # of torch.nn.attention.varlen
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
    "flame::flash_attention_4",
}
