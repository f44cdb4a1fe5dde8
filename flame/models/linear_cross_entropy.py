"""The loss of hidden states through the output projection, a block of rows at a time: the logits are never all there.

A block's gradients are computed right after its loss, so that nothing is computed twice. FLA has the same under the
name of `fused_linear_cross_entropy_loss`, but multiplies float32 matrices for the weight's gradient, which the tensor
cores of a GPU do not do: a sixth of a step of a small model. `make_fused_loss` is that function with FLA's kernels for
the logits and half-precision products with a float32 sum.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flame.errors import UserError

LossAndGradient = Callable[[Tensor, Tensor, float | Tensor | None], tuple[Tensor, Tensor | None]]
"""(logits [rows, V], targets [rows], factor) -> sum of the losses, and factor times its gradient by the logits.

The logits may be overwritten. A factor of None asks for no gradient.
"""


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    of_logits: LossAndGradient,
    num_valid: Tensor | None = None,
    penalty: float = 0.0,
    is_in_place: bool = False,
) -> Tensor:
    """A loss of x weight^T + bias, given the loss of a block of logits; divided by `num_valid` where it is given.

    Args:
        x: [N, D]; weight: [V, D]; bias: [V]; target: [N].
        penalty: times a row's largest logit is added to the gradient of that logit (l2warp); the loss stays.
        is_in_place: `of_logits` needs no memory besides the logits.

    Returns:
        A float32 scalar (float64 for float64 input).
    """
    has_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    elements = CPU_BLOCK if x.is_cpu else GPU_BLOCK_IN_PLACE if is_in_place else GPU_BLOCK
    num_rows = max(1, elements // weight.shape[0])
    return _LinearCrossEntropy.apply(x, weight, bias, target, num_valid, of_logits, penalty, num_rows, has_gradient)


# Logits a block. On a CPU 16 MiB of float32 stay near the caches. On a GPU each block reads and writes the whole weight
# gradient: few blocks, of 256 MiB, in float32 where they are copied, in half precision where they are not.
CPU_BLOCK, GPU_BLOCK, GPU_BLOCK_IN_PLACE = 1 << 22, 1 << 26, 1 << 27


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        num_valid: Tensor | None,
        of_logits: LossAndGradient,
        penalty: float,
        num_rows: int,
        has_gradient: bool,
    ) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        share = 1.0 if num_valid is None else 1.0 / num_valid.to(dtype)
        loss_sum = torch.zeros((), dtype=dtype, device=x.device)
        gradients = _Gradients(x, weight, bias, dtype) if has_gradient else None
        for start in range(0, len(x), num_rows):
            rows = slice(start, start + num_rows)
            logits = F.linear(x[rows], weight, bias)
            largest = logits.max(-1) if has_gradient and penalty else None
            loss, grad = of_logits(logits, target[rows], share if has_gradient else None)
            loss_sum += loss
            if gradients is not None:
                gradients.add(rows, grad)
                if largest is not None:
                    gradients.add_at(rows, largest.indices, penalty * largest.values.to(dtype))
            del logits, grad  # before the next block's are there
        if gradients is not None:
            ctx.save_for_backward(*gradients.finished())
        return loss_sum * share

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if saved is None else saved * grad.to(saved.dtype) for saved in ctx.saved_tensors)
        return *grads, *(None,) * 6


class _Gradients:
    """Those of input, weight and bias, as blocks of rows come in."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype):
        self._x, self._weight, self._bias = x, weight, bias
        self._of_x = torch.empty_like(x)
        self._of_weight = torch.zeros_like(weight, dtype=dtype)
        self._of_bias = None if bias is None else torch.zeros_like(bias, dtype=dtype)

    def add(self, rows: slice, grad: Tensor) -> None:
        """grad: [rows, V], by the logits."""
        x = self._x[rows]
        narrow = grad.to(x.dtype)
        torch.mm(narrow, self._weight, out=self._of_x[rows])
        if not x.is_cpu and x.dtype in (torch.float16, torch.bfloat16):
            # Half-precision operands with a float32 result run on the tensor cores; float32 operands would not.
            of_weight = self._of_weight
            torch.addmm(of_weight, narrow.t(), x, out_dtype=of_weight.dtype, out=of_weight)
        else:
            self._of_weight.addmm_(grad.t().to(self._of_weight.dtype), x.to(self._of_weight.dtype))
        if self._of_bias is not None:
            self._of_bias += grad.sum(0, dtype=self._of_bias.dtype)

    def add_at(self, rows: slice, places: Tensor, values: Tensor) -> None:
        """values: [rows], by one logit of each row, those at places [rows]. Half precision of all would lose them."""
        self._of_x[rows] += (values[:, None] * self._weight[places]).to(self._of_x.dtype)
        self._of_weight.index_add_(0, places, values[:, None] * self._x[rows])
        if self._of_bias is not None:
            self._of_bias.index_add_(0, places, values)

    def finished(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """In the dtypes of what they are gradients of."""
        of_bias = None if self._bias is None else self._of_bias.to(self._bias.dtype)
        return self._of_x, self._of_weight.to(self._weight.dtype), of_bias


def make_fused_loss(original: Callable) -> Callable:
    """FLA's `fused_linear_cross_entropy_loss` in blocks that need no float32 product; `original` is FLA's own, which
    goes on computing what ranks share."""
    return fused_by_blocks(_by_kernels, original, is_in_place=True)


def fused_by_blocks(of_logits: Callable, of_shared_vocabulary: Callable, is_in_place: bool = False) -> Callable:
    """A function in the place of FLA's `fused_linear_cross_entropy_loss`.

    Args:
        of_logits: a `LossAndGradient` that takes the options of a cross entropy besides, by name: ignore_index,
            label_smoothing, logit_scale, logit_softcapping.
        of_shared_vocabulary: called with all arguments when there is a process group.
        is_in_place: see `linear_cross_entropy`.
    """

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
        process_group: Any = None,
    ) -> Tensor:
        """Cross entropy of x weight^T + bias against target, a block of rows at a time.

        Args:
            x: [N, D]; target: [N]; weight: [V, D]; bias: [V].
            reduction: "mean" over targets that are not `ignore_index`, or "sum".
            use_l2warp: add l2_penalty_factor / N * max_logit to the gradient of each row's largest logit (the loss
                value stays as it is).

        Returns:
            A float32 scalar (float64 for float64 input).
        """
        options = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "logit_scale": logit_scale,
            "logit_softcapping": logit_softcapping,
        }
        if process_group is not None:
            return of_shared_vocabulary(
                x,
                target,
                weight,
                bias,
                **options,
                num_chunks=num_chunks,
                reduction=reduction,
                use_l2warp=use_l2warp,
                l2_penalty_factor=l2_penalty_factor,
                accumulate_grad_in_fp32=accumulate_grad_in_fp32,
                process_group=process_group,
            )
        if reduction not in ("mean", "sum"):
            raise UserError(f"a fused linear cross entropy's reduction is mean or sum, got {reduction!r}")
        penalty = l2_penalty_factor / max(len(x), 1) if use_l2warp else 0.0
        num_valid = (target != ignore_index).sum().clamp_min(1) if reduction == "mean" else None
        return linear_cross_entropy(
            x, weight, bias, target, partial(of_logits, **options), num_valid, penalty, is_in_place
        )

    return fused_linear_cross_entropy_loss


def _by_kernels(
    logits: Tensor, target: Tensor, factor: float | Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """A `LossAndGradient` by FLA's kernels, the gradient in the place of the logits."""
    kernels = importlib.import_module("fla.modules.fused_cross_entropy.ops")
    losses, _, logsumexp, *_ = kernels.cross_entropy_fwd(logits, target, **options)
    loss = losses.sum()
    if factor is None:
        return loss, None
    if not isinstance(factor, Tensor):
        factor = torch.full((), factor, dtype=torch.float32, device=logits.device)  # no copy from the host
    share = factor.expand(len(target))
    return loss, kernels.cross_entropy_bwd(logits, target, logsumexp, share, **options, inplace_backward=True)
