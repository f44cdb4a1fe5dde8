"""What tells the data of one job from that of another, so that a resume cannot go on with other data unnoticed."""

from __future__ import annotations

import hashlib

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


def source_fingerprint(source: Source | ShardedSource) -> dict[str, str | int]:
    """Size, column and a sample of the rows: the same wherever the files lie, in constant time for any size."""
    if isinstance(source, ShardedSource):
        return {"shards": source.num_shards, "column": source.column, "first_rows": _digest(source.first_values)}
    rows = np.unique(np.linspace(0, len(source) - 1, NUM_SAMPLED_ROWS).astype(np.int64)).tolist()
    return {"rows": len(source), "column": source.column, "sampled_rows": _digest(read_values(source, rows))}


def _digest(values: list) -> str:
    digest = hashlib.sha256()
    for value in values:
        content = value.tobytes() if isinstance(value, np.ndarray) else str(value).encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:32]
