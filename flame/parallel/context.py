"""Context parallelism: each rank of a group holds a contiguous piece of every packed row.

A document may lie over several pieces. What a token needs of the tokens before it in other pieces (keys and values, the
state of a recurrence, the last inputs of a convolution, its position) is exchanged inside the operators that need it
(``flame.parallel.context_operators``); everything else works on tokens one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from flame.data.batch import Batch
from flame.errors import UserError


@dataclass(frozen=True)
class Piece:
    """One rank's piece of a packed row.

    Attributes:
        rank: whose it is.
        length: tokens of each piece.
        cu_seqlens: document bounds within the piece, int32 [n + 1], on the CPU.
        before: tokens of its first document that lie in earlier pieces.
        carries: for each rank, whether the document at the end of its piece began before the piece.
    """

    rank: int
    length: int
    cu_seqlens: torch.Tensor
    before: int
    carries: list[bool]

    @property
    def start(self) -> int:
        """Where the piece starts in the row."""
        return self.rank * self.length

    @property
    def last_document(self) -> int:
        """Where the piece's last document starts in it."""
        return int(self.cu_seqlens[-2])


def cut_row(cu_seqlens: torch.Tensor, rank: int, size: int) -> Piece:
    """The piece of a row with document bounds ``cu_seqlens`` (int, on the CPU) that a rank of ``size`` holds."""
    bounds = cu_seqlens.long()
    length = int(bounds[-1]) // size
    starts = torch.arange(size) * length
    # The last document of piece r is that of its last token.
    first_of_last = bounds[torch.searchsorted(bounds, starts + length - 1, right=True) - 1]
    start = rank * length
    inside = bounds[(bounds > start) & (bounds < start + length)] - start
    own = torch.cat([torch.tensor([0]), inside, torch.tensor([length])]).int()
    before = start - int(bounds[bounds <= start][-1])
    return Piece(rank, length, own, before, (first_of_last < starts).tolist())


class ContextParallel:
    """The ranks that share each row, and the piece of the row in hand.

    Args:
        group: the ranks, in the order of their pieces.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.piece: Piece | None = None
        self.row_bounds: torch.Tensor | None = None  # document bounds of the whole row, int32, on the device

    def count_targets(self, batch: Batch) -> int:
        """Targets in this rank's piece of a batch (on the CPU)."""
        return self._cut(batch).num_valid

    def enter(self, batch: Batch, device: torch.device) -> Batch:
        """This rank's piece of a batch on the device; the operators exchange what the piece lacks until the next."""
        bounds = _row_bounds(batch) if batch.cu_seqlens is None else batch.cu_seqlens
        self.row_bounds = bounds.to(device, torch.int32, non_blocking=True)  # once, not in every layer
        self.piece = cut_row(bounds, self.rank, self.size)
        piece = self._cut(batch.to(device))
        piece.cu_seqlens = self.piece.cu_seqlens.to(device, non_blocking=True)
        return piece

    def leave(self) -> None:
        """No row is in hand from here on: the operators are FLA's own again."""
        self.piece = None

    def _cut(self, batch: Batch) -> Batch:
        input_ids, labels = (
            each.view(1, -1).chunk(self.size, 1)[self.rank] for each in (batch.input_ids, batch.labels)
        )
        return Batch(input_ids, labels, None, batch.numbers, batch.digests)


def _row_bounds(batch: Batch) -> torch.Tensor:
    """Rows laid end to end, each of them one document."""
    num_rows, length = batch.input_ids.shape
    return torch.arange(num_rows + 1) * length


def check_row(num_tokens: int, size: int, shortest: int = 8) -> None:
    """Refuse rows that cannot be cut evenly, or into pieces shorter than a short convolution's reach.

    Raises:
        UserError: names the lengths.
    """
    if num_tokens % size or num_tokens // size < shortest:
        raise UserError(
            f"experimental.context_parallel_degree = {size}: a row of {num_tokens} tokens (training.seq_len, times "
            f"batch_size with varlen) must be a multiple of it, with pieces of at least {shortest} tokens"
        )
