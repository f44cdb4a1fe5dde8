"""A keyed permutation of row numbers, computed instead of stored."""

from __future__ import annotations

import math

import numpy as np

NUM_ROUNDS = 8
GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15
MASK_64 = (1 << 64) - 1


def mix64(values: np.ndarray) -> np.ndarray:
    """Scramble 64-bit integers, one to one: the finalizer of SplitMix64 (Steele, Lea & Flood, 2014).

    ``values`` is a uint64 array of any shape; arithmetic wraps modulo 2^64.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def derive_key(*numbers: int) -> int:
    """Fold integers, such as (seed, source), into one 64-bit key."""
    key = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        key = mix64(key * np.uint64(3) + np.uint64((number + GOLDEN_RATIO_64) & MASK_64))
    return int(key[0])


def permute(index: np.ndarray, epoch: np.ndarray, num_rows: int, key: int) -> np.ndarray:
    """Row number at each ``index`` of its epoch's permutation of ``range(num_rows)``.

    Both arguments are int64 arrays of one shape [n]; the result is int64 [n]. Every epoch has an unrelated permutation.

    A Feistel network over Z_a x Z_b with a = ceil(sqrt(num_rows)), b = ceil(num_rows / a) permutes range(a * b), hardly
    more than ``num_rows``; values that land outside are permuted again until they fall inside ("cycle walking", Black &
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002), which keeps it one to one for every size.
    """
    num_left = math.isqrt(num_rows - 1) + 1
    num_right = -(-num_rows // num_left)
    round_keys = _round_keys(epoch, key)
    rows = _feistel(index.astype(np.uint64), round_keys, num_left, num_right)
    outside = np.flatnonzero(rows >= num_rows)
    while outside.size:
        rows[outside] = _feistel(rows[outside], round_keys[:, outside], num_left, num_right)
        outside = outside[rows[outside] >= num_rows]
    return rows.astype(np.int64)


def _round_keys(epoch: np.ndarray, key: int) -> np.ndarray:
    epoch_keys = mix64(epoch.astype(np.uint64) * np.uint64(GOLDEN_RATIO_64) + np.uint64(key))  # [n]
    rounds = np.arange(1, NUM_ROUNDS + 1, dtype=np.uint64)[:, None] * np.uint64(GOLDEN_RATIO_64)
    return mix64(epoch_keys[None, :] + rounds)  # [NUM_ROUNDS, n]


def _feistel(values: np.ndarray, round_keys: np.ndarray, num_left: int, num_right: int) -> np.ndarray:
    left, right = np.divmod(values, np.uint64(num_right))
    for number, round_key in enumerate(round_keys):
        if number % 2 == 0:
            left = (left + mix64(right ^ round_key) % np.uint64(num_left)) % np.uint64(num_left)
        else:
            right = (right + mix64(left ^ round_key) % np.uint64(num_right)) % np.uint64(num_right)
    return left * np.uint64(num_right) + right
