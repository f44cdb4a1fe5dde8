"""Tokenised documents, many in one array, so that short ones cost little."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Documents:
    """Documents laid end to end. An empty or left-out one has no tokens but is still counted.

    Attributes:
        tokens: ids of all documents, uint16 or int32 [sum of lengths].
        ends: where each document ends in ``tokens``.
        skipped: places of the documents that stand for bad rows.
    """

    tokens: np.ndarray
    ends: list[int]
    skipped: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ends)

    def select(self, start: int, stop: int) -> Documents:
        """A copy of the documents from ``start`` to ``stop``, so that the rest can be freed."""
        first_token = self.ends[start - 1] if start else 0
        last_token = self.ends[stop - 1] if stop else 0
        ends = [end - first_token for end in self.ends[start:stop]]
        skipped = [place - start for place in self.skipped if start <= place < stop]
        return Documents(self.tokens[first_token:last_token].copy(), ends, skipped)


def interleave(parts: list[Documents], places: list[np.ndarray]) -> Documents:
    """Put the documents of several sources into one order: document k of ``parts[i]`` goes to ``places[i][k]``."""
    if len(parts) == 1:
        return parts[0]
    lengths = np.zeros(sum(map(len, parts)), dtype=np.int64)
    pieces: list[np.ndarray] = [np.empty(0)] * len(lengths)
    skipped: list[int] = []
    for part, part_places in zip(parts, places, strict=True):
        part_pieces = np.split(part.tokens, part.ends[:-1])
        for place, piece in zip(part_places.tolist(), part_pieces, strict=True):
            pieces[place], lengths[place] = piece, len(piece)
        skipped += [int(part_places[place]) for place in part.skipped]
    return Documents(np.concatenate(pieces), np.cumsum(lengths).tolist(), sorted(skipped))
