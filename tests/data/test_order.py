import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame.data import order
from flame.data.order import RowOrder


def test_an_epoch_is_a_pass_over_all_rows_in_an_order_of_its_own():
    rows = RowOrder(10, seed=42, source_index=0, shuffle="global").rows(np.arange(30)).reshape(3, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in rows.tolist())
    assert len({tuple(epoch) for epoch in rows.tolist()}) == 3


def test_order_depends_on_seed_and_source():
    orders = {
        tuple(RowOrder(50, seed, source, "global").rows(np.arange(50)).tolist()) for seed in (1, 2) for source in (0, 1)
    }
    assert len(orders) == 4


def test_order_of_the_source():
    assert RowOrder(3, 42, 0, "none").rows(np.arange(7)).tolist() == [0, 1, 2, 0, 1, 2, 0]


@settings(max_examples=60, deadline=None)
@given(num_rows=st.integers(1, 120), block_rows=st.integers(1, 12), epoch=st.integers(0, 10**6))
def test_blocks_hold_every_row_once_and_stay_together(num_rows, block_rows, epoch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "BLOCK_ROWS", block_rows)
        rows = RowOrder(num_rows, 42, 0, "block").rows(np.arange(num_rows) + epoch * num_rows)
    assert sorted(rows.tolist()) == list(range(num_rows))
    blocks = [block for block, _ in itertools.groupby((rows // block_rows).tolist())]
    assert num_rows <= block_rows or len(blocks) == len(set(blocks)) == -(-num_rows // block_rows)


def test_blocks_and_their_rows_are_in_another_order_in_each_epoch():
    rows = RowOrder(3500, 42, 0, "block").rows(np.arange(35_000)).reshape(10, 3500)
    places = [np.flatnonzero(epoch == 3200)[0] // 500 for epoch in rows]  # of the short last block
    assert len(set(places)) > 2
    inside = {tuple(epoch[epoch // 1000 == 1]) for epoch in rows}
    assert len(inside) == 10 and tuple(range(1000, 2000)) not in inside
