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
from flame.host_copy import send_and_remember
from flame.parallel.degrees import Degrees

SHORTEST_PIECE = 8  # tokens


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


class Row:
    """A packed row that ranks share, as one of them needs it in every layer: on the device, so that none waits.

    Args:
        bounds: document bounds of the whole row, on the CPU.
        rank, size: whose piece it is of how many.
        device: where the operators work.

    Attributes:
        piece: the rank's.
        host_bounds, bounds: document bounds of the whole row, int32, on the CPU and on the device.
        own_bounds: document bounds of the piece, int32 [n + 1], on the device.
        offsets: position of the piece's first token of each document in that document, int32 [n], on the device.
    """

    def __init__(self, bounds: torch.Tensor, rank: int, size: int, device: torch.device):
        self.piece = cut_row(bounds, rank, size)
        self.host_bounds = bounds.int()
        self.bounds, self.own_bounds = (
            send_and_remember(each, device) for each in (self.host_bounds, self.piece.cu_seqlens)
        )
        self.offsets = torch.zeros_like(self.own_bounds[1:])
        self.offsets[0] = self.piece.before
        self._longer_bounds: dict[int, torch.Tensor] = {}

    def bounds_with(self, before: int) -> torch.Tensor:
        """``own_bounds`` when the first document has ``before`` tokens more."""
        if before not in self._longer_bounds:
            moved = self.own_bounds + before
            moved[0] = 0
            self._longer_bounds[before] = moved
        return self._longer_bounds[before]


class ContextParallel:
    """The ranks that share each row, and the row in hand.

    Args:
        group: the ranks, in the order of their pieces.

    Attributes:
        row: whose pieces the operators are given; None while there is none, and they are FLA's own.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.row: Row | None = None

    @property
    def piece(self) -> Piece:
        """This rank's piece of the row in hand."""
        return self.row.piece

    def count_targets(self, batch: Batch) -> int:
        """Targets in this rank's piece of a batch (on the CPU)."""
        return self._own_tokens(batch).num_valid

    def enter(self, batch: Batch, device: torch.device) -> Batch:
        """This rank's piece of a batch on the device; the operators exchange what the piece lacks until the next."""
        self.row, piece = self.cut(batch, device)
        return piece

    def leave(self) -> None:
        """No row is in hand from here on."""
        self.row = None

    def cut(self, batch: Batch, device: torch.device) -> tuple[Row, Batch]:
        """A batch (on the CPU) as the row to have in hand, and this rank's piece of it on the device."""
        bounds = _row_bounds(batch) if batch.cu_seqlens is None else batch.cu_seqlens
        row = Row(bounds, self.rank, self.size, device)
        piece = self._own_tokens(batch.to(device))
        piece.cu_seqlens = row.own_bounds
        return row, piece

    def _own_tokens(self, batch: Batch) -> Batch:
        input_ids, labels = (
            each.view(1, -1).chunk(self.size, 1)[self.rank] for each in (batch.input_ids, batch.labels)
        )
        return Batch(input_ids, labels, None, batch.numbers, batch.digests)


def _row_bounds(batch: Batch) -> torch.Tensor:
    """Rows laid end to end, each of them one document."""
    num_rows, length = batch.input_ids.shape
    return torch.arange(num_rows + 1) * length


def check_row(num_tokens: int, degrees: Degrees, width: int = 0) -> None:
    """Refuse rows that cannot be cut evenly, or only into pieces that are too short.

    Args:
        num_tokens: of a row, before it is cut.
        degrees: tensor parallelism cuts each piece of context parallelism again.
        width: of the model's short convolutions, which take what they look back to from one piece only.

    Raises:
        UserError: names the lengths.
    """
    context, tensor, shortest = degrees.context, degrees.tensor, max(SHORTEST_PIECE, width)
    if num_tokens % (context * tensor) or num_tokens // (context * tensor) < shortest:
        multiple = f"{context}" if tensor == 1 else f"{context} * {tensor} (training.tensor_parallel_degree)"
        raise UserError(
            f"experimental.context_parallel_degree = {context}: a row of {num_tokens} tokens (training.seq_len, times "
            f"batch_size with varlen) must be a multiple of {multiple}, with pieces of at least {shortest} tokens"
        )
