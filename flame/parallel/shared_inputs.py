"""Linear layers that share an input add up its gradient inside their matrix products.

A block's query, key, value and gate projections read one input; so do the two up projections of its MLP. Autograd
computes an input gradient for each layer and adds them with kernels of their own, which only move memory. Here the
layers form a chain: each returns its output, and its input once more for the next layer to read. In the backward pass a
layer so receives the input gradient of the layers after it, and its matrix product adds to that (``addmm`` with beta
= 1). Outputs are the same bit for bit, those of narrow layers (`missing_rows`) up to the order of their sums; input
gradients are rounded once less for each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, update_wrapper
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flame.parallel.recompute_norms import NormOutput, NormOutputs

ALIGNMENT = 16  # bytes
WIDE = 64  # outputs
# FLA's layers that compute two gates, the writing strength of each head and then its decay, always from one input.
GATES = dict.fromkeys(("GatedDeltaNet", "GatedDeltaProduct", "Comba"), ("b_proj", "a_proj"))


def can_share(block: nn.Module) -> bool:
    """Whether a block is FLA's or transformers': users' own may checkpoint, compile or replace parts of themselves."""
    return type(block).__module__.partition(".")[0] in ("fla", "transformers")


def share_input_gradients(blocks: Iterable[tuple[str, nn.Module]], *, recompute_norms: bool = False) -> None:
    """Replace ``forward`` of blocks and of the linear layers in them.

    Call before activation checkpointing, which runs a block's forward a second time. Layers of other classes (such as
    float8's) and those with distributed weights (tensor parallelism) go on as before.

    Args:
        blocks: (name, module), of those that ``can_share``; no block inside another.
        recompute_norms: layers that read a norm's output do not keep it, but compute it again in the backward pass;
            blocks must not checkpoint parts of themselves then.
    """
    for _, block in blocks:
        inputs = _BlockInputs(NormOutputs(block) if recompute_norms else None, find_gates(block))
        for linear in find_linears(block):
            linear.forward = partial(inputs.linear_forward, linear)
        block.forward = update_wrapper(partial(inputs.block_forward, block.forward), block.forward)


def find_linears(block: nn.Module) -> list[nn.Module]:
    """The layers of a block that can share: torch's own, which nobody has given another forward."""
    return [module for module in block.modules() if type(module) is nn.Linear and "forward" not in vars(module)]


def find_gates(block: nn.Module) -> dict[nn.Linear, nn.Linear]:
    """The first gate to the second of each module that has two (`GATES`): a few outputs each, no bias."""
    linears, pairs = set(find_linears(block)), {}
    for module in block.modules():
        gates = [getattr(module, name, None) for name in GATES.get(type(module).__name__, ())]
        if not gates or not linears.issuperset(gates):
            continue
        if all(len(gate.weight) < WIDE and gate.bias is None for gate in gates):
            pairs[gates[0]] = gates[1]
    return pairs


