import math

from flame.metrics.keys import TAGS, TRAIN_KEYS, scalars

# Programs outside read these: a key that goes or changes its name breaks them.
STABLE_KEYS = {
    "loss", "max_loss", "grad_norm", "lr", "tokens", "tps", "tflops", "mfu", "memory_gib", "data_time_pct",
    "step_time_s", "skipped_steps", "val_loss", "val_ppl",
}  # fmt: skip


def test_published_keys_are_there():
    assert set(TAGS) >= STABLE_KEYS
    assert set(TRAIN_KEYS) == STABLE_KEYS - {"val_loss", "val_ppl"}


def test_scalars_have_tags_and_are_finite_numbers():
    row = {"step": 3, "time": 1.0, "loss": 2.0, "mfu": None, "grad_norm": math.nan, "data_hash": "ab", "new": 1}
    assert scalars(row) == {"train/loss": 2.0, "extra/new": 1}


def test_epochs_are_one_scalar_a_source():
    assert scalars({"step": 1, "epochs": {"wiki": 0.5, "code": 2.0}}) == {
        "data/epoch/wiki": 0.5,
        "data/epoch/code": 2.0,
    }
