"""A rank's piece of a packed row, against the row itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flame.data.batch import Batch
from flame.errors import UserError
from flame.parallel import context as home
from flame.parallel.context import ContextParallel, check_row, cut_row
from flame.parallel.degrees import Degrees


@st.composite
def rows(draw) -> tuple[torch.Tensor, int]:
    """Document bounds of a row, and the ranks that share it."""
    size, length = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    inside = draw(st.sets(st.integers(1, size * length - 1))) if size * length > 1 else set()
    return torch.tensor([0, *sorted(inside), size * length], dtype=torch.int32), size


def documents(cu_seqlens: torch.Tensor) -> list[int]:
    """The document of each token."""
    lengths = cu_seqlens.diff().tolist()
    return [number for number, length in enumerate(lengths) for _ in range(length)]


@settings(deadline=None)
@given(rows())
def test_pieces_cover_the_row_and_know_what_lies_before(row):
    cu_seqlens, size = row
    whole = documents(cu_seqlens)
    for rank in range(size):
        piece = cut_row(cu_seqlens, rank, size)
        own = whole[piece.start : piece.start + piece.length]
        assert piece.length * size == len(whole)
        assert documents(piece.cu_seqlens) == [document - own[0] for document in own]
        assert piece.before == whole[: piece.start].count(own[0])
        assert piece.last_document == own.index(own[-1])
        for other in range(size):
            start = other * piece.length
            last = whole[start + piece.length - 1]
            assert piece.carries[other] == (last in whole[:start])


@pytest.fixture
def second_of_two(monkeypatch) -> ContextParallel:
    ranks = SimpleNamespace(get_rank=lambda _: 1, get_world_size=lambda _: 2)
    monkeypatch.setattr(home, "dist", ranks)
    return ContextParallel(None)


def test_a_rank_takes_its_piece_of_a_packed_row(second_of_two):
    labels = torch.arange(1, 9).clone()
    labels[5] = -100
    batch = Batch(torch.arange(8)[None], labels[None], torch.tensor([0, 3, 6, 8], dtype=torch.int32), [], [])
    piece = second_of_two.enter(batch, torch.device("cpu"))
    assert piece.input_ids.tolist() == [[4, 5, 6, 7]]
    assert piece.cu_seqlens.tolist() == [0, 2, 4]
    assert second_of_two.piece.before == 1
    assert second_of_two.row.offsets.tolist() == [1, 0]
    assert second_of_two.row.bounds_with(1).tolist() == [0, 3, 5]
    assert second_of_two.count_targets(batch) == 3


def test_rows_without_documents_are_laid_end_to_end(second_of_two):
    ids = torch.arange(12).view(3, 4)
    piece = second_of_two.enter(Batch(ids, ids, None, [], []), torch.device("cpu"))
    assert piece.input_ids.tolist() == [[6, 7, 8, 9, 10, 11]]
    assert piece.cu_seqlens.tolist() == [0, 2, 6]
    assert second_of_two.piece.before == 2


@pytest.mark.parametrize(
    ("num_tokens", "degrees", "multiple"),
    [
        (65, Degrees(context=2), "2,"),
        (24, Degrees(context=4), "4,"),
        (66, Degrees(context=2, tensor=2), r"2 \* 2 \(training.tensor_parallel_degree\),"),
    ],
)
def test_rows_that_make_no_even_pieces_are_refused(num_tokens, degrees, multiple):
    check_row(64, degrees)
    given = f"context_parallel_degree = {degrees.context}: a row of {num_tokens} tokens"
    with pytest.raises(UserError, match=f"{given} .* must be a multiple of {multiple}"):
        check_row(num_tokens, degrees)
