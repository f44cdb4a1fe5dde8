"""Reading and tokenising documents, on a thread that is ahead of whoever packs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from flame.data.documents import Documents, interleave
from flame.data.rows import tokenize_values
from flame.data.sources import Source
from flame.data.tokenize import DocumentEncoder, Tokenized
from flame.data.walks import Walk


@dataclass
class Request:
    """Consecutive documents of one stream to read.

    Attributes:
        stream: whoever they are for.
        sources: the number of the source of each document.
        items: what the source's walk calls each of them.
        cursors: the stream's cursor in the source behind each of them.
        num_passes: passes over the sources up to here.
    """

    stream: object
    sources: list[int] = field(default_factory=list)
    items: list = field(default_factory=list)
    cursors: list[int] = field(default_factory=list)
    num_passes: float = 0.0


@dataclass
class _Batch:
    requests: list[Request]
    places: list[np.ndarray]  # for each source in the batch, which of the batch's documents are its own
    parts: list[Future[Tokenized]]  # these documents


class ReadAhead:
    """Documents on their way: batches that are begun come back finished, in the same order.

    A tokenizer lets other Python threads run while it works, so it works on a thread of its own, without a pause while
    there is another batch to be had; making arrays of what it gave is left to the caller's thread, as is reading the
    rows. What it gave is freed on its own thread. The thread starts with the first batch, in the process that uses it:
    worker processes are forked before.

    Args:
        sources: where rows come from.
        walks: the walk over each source, by its number.
        encoder: rows to token ids.
        skip_bad_rows: make empty documents of rows without text instead of raising.
    """

    def __init__(self, sources: list[Source], walks: Mapping[int, Walk], encoder: DocumentEncoder, skip_bad_rows: bool):
        self.sources, self.walks, self.encoder, self.skip_bad_rows = sources, walks, encoder, skip_bad_rows
        self.batches: deque[_Batch] = deque()
        self.thread: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        """Number of batches on their way."""
        return len(self.batches)

    def begin(self, requests: list[Request]) -> None:
        """Read the rows of a batch and have them tokenised."""
        if self.thread is None:
            self.thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        sources = np.array([source for request in requests for source in request.sources])
        items = [item for request in requests for item in request.items]
        batch = _Batch(requests, [], [])
        for source in np.unique(sources).tolist():
            places = np.flatnonzero(sources == source)
            own = items if len(places) == len(items) else [items[place] for place in places.tolist()]
            values, labels = self.walks[source].read(own)
            job = (self.sources[source], values, labels, self.encoder, self.skip_bad_rows)
            batch.places.append(places)
            batch.parts.append(self.thread.submit(tokenize_values, *job))
        self.batches.append(batch)

    def finish(self) -> tuple[list[Request], Documents]:
        """The requests of the oldest batch, and their documents in the same order.

        Raises:
            UserError: a row cannot be read, or holds no text and ``skip_bad_rows`` is off.
        """
        batch = self.batches.popleft()
        parts = [part.result() for part in batch.parts]
        documents = [self.encoder.frame(part) for part in parts]
        for part in parts:  # from another thread each piece would wait for the allocator's lock, which its thread holds
            self.thread.submit(part.rows.clear)
        return batch.requests, interleave(documents, batch.places)

    def close(self, wait: bool = False) -> None:
        """Drop what is on its way and let the thread end; ``wait`` for the batch that it has in hand, or do not."""
        self.batches.clear()
        if self.thread is not None:
            self.thread.shutdown(wait=wait, cancel_futures=True)
            self.thread = None
