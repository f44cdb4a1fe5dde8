"""What tells the data of one job from that of another, so that a resume cannot go on with other data unnoticed."""

from __future__ import annotations

import hashlib

import numpy as np

from flame.data.rows import read_values
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


def source_fingerprint(source: Source) -> dict[str, str | int]:
    """Row count, column and a sample of the rows: the same wherever the files lie, in constant time for any size."""
    rows = np.unique(np.linspace(0, len(source) - 1, NUM_SAMPLED_ROWS).astype(np.int64)).tolist()
    digest = hashlib.sha256()
    for value in read_values(source, rows):
        content = value.tobytes() if isinstance(value, np.ndarray) else str(value).encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return {"rows": len(source), "column": source.column, "sampled_rows": digest.hexdigest()[:32]}
