"""Linear layers that read the same activations add up their gradients while they multiply.

The queries, keys, values and gates of a block, and the two halves of its MLP, are products of one input. Autograd adds
their gradients one by one, each sum a pass over memory that computes nothing else: some 3 % of a step of a 340M model
on an H200. Here each layer hands its input on to the next, whose gradient it gets and adds its own product to (``beta``
of the matrix product), with one rounding less. What the layers compute stays as it is, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flame.parallel.recompute_norms import NormOutput, NormOutputs


def share_input_gradients(blocks: Iterable[tuple[str, nn.Module]], *, forget_norms: bool = False) -> None:
    """Replace ``forward`` of blocks and of the linear layers in them.

    Call before activation checkpointing, which runs a block's forward a second time. Layers of other classes
    (quantized ones) and those that ranks share (tensor parallelism) go on as before.

    Args:
        blocks: (name, module); no block inside another.
        forget_norms: layers that read what a norm gives do not keep it, but compute it again.
    """
    for _, block in blocks:
        inputs = _Inputs(NormOutputs(block) if forget_norms else None)
        for linear in [module for module in block.modules() if type(module) is nn.Linear]:
            linear.forward = partial(inputs.multiply, linear)
        block.forward = partial(inputs.run, block.forward)


class _Inputs:
    """The inputs of a block's linear layers, while the block runs.

    Args:
        norms: which of them can be computed again; None when all are kept.
    """

    def __init__(self, norms: NormOutputs | None):
        self._norms = norms
        self._readings: dict[int, _Reading] | None = None  # by the id of the tensor, which a reading keeps alive

    def run(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """The block's forward."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        self._readings = {}
        try:
            return forward(*args, **kwargs)
        finally:
            self._readings = None
            if self._norms is not None:
                self._norms.forget()

    def multiply(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """A linear layer's forward."""
        weight, bias = linear.weight, linear.bias
        is_plain = not (isinstance(x, DTensor) or isinstance(weight, DTensor))
        if not (is_plain and self._readings is not None and torch.is_grad_enabled() and x.requires_grad):
            return F.linear(x, weight, bias)
        reading = self._readings.get(id(x))
        if reading is None or reading.version != x._version:  # written to since
            output = self._norms.find(x) if self._norms is not None else None
            reading = self._readings[id(x)] = _Reading(x, output)
        y, reading.next = _Linear.apply(reading.next, weight, bias, reading.output)
        return y


class _Reading:
    """A tensor that layers read.

    Attributes:
        x: the tensor.
        version: of its content.
        output: how to compute it again, if it is to be.
        next: what the next layer reads, equal to x; its gradient is that of all layers from there on.
    """

    def __init__(self, x: Tensor, output: NormOutput | None):
        self.x, self.version, self.output, self.next = x, x._version, output, x


class _Linear(torch.autograd.Function):
    """(x [..., D], weight [O, D], bias [O] or None) -> x weight^T + bias [..., O], and x once more.

    The second output is for the next layer that reads x, and for nothing else: its gradient is written to.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, _output: NormOutput | None) -> tuple[Tensor, Tensor]:
        return F.linear(x, weight, bias), x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        x, weight, _, x_again = inputs
        of_x, of_weight, *_ = ctx.needs_input_grad
        ctx.x_again = x_again.promise() if x_again is not None and of_weight else None
        ctx.save_for_backward(x if of_weight and ctx.x_again is None else None, weight if of_x else None)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_next: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return of_next, None, None, None
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2) if grad.dim() > 1 else grad[None]  # [N, O]
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = _add_product(of_next, rows, weight, grad.shape[:-1])
        if ctx.needs_input_grad[1]:
            x = x if ctx.x_again is None else ctx.x_again()
            of_weight = rows.mT @ (x.flatten(0, -2) if x.dim() > 1 else x[None])
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_x, of_weight, of_bias, None


def _add_product(others: Tensor | None, rows: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
    """rows [N, O] weight [O, D], in the shape [*shape, D], added to ``others`` in place where nobody needs those."""
    if others is None:
        return (rows @ weight).view(*shape, -1)
    if torch.is_grad_enabled() or not others.is_contiguous():  # a gradient of gradients needs them
        return others + (rows @ weight).view_as(others)
    others.view(len(rows), -1).addmm_(rows, weight)
    return others
