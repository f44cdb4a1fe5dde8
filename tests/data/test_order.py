import numpy as np

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
