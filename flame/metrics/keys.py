"""The names under which a logged step is stored: keys of ``metrics.jsonl`` and their tags in TensorBoard and W&B.

Other programs read both, so a name is never changed or given another meaning, only added.
"""

from __future__ import annotations

import math

# key of metrics.jsonl -> TensorBoard and W&B tag
TAGS = {
    "loss": "train/loss",  # mean over the interval's steps of the token-weighted global loss, nats per token
    "max_loss": "train/max_loss",  # largest of the interval's losses
    "grad_norm": "train/grad_norm",  # global L2 norm before clipping, mean over the interval
    "lr": "train/lr",  # the logged step's learning rate
    "tokens": "train/tokens",  # trained so far, all ranks
    "skipped_steps": "train/skipped_steps",  # steps since the start of the run whose update was left out
    "tps": "speed/tps",  # tokens per second and device
    "tflops": "speed/tflops",  # training FLOPs per second and device, 1e12
    "mfu": "speed/mfu",  # tflops / dense peak of the device, 0 to 1; null when the peak is unknown
    "step_time_s": "speed/step_time_s",  # mean wall time of a step, seconds; on a GPU by its own clock
    "data_time_pct": "speed/data_time_pct",  # share of the wall time spent waiting for data, 0 to 100
    "memory_gib": "system/memory_gib",  # peak of this device's allocated memory (CPU: of the process), GiB
    "skipped_rows": "data/skipped_rows",  # rows left out by training.on_bad_row = "skip"
    "val_loss": "val/loss",
    "val_ppl": "val/ppl",
}
TRAIN_KEYS = tuple(key for key in TAGS if not key.startswith("val_") and key != "skipped_rows")


def scalars(row: dict) -> dict[str, float]:
    """The finite numbers of ``row`` under their tags; ``epochs`` becomes one ``data/epoch/<source>`` each.

    A key without a tag of its own goes under ``extra/``; ``step``, ``time`` and text are not scalars and stay out.
    """
    tagged = {TAGS.get(key, f"extra/{key}"): value for key, value in row.items() if key not in ("step", "time")}
    tagged |= {f"data/epoch/{source}": value for source, value in (row.get("epochs") or {}).items()}
    return {tag: value for tag, value in tagged.items() if is_finite_number(value)}


def is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
