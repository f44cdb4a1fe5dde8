import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame.data.permutation import derive_key, permute


def permutation(num_rows: int, epoch: int, key: int = 7) -> list[int]:
    return permute(np.arange(num_rows), np.full(num_rows, epoch), num_rows, key).tolist()


@pytest.mark.parametrize("num_rows", range(1, 70))
def test_every_small_size_is_a_bijection(num_rows):
    assert sorted(permutation(num_rows, 0)) == list(range(num_rows))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**40), st.integers(0, 2**64 - 1))
def test_every_size_epoch_and_key_is_a_bijection(num_rows, epoch, key):
    assert sorted(permutation(num_rows, epoch, key)) == list(range(num_rows))


def test_epochs_and_keys_differ():
    orders = {tuple(permutation(100, epoch, key)) for epoch in range(20) for key in range(5)}
    assert len(orders) == 100


def test_all_orders_of_four_rows_appear_about_equally_often():
    num_epochs = 4800
    index = np.tile(np.arange(4), num_epochs)
    rows = permute(index, np.repeat(np.arange(num_epochs), 4), 4, derive_key(42, 0)).reshape(-1, 4)
    counts = {order: 0 for order in itertools.permutations(range(4))}
    for order in map(tuple, rows.tolist()):
        counts[order] += 1
    assert min(counts.values()) > 140 and max(counts.values()) < 260  # 200 expected, standard deviation 14


def test_rows_of_one_epoch_are_spread_evenly():
    """The mean row of each tenth of an epoch is that of a random sample, within five standard deviations."""
    rows = np.array(permutation(100_000, 3))
    means = rows.reshape(10, -1).mean(axis=1)
    assert np.abs(means - 49_999.5).max() < 5 * 100_000 / np.sqrt(12 * 10_000)


def test_huge_sources_need_no_memory():
    rows = permute(np.array([0, 1, 10**12 - 1]), np.array([0, 0, 10**6]), 10**12, 1)
    assert len(set(rows.tolist())) == 3 and rows.min() >= 0 and rows.max() < 10**12


def test_values_never_change():
    assert permutation(10, 0) == permutation(10, 0)
    assert derive_key(42, 0) != derive_key(42, 1) != derive_key(0, 42)
