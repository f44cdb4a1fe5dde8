"""Cross entropies: of logits, and of hidden states through the output projection without keeping all the logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flame.errors import UserError
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
        raise UserError("the reference backend does not have a vocabulary-parallel cross entropy")
    logits = scale_and_cap(logits.to(compute_dtype(logits)), logit_scale, logit_softcapping)
    loss = F.cross_entropy(logits, target, reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing)
    if lse_square_scale == 0.0:
        return loss, torch.zeros_like(loss)
    z_loss = (lse_square_scale * logits.logsumexp(-1).square()).masked_fill(target == ignore_index, 0.0)
    return loss + z_loss, z_loss.detach()


def cross_entropy_module_forward(module: Any, input: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """`FusedCrossEntropyLoss.forward`, which itself refuses tensors that are not on an accelerator."""
    losses = cross_entropy_loss(
        input,
        target,
        label_smoothing=module.label_smoothing,
        logit_scale=module.logit_scale,
        lse_square_scale=module.lse_square_scale,
        logit_softcapping=module.logit_softcapping,
        ignore_index=module.ignore_index,
        process_group=module.process_group,
    )
    if module.reduction != "none":
        losses = tuple(x.sum() for x in losses)
    if module.reduction == "mean":
        num_valid = (target != module.ignore_index).sum()
        losses = tuple(x / num_valid for x in losses)
    return losses if module.return_z_loss else losses[0]


def fused_linear_cross_entropy_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    num_chunks: int = 8,
    reduction: str = "mean",
    use_l2warp: bool = False,
    l2_penalty_factor: float = 1e-4,
    accumulate_grad_in_fp32: bool = True,
    process_group: object | None = None,
) -> Tensor:
    """Cross entropy of x weight^T + bias against target, a block of rows at a time.

    Args:
        x: [N, D]; target: [N]; weight: [V, D]; bias: [V].
        reduction: "mean" over targets that are not `ignore_index`, or "sum".
        use_l2warp: add l2_penalty_factor / N * max_logit to the gradient of each row's largest logit (the loss value
            stays as it is).

    Returns:
        A float32 scalar (float64 for float64 input).
    """
    if process_group is not None:
        raise UserError("the reference backend does not have a vocabulary-parallel cross entropy")
    if reduction not in ("mean", "sum"):
        raise UserError(f"a fused linear cross entropy's reduction is mean or sum, got {reduction!r}")
    penalty = l2_penalty_factor / max(len(x), 1) if use_l2warp else 0.0
    of_logits = partial(
        _loss_and_gradient,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        logit_scale=logit_scale,
        logit_softcapping=logit_softcapping,
        penalty=penalty,
    )
    num_valid = (target != ignore_index).sum().clamp_min(1) if reduction == "mean" else None
    return linear_cross_entropy(x, weight, bias, target, of_logits, num_valid)


LossAndGradient = Callable[[Tensor, Tensor, float | Tensor], tuple[Tensor, Tensor]]
"""(logits [rows, V], targets [rows], factor) -> sum of the losses, and factor times its gradient by the logits."""


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    of_logits: LossAndGradient,
    num_valid: Tensor | None = None,
) -> Tensor:
    """A loss of x weight^T + bias, given the loss of a block of logits; divided by ``num_valid`` where it is given."""
    return _LinearCrossEntropy.apply(x, weight, bias, target, num_valid, of_logits)


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes gradients along with the loss: only one block's logits [rows, V] exist at a time, none is recomputed."""

    BLOCK_ELEMENTS = 1 << 22  # logits a block: 16 MiB in float32 stay near a CPU's caches
    GPU_BLOCK_ELEMENTS = 1 << 26  # 256 MiB: each block reads and writes the whole weight gradient

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        num_valid: Tensor | None,
        of_logits: LossAndGradient,
    ) -> Tensor:
        dtype = compute_dtype(x)
        elements = _LinearCrossEntropy.GPU_BLOCK_ELEMENTS if x.is_cuda else _LinearCrossEntropy.BLOCK_ELEMENTS
        block = max(1, elements // weight.shape[0])
        loss_sum = torch.zeros((), dtype=dtype, device=x.device)
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight, dtype=dtype)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=dtype)
        factor = 1.0 if num_valid is None else 1.0 / num_valid.to(dtype)
        for start in range(0, len(x), block):
            rows = slice(start, start + block)
            logits = F.linear(x[rows], weight, bias)
            loss, grad = of_logits(logits.to(dtype), target[rows], factor)
            loss_sum += loss
            grad_x[rows] = grad.to(x.dtype) @ weight
            _add_product(grad_weight, grad, x[rows])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        ctx.save_for_backward(grad_x, grad_weight.to(weight.dtype), None if bias is None else grad_bias.to(bias.dtype))
        return loss_sum * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        grads = (None if saved is None else saved * grad.to(saved.dtype) for saved in ctx.saved_tensors)
        return *grads, None, None, None


def _add_product(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """total [V, D] += grad^T x, accumulated in total's dtype."""
    if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16):
        # Half-precision operands with a float32 result run on the tensor cores; float32 operands would not.
        total += torch.mm(grad.to(x.dtype).t(), x, out_dtype=total.dtype)
    else:
        total.addmm_(grad.t(), x.to(total.dtype))


def _loss_and_gradient(
    logits: Tensor,
    target: Tensor,
    factor: float | Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    logit_scale: float,
    logit_softcapping: float | None,
    penalty: float,
) -> tuple[Tensor, Tensor]:
    """Sum of the rows' losses, and its gradient times `factor` by the logits (plus the l2warp penalty's)."""
    largest = logits.max(-1, keepdim=True) if penalty else None
    shaped = scale_and_cap(logits, logit_scale, logit_softcapping)
    log_probs = shaped.log_softmax(-1)
    valid = target != ignore_index
    picked = target.masked_fill(~valid, 0)[:, None]
    losses = -(1 - label_smoothing) * log_probs.gather(1, picked)[:, 0]
    if label_smoothing:
        losses = losses - label_smoothing * log_probs.mean(-1)
    grad = log_probs.exp_()
    grad -= label_smoothing / logits.shape[1]
    grad.scatter_add_(1, picked, torch.full_like(picked, -(1 - label_smoothing), dtype=grad.dtype))
    grad *= (valid.to(grad.dtype) * (factor * logit_scale))[:, None]
    if logit_softcapping is not None:
        grad *= 1 - (shaped / logit_softcapping).square()
    if largest is not None:
        grad.scatter_add_(1, largest.indices, largest.values * penalty)
    return losses.masked_fill(~valid, 0.0).sum(), grad


def scale_and_cap(logits: Tensor, logit_scale: float, logit_softcapping: float | None) -> Tensor:
    """c tanh(s logits / c) for a factor s and a cap c, s logits without a cap."""
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if logit_softcapping is not None:
        logits = logit_softcapping * (logits / logit_softcapping).tanh()
    return logits
