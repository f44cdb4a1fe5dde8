"""What tells the data of one job from that of another, so that a resume cannot go on with other data unnoticed."""

from __future__ import annotations

import hashlib
import os
from itertools import takewhile

import numpy as np

from flame.data.rows import read_values
from flame.data.shards import ShardedSource
from flame.data.sources import Source
from flame.data.streams import DataPlan

NUM_SAMPLED_ROWS = 32


def plan_fingerprint(plan: DataPlan, training) -> dict:
    """Plain data that is equal when, and mostly only when, the plans give the same sequences."""
    order = {"seed": training.seed, "shuffle": training.shuffle}
    if len(plan.sources) > 1:
        order["probabilities"] = plan.mixture.probabilities.tolist()
    return {
        "sources": [source_fingerprint(source) for source in plan.sources],
        "tokenizer": plan.encoder.fingerprint(),
        "order": order,
        "packing": {"seq_len": plan.seq_len, "context_len": plan.context_len, "varlen": training.varlen},
    }


def source_fingerprint(source: Source | ShardedSource) -> dict[str, str | int | None]:
    """Size, column and a sample of the rows: the same wherever the files lie, in constant time for any size.

    Of shards, whose rows are not to be read for this, the files' names and sizes, and the first rows.
    """
    if isinstance(source, ShardedSource):
        return _shards_fingerprint(source)
    rows = np.unique(np.linspace(0, len(source) - 1, NUM_SAMPLED_ROWS).astype(np.int64)).tolist()
    return {"rows": len(source), "column": source.column, "sampled_rows": _digest(read_values(source, rows))}


def _shards_fingerprint(source: ShardedSource) -> dict[str, str | int | None]:
    sizes = source.file_sizes()
    return {
        "shards": source.num_shards,
        "column": source.column,
        "bytes": None if None in sizes else sum(sizes),
        "names": _digest(relative_names(source.files)),
        "sizes": _digest(sizes),
        "first_rows": _digest(source.first_values),
    }


def relative_names(files: list[str]) -> list[str]:
    """Names of paths or addresses from the last folder on that holds them all.

    What lies before it, such as the revision of a hub's dataset, may change while the files stay.
    """
    parts = [file.replace(os.sep, "/").split("/") for file in files]
    levels = zip(*[path[:-1] for path in parts], strict=False)
    num_shared = len(list(takewhile(lambda names: len(set(names)) == 1, levels)))
    return ["/".join(path[num_shared:]) for path in parts]


def _digest(values: list) -> str:
    digest = hashlib.sha256()
    for value in values:
        content = value.tobytes() if isinstance(value, np.ndarray) else str(value).encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:32]
