"""Which source each document of a stream comes from."""

from __future__ import annotations

import numpy as np

from flame.data.permutation import GOLDEN_RATIO_64, derive_key, mix64


class Mixture:
    """Draws a source for each document of a stream, by counter: draw d of stream s never changes.

    A source that has given a stream all that it ever will is passed over: the draws that would have fallen on it are
    repeated among the others, so their shares keep their ratios.

    Args:
        probabilities: of the sources; they are scaled to sum to 1. A source with 0 is never drawn.
        seed: the job's seed.
    """

    def __init__(self, probabilities: list[float], seed: int):
        self.probabilities = np.asarray(probabilities, dtype=np.float64) / sum(probabilities)
        self.drawn = np.flatnonzero(self.probabilities).tolist()
        self.seed = seed
        self.keys: dict[tuple[int, int], int] = {}

    def choose(self, stream: int, first_draw: int, count: int) -> list[int]:
        """Sources of the stream's draws ``first_draw`` to ``first_draw + count - 1``."""
        if len(self.drawn) == 1:
            return self.drawn * count
        return self._pick(self.drawn, stream, np.arange(first_draw, first_draw + count), attempt=0).tolist()

    def choose_among(self, sources: list[int], stream: int, draw: int) -> int:
        """Another choice for a draw that fell on a source with nothing left, among those that have something."""
        return int(self._pick(sources, stream, np.array([draw]), attempt=1)[0])

    def _pick(self, sources: list[int], stream: int, draws: np.ndarray, attempt: int) -> np.ndarray:
        limits = np.cumsum(self.probabilities[sources])
        places = np.searchsorted(limits[:-1], self._uniform(stream, draws, attempt) * limits[-1], side="right")
        return np.asarray(sources)[places]

    def _uniform(self, stream: int, draws: np.ndarray, attempt: int) -> np.ndarray:
        """Numbers from 0 to 1, which is left out: the upper 53 bits of SplitMix64 over the counter."""
        key = self.keys.get((stream, attempt))
        if key is None:
            key = self.keys[stream, attempt] = derive_key(self.seed, stream, attempt)
        bits = mix64(draws.astype(np.uint64) * np.uint64(GOLDEN_RATIO_64) + np.uint64(key))
        return (bits >> np.uint64(11)) * 2.0**-53
