"""FLA's operators that see all heads at once, for modules whose heads several ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flame.models.backend import find_operator, wrap_operator
from flame.parallel.tensor import running_share

_NORM = ("fla.modules.norm.layernorm", "rms_norm_linear")
# What the layer calls with and without gradients; in a shared module all are computed in chunks.
_RETENTION = tuple(
    ("fla.ops.retention", name) for name in ("chunk_retention", "fused_chunk_retention", "fused_recurrent_retention")
)


def install_tensor_parallel() -> None:
    """Wrap the operators, as ``setup_backend`` left them. Outside shared modules they are what they were."""
    wraps = {_NORM: _norm_over_all_heads} | dict.fromkeys(_RETENTION, _retention_of_own_heads)
    for (module_name, name), wrap in wraps.items():
        if not getattr(find_operator(module_name, name), "knows_of_shares", False):
            wrap_operator(module_name, name, _marked(wrap))


def correct_norm(norm: nn.Module) -> None:
    """Let an RMS norm that is called, gated as in Mamba-2 or not, use the mean square of all ranks' channels."""

    def correct(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x, *gate = args
        if gate and not module.norm_before_gate:
            x = x.float() * F.silu(gate[0].float())
        return _times(output, running_share().norm_correction(x, module.eps))

    norm.register_forward_hook(correct)


def _marked(wrap: Callable[[Callable], Callable]) -> Callable[[Callable], Callable]:
    def marked(original: Callable) -> Callable:
        wrapped = wrap(original)
        wrapped.knows_of_shares = True
        return wrapped

    return marked


def _norm_over_all_heads(original: Callable) -> Callable:
    def rms_norm_linear(x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, *args: Any, **options: Any) -> Tensor:
        output = original(x, norm_weight, norm_bias, *args, **options)
        share = running_share()
        if share is None or not share.split.norms:
            return output
        assert norm_bias is None and len(args) <= 2, "FLA's mixers norm without biases and residuals"
        return _times(output, share.norm_correction(x, options.get("eps", 1e-5)))

    return rms_norm_linear


def _retention_of_own_heads(original: Callable) -> Callable:
    """A head's decay follows from its number among all (arXiv:2307.08621, section 2.2)."""
    linear_attention = find_operator("fla.ops.simple_gla", "chunk_simple_gla")

    def retention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        share = running_share()
        if share is None:
            return original(q, k, v, **options)
        num_heads = q.shape[2]
        heads = torch.arange(num_heads, device=q.device, dtype=torch.float64) + share.rank * num_heads
        decay = torch.log1p(-torch.exp2(-5 - heads)).float()  # [H]
        return linear_attention(q, k, v, g_gamma=decay, **options)

    return retention


def _times(output: Tensor, correction: Tensor) -> Tensor:
    return (output * correction).to(output.dtype)
