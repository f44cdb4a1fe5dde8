from __future__ import annotations

import pytest
import torch

from flame.errors import UserError
from flame.models.reference.packing import ChunkLayout, document_lengths, document_positions


def test_positions_restart_at_each_document():
    assert document_positions(torch.tensor([3, 1, 2])).tolist() == [0, 1, 2, 0, 0, 1]


def test_rows_are_documents_without_cu_seqlens():
    assert document_lengths(2, 5, None).tolist() == [5, 5]


@pytest.mark.parametrize("bounds", [[0, 4], [1, 5], [0, 3, 2, 5]])
def test_bounds_that_do_not_cover_the_row_are_refused(bounds):
    with pytest.raises(UserError, match="from 0 to the row's length 5"):
        document_lengths(1, 5, torch.tensor(bounds))


def test_several_rows_with_bounds_are_refused():
    with pytest.raises(UserError, match="one row, got 2"):
        document_lengths(2, 5, torch.tensor([0, 5]))


@pytest.mark.parametrize("lengths", [[5], [64], [128], [1, 1, 1], [130, 3, 64, 65], [0, 7, 0]])
def test_padding_and_unpadding_are_inverse(lengths):
    layout = ChunkLayout.build(torch.tensor(lengths), torch.device("cpu"))
    x = torch.randn(sum(lengths), 3, dtype=torch.float64, requires_grad=True)
    padded = layout.pad(x)
    assert padded.shape == (layout.num_chunks, layout.chunk_size, 3)
    torch.testing.assert_close(layout.unpad(padded), x)
    assert torch.autograd.gradcheck(lambda x: layout.unpad(layout.pad(x) * 2), (x,))


def test_chunks_are_ordered_by_step_and_length():
    layout = ChunkLayout.build(torch.tensor([2, 9, 4]), torch.device("cpu"), max_chunk_size=4)
    assert layout.active == [3, 1, 1]
    assert layout.order.tolist() == [1, 0, 2]
    token = torch.arange(15.0)
    assert layout.pad(token).tolist() == [
        [2, 3, 4, 5],
        [0, 1, 0, 0],
        [11, 12, 13, 14],
        [6, 7, 8, 9],
        [10, 0, 0, 0],
    ]


@pytest.mark.parametrize(("longest", "chunk_size"), [(1, 1), (2, 2), (3, 4), (33, 64), (64, 64), (500, 64)])
def test_short_inputs_get_a_smaller_chunk(longest, chunk_size):
    layout = ChunkLayout.build(torch.tensor([longest]), torch.device("cpu"))
    assert layout.chunk_size == chunk_size
