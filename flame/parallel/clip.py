"""Gradient clipping over sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torchtitan.distributed.utils import clip_grad_norm_


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their joint 2-norm is at most ``max_norm``.

    Returns:
        The norm before clipping, a float32 scalar on the parameters' device, equal on every rank. The host does not
        wait for it.
    """
    return clip_grad_norm_(list(parameters), max_norm, foreach=True)
