"""Which code computes stick-breaking attention: the Triton kernel on a GPU, plain PyTorch elsewhere.

The plain form, the word on ``--model.backend reference`` and the bounds that the host knows are flame's; nothing else
here depends on flame.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flame.host_copy import host_copy
from flame.models.backend import runs_reference
from flame.models.reference.stickbreaking import stickbreaking_attention as reference_attention


@dataclass(frozen=True)
class Documents:
    """Documents of a packed row.

    Attributes:
        cu_seqlens: their bounds, int32 [N + 1].
        longest: tokens of the longest.
    """

    cu_seqlens: Tensor
    longest: int

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> Documents:
        """Made once a forward pass, for all layers: bounds that only the GPU knows are waited for."""
        known = host_copy(cu_seqlens)
        bounds = cu_seqlens if known is None else known.values
        return cls(cu_seqlens, int(bounds.diff().max()))


@torch.compiler.disable  # training.compile leaves kernels alone
def stick_breaking_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Causal stick-breaking attention without the query's own key (Tan et al. 2024, section 2).

    Args:
        q: [B, T, H, D].
        k: [B, S, H, D] with S ≥ T; the queries are the last T of the S positions.
        v: [B, S, H, D].
        documents: of one packed row (B = 1, S = T), which do not see each other.
        mask: [B, S], False for keys that no query may see.

    Returns:
        o [B, T, H, D], and what is left of each query's stick, [B, T, H].
    """
    if mask is not None:
        return _masked_attention(q, k, v, mask)
    if not q.is_cpu and q.shape[1] == k.shape[1] and not runs_reference():
        # Imported late: Triton is there on Linux only, and machines without a GPU have no use for it.
        from custom_models.sba.kernels import stick_breaking_kernel

        cu_seqlens, longest = (None, None) if documents is None else (documents.cu_seqlens, documents.longest)
        return stick_breaking_kernel(q, k, v, cu_seqlens, longest)
    return reference_attention(q, k, v, None if documents is None else documents.cu_seqlens)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The same with padding, for generation from prompts of several lengths; all T × S weights are in memory."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    logits = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * q.shape[-1] ** -0.5
    query = torch.arange(num_keys - num_queries, num_keys, device=q.device)[:, None]
    seen = (torch.arange(num_keys, device=q.device) < query) & mask[:, None, None, :]
    log_left = F.logsigmoid(-logits).masked_fill(~seen, 0).flip(-1).cumsum(-1).flip(-1)
    log_found = F.pad(log_left[..., 1:], (0, 1))
    weights = (F.logsigmoid(logits) + log_found).masked_fill(~seen, -torch.inf).exp()
    o = torch.einsum("bhij,bjhd->bihd", weights, v.float())
    return o.to(q.dtype), log_left[..., 0].exp().transpose(1, 2).to(q.dtype)
