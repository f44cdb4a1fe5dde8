"""What a data state holds, and how the ranks' parts become one."""

from __future__ import annotations

from dataclasses import dataclass, field

STATE_VERSION = 2


@dataclass
class StreamState:
    """The next unused token of one stream.

    Attributes:
        cursors: per source, where the stream's next document stands there, as the source's order counts.
        draws: documents finished over all sources: the counter of the draw that chooses the next source.
        offset: tokens used of the document in hand.
        skipped: bad rows left out so far.
    """

    cursors: list[int] = field(default_factory=lambda: [0])
    draws: int = 0
    offset: int = 0
    skipped: int = 0

    def to_list(self) -> list[int]:
        """The state as plain integers: offset, draws, skipped, then one cursor per source."""
        return [self.offset, self.draws, self.skipped, *self.cursors]

    @classmethod
    def from_list(cls, values: list[int]) -> StreamState:
        offset, draws, skipped, *cursors = values
        return cls(cursors, draws, offset, skipped)


def merge_state_dicts(parts: list[dict]) -> dict:
    """Join the states of all data-parallel ranks into one that any number of ranks can load.

    Args:
        parts: ``DataLoader.state_dict()`` of every rank, in any order, taken after the same step.

    Returns:
        Plain data (dicts, lists, strings, integers) whose ``streams`` lists every stream's state by its number.
    """
    streams: dict[str, list[int]] = {}
    for part in parts:
        streams.update(part["streams"])
    first = parts[0]
    positions = {part["num_sequences"] for part in parts}
    assert len(positions) == 1, f"ranks stand at different sequences: {sorted(positions)}"
    assert len(streams) == first["num_streams"], f"{len(streams)} of {first['num_streams']} streams were handed in"
    return {**first, "streams": [streams[str(number)] for number in range(first["num_streams"])]}
