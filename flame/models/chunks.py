"""The chunks that flame's own operators for Hopper GPUs work on, and whether this is such a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from flame.models.backend import find_operator
from flame.models.chunk_bounds import longest_first

BT = 64  # tokens of a chunk


def is_on_hopper(x: Tensor) -> bool:
    """Tensors without memory stand for those of this machine's GPU, or of a Hopper GPU where there is none."""
    if x.is_meta and not torch.cuda.is_available():
        return True
    return (x.is_meta or x.is_cuda) and torch.cuda.get_device_capability(None if x.is_meta else x.device)[0] == 9


def count_documents(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """Documents in x [B, T, ...]."""
    return len(x) if cu_seqlens is None else len(cu_seqlens) - 1


@dataclass(frozen=True)
class Chunks:
    """The chunks of a batch's documents; the tensors are None where each row is a document.

    Attributes:
        num_documents, num_chunks: of the batch.
        cu_seqlens, indices, offsets: bounds, chunks and first chunks of packed documents.
        order: the documents, longest first, so that none is begun last that takes longest.
    """

    num_documents: int
    num_chunks: int
    cu_seqlens: Tensor | None = None
    indices: Tensor | None = None
    offsets: Tensor | None = None
    order: Tensor | None = None

    @classmethod
    def of(cls, q: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None = None) -> Chunks:
        """Those of q [B, T, H, K]."""
        num_documents = count_documents(q, cu_seqlens)
        if cu_seqlens is None:
            return cls(num_documents, num_documents * triton.cdiv(q.shape[1], BT))
        indices = find_operator("fla.ops.utils.index", "prepare_chunk_indices")(cu_seqlens, BT, cu_seqlens_cpu)
        offsets = find_operator("fla.ops.utils.index", "prepare_chunk_offsets")(cu_seqlens, BT)
        return cls(num_documents, len(indices), cu_seqlens, indices, offsets, longest_first(cu_seqlens))
