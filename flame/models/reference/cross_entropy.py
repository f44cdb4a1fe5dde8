"""Cross entropies: of logits, and of hidden states through the output projection, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flame.errors import UserError
from flame.models.linear_cross_entropy import fused_by_blocks
from flame.models.reference.packing import compute_dtype


def cross_entropy_loss(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: object | None = None,
) -> tuple[Tensor, Tensor]:
    """Losses [N] (float32) of logits [N, V] and targets [N], 0 where the target is `ignore_index`, and their z-losses.

    The z-loss lse_square_scale * logsumexp^2 (PaLM, arXiv:2204.02311) is part of the loss; the second value is for
    logging and carries no gradient. `logit_softcapping` is c in c tanh(logits / c), after `logit_scale`.
    """
    if process_group is not None:
        _refuse_shared_vocabulary()
    logits = scale_and_cap(logits.to(compute_dtype(logits)), logit_scale, logit_softcapping)
    loss = F.cross_entropy(logits, target, reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing)
    if lse_square_scale == 0.0:
        return loss, torch.zeros_like(loss)
    z_loss = (lse_square_scale * logits.logsumexp(-1).square()).masked_fill(target == ignore_index, 0.0)
    return loss + z_loss, z_loss.detach()


def cross_entropy_module_forward(
    module: Any, input: Tensor, target: Tensor, operator: Callable = cross_entropy_loss
) -> Tensor | tuple[Tensor, Tensor]:
    """`FusedCrossEntropyLoss.forward`, which itself refuses tensors that are not on an accelerator."""
    losses = operator(
        input,
        target,
        label_smoothing=module.label_smoothing,
        logit_scale=module.logit_scale,
        lse_square_scale=module.lse_square_scale,
        logit_softcapping=module.logit_softcapping,
        ignore_index=module.ignore_index,
        inplace_backward=module.inplace_backward,
        process_group=module.process_group,
    )
    if module.reduction != "none":
        losses = tuple(x.sum() for x in losses)
    if module.reduction == "mean":
        num_valid = (target != module.ignore_index).sum()
        losses = tuple(x / num_valid for x in losses)
    return losses if module.return_z_loss else losses[0]


def _loss_and_gradient(
    logits: Tensor,
    target: Tensor,
    factor: float | Tensor | None,
    *,
    ignore_index: int,
    label_smoothing: float,
    logit_scale: float,
    logit_softcapping: float | None,
) -> tuple[Tensor, Tensor | None]:
    """A `LossAndGradient`."""
    logits = logits.to(compute_dtype(logits))
    shaped = scale_and_cap(logits, logit_scale, logit_softcapping)
    log_probs = shaped.log_softmax(-1)
    valid = target != ignore_index
    picked = target.masked_fill(~valid, 0)[:, None]
    losses = -(1 - label_smoothing) * log_probs.gather(1, picked)[:, 0]
    if label_smoothing:
        losses = losses - label_smoothing * log_probs.mean(-1)
    loss = losses.masked_fill(~valid, 0.0).sum()
    if factor is None:
        return loss, None
    grad = log_probs.exp_()
    grad -= label_smoothing / logits.shape[1]
    grad.scatter_add_(1, picked, torch.full_like(picked, -(1 - label_smoothing), dtype=grad.dtype))
    grad *= (valid.to(grad.dtype) * (factor * logit_scale))[:, None]
    if logit_softcapping is not None:
        grad *= 1 - (shaped / logit_softcapping).square()
    return loss, grad


def _refuse_shared_vocabulary(*_args: Any, **_options: Any) -> Tensor:
    raise UserError("the reference backend does not have a vocabulary-parallel cross entropy")


fused_linear_cross_entropy_loss = fused_by_blocks(_loss_and_gradient, _refuse_shared_vocabulary)


def scale_and_cap(logits: Tensor, logit_scale: float, logit_softcapping: float | None) -> Tensor:
    """c tanh(s logits / c) for a factor s and a cap c, s logits without a cap."""
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if logit_softcapping is not None:
        logits = logit_softcapping * (logits / logit_softcapping).tanh()
    return logits