class _BlockInputs:
    """The inputs of a block's linear layers, while the block runs.

    Args:
        norms: the norms whose outputs are computed again; None when all outputs are kept.
        gates: layers to those that the same product computes, see ``find_gates``.
    """

    def __init__(self, norms: NormOutputs | None, gates: dict[nn.Linear, nn.Linear]):
        self._norms, self._gates = norms, gates
        self._ready: dict[nn.Linear, tuple[Tensor, int, Tensor]] = {}  # input, its version and output of a second gate
        self._inputs: dict[int, _SharedInput] | None = None  # by the tensor's id; None while the block does not run

    def block_forward(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """The block's forward."""
        if self._inputs is not None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        self._inputs = {}
        if self._norms is not None:
            self._norms.begin()
        try:
            return forward(*args, **kwargs)
        finally:
            self._inputs = None
            self._ready.clear()
            if self._norms is not None:
                self._norms.end()

    def linear_forward(self, linear: nn.Linear, input: Tensor) -> Tensor:
        """A linear layer's forward: [..., D] -> [..., O]. The argument has its name in ``nn.Linear``."""
        x, weight, bias = input, linear.weight, linear.bias
        if not (torch.is_grad_enabled() and x.requires_grad) or _needs_torch(x, weight):
            return F.linear(x, weight, bias)
        ready_for, version, y = self._ready.pop(linear, (None, None, None))
        if ready_for is x and version == x._version:
            return y
        second = self._gates.get(linear) if is_half(weight) else None
        weights = [weight] if second is None else [weight, second.weight]
        y, *others = self._multiply(x, weights, bias)
        if second is not None:
            self._ready[second] = x, x._version, others[0]
        return y

    def _multiply(self, x: Tensor, weights: list[Tensor], bias: Tensor | None) -> list[Tensor]:
        """Outputs [..., O] of layers that read x, by one product; only a single one may have a bias."""
        shared, widths = self._find(x), [len(weight) for weight in weights]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        num_missing = missing_rows(weight)
        if num_missing:
            weight = F.pad(weight, (0, 0, 0, num_missing))
            bias = None if bias is None else F.pad(bias, (0, num_missing))
        y, shared.next = _Linear.apply(shared.next, weight, bias, shared.norm_output, shared.is_read)
        shared.is_read = True
        parts = [y] if widths == [len(weight)] else y.split([*widths, num_missing], dim=1)
        return [part.contiguous().view(*x.shape[:-1], width) for part, width in zip(parts, widths, strict=False)]

    def _find(self, x: Tensor) -> _SharedInput:
        if self._inputs is None:  # outside of the block's forward, such as in a checkpoint's second run of a part
            return _SharedInput(x, None)
        shared = self._inputs.get(id(x))
        if shared is None or shared.version != x._version:  # new, or written to since
            norm_output = self._norms.find(x) if self._norms is not None else None
            shared = self._inputs[id(x)] = _SharedInput(x, norm_output)
        return shared


def missing_rows(weight: Tensor) -> int:
    """Rows of zeros that make a narrow half-precision layer's outputs begin at multiples of 16 bytes.

    cuBLAS has slow kernels only for others: for 6 outputs of 2,048 channels on an H200, one for each head as gates have
    them, 0.34 ms instead of the 0.06 that reading the input takes. A wide layer's outputs would cost more to copy.
    """
    if not is_half(weight) or len(weight) >= WIDE:
        return 0
    return -len(weight) % (ALIGNMENT // weight.itemsize)


def is_half(weight: Tensor) -> bool:
    """Whether products are in half precision."""
    return weight.dtype in (torch.float16, torch.bfloat16)


def _needs_torch(x: Tensor, weight: Tensor) -> bool:
    """Whether only torch's own linear knows what to do: with tensors of several ranks, and under autocast."""
    device = x.device.type
    is_cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return is_cast or isinstance(x, DTensor) or isinstance(weight, DTensor)


class _SharedInput:
    """A tensor that linear layers read.

    Attributes:
        x: the tensor; kept, so that no other gets its id.
        version: of its content.
        norm_output: how to compute it again, if it is not to be kept.
        next: what the next layer reads: x as rows [N, D]; its gradient is that of all layers from there on.
        is_read: whether a layer has read it.
    """

    def __init__(self, x: Tensor, norm_output: NormOutput | None):
        self.x, self.version, self.norm_output = x, x._version, norm_output
        self.next, self.is_read = x.reshape(-1, x.shape[-1]), False


class _Linear(torch.autograd.Function):
    """(x [N, D], weight [O, D], bias [O] or None) -> x weight^T + bias [N, O], and x once more.

    The second output is read by the next layer only. Its gradient has no other owner, so the backward may write to it;
    that excludes pipeline schedules with a split backward, which keep gradients to go on from.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, norm_output: NormOutput | None, is_read: bool
    ) -> tuple[Tensor, Tensor]:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.norm_output, ctx.is_first = norm_output, not is_read
        kept = [x] if norm_output is None else norm_output.inputs
        ctx.save_for_backward(weight if needs_x else None, *(kept if needs_weight else ()))
        ctx.set_materialize_grads(False)
        return F.linear(x, weight, bias), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, grad_next: Tensor | None) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x, grad_weight, grad_bias = grad_next, None, None
        if grad_y is not None:
            if needs_x:
                grad_x = _add_product(grad_next, grad_y, weight)
            if needs_weight:
                x = kept[0] if ctx.norm_output is None else ctx.norm_output.again(kept)
                grad_weight = grad_y.mT @ x.reshape(-1, x.shape[-1])
            if needs_bias:
                grad_bias = grad_y.sum(0)
        if ctx.is_first and ctx.norm_output is not None:  # the last of the chain's backward
            ctx.norm_output.forget()
        return grad_x, grad_weight, grad_bias, None, None


def _add_product(grad_next: Tensor | None, grad_y: Tensor, weight: Tensor) -> Tensor:
    """grad_y [N, O] weight [O, D], added to ``grad_next`` [N, D]: in place, unless gradients of gradients need that."""
    if grad_next is None:
        return grad_y @ weight
    if torch.is_grad_enabled():
        return torch.addmm(grad_next, grad_y, weight)
    return grad_next.addmm_(grad_y, weight)
