"""Whole runs whose numbers must agree: ranks against accumulation, resume against no interruption.

Each table is one group of processes; see ``harness``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs.harness import Job, run_jobs

FAMILIES = ("transformer", "gla", "gated_deltanet", "delta_net", "rwkv7")  # rwkv7: layers also hand on values
# A family of transformers itself: documents are kept apart by position ids, and proven so before training.
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 256,
}  # fmt: skip
# name -> what the pair of runs sets; one runs on two ranks, the other on one with twice the accumulation.
PAIRS = {
    **{family: {"model.config": f"configs/debug/{family}.json"} for family in FAMILIES},
    # AdamW's update does not change when all gradients are scaled; plain gradient descent's does.
    "sgd": {"optimizer.name": "SGD", "optimizer.beta1": "0", "optimizer.lr": "0.1", "optimizer.weight_decay": "0"},
    "unclipped_sgd": {
        "optimizer.name": "SGD",
        "optimizer.beta1": "0",
        "optimizer.lr": "0.05",
        "training.max_norm": "inf",
    },
    "plain": {"training.varlen": "false", "training.context_len": "64", "training.batch_size": "2"},
    "batch_of_two_packed": {"training.batch_size": "2"},
    "llama": {"model.config": "llama.json"},
}
ACCUMULATION = {"training.gradient_accumulation_steps": "2"}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, tuple[Job, Job]]:
    """Each pair of ``PAIRS`` run as (one rank, two ranks)."""
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "llama.json").write_text(json.dumps(LLAMA))
    PAIRS["llama"]["model.config"] = str(folder / "llama.json")
    one = {name: Job(folder / f"one_{name}", options | ACCUMULATION) for name, options in PAIRS.items()}
    two = {name: Job(folder / f"two_{name}", options) for name, options in PAIRS.items()}
    assert run_jobs(list(one.values())) == [0] * len(one)
    assert run_jobs(list(two.values()), world_size=2) == [0] * len(two)
    return {name: (one[name], two[name]) for name in PAIRS}


@pytest.mark.parametrize("name", PAIRS)
def test_two_ranks_equal_one_with_twice_the_accumulation(pairs, name):
    one, two = pairs[name]
    assert one.series("step") == two.series("step") == list(range(1, 11))
    assert one.series("loss") == pytest.approx(two.series("loss"), abs=1e-5)
    assert one.series("grad_norm") == pytest.approx(two.series("grad_norm"), rel=1e-3)
    assert one.series("tokens") == two.series("tokens")
    losses = one.series("loss")
    assert losses[0] > 8 and losses[-1] < losses[0], "the runs must learn, or agreeing means nothing"


def test_the_log_says_how_many_blocks_fsdp_took(pairs):
    log = (pairs["llama"][0].folder / "logs" / "train.log").read_text()
    assert "FSDP: 2 blocks, each a unit of its own, sharded over 1" in log


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> dict[str, Job]:
    """An undisturbed run, and runs that stopped after steps 4 and 7 and went on."""
    folder = tmp_path_factory.mktemp("resumed")
    common = {"checkpoint.interval": "4", "training.num_workers": "1", "training.log_data_hash": "true"}
    whole = Job(folder / "whole", common | {"checkpoint.interval": "3"})
    parts = [Job(folder / "parts", common | {"training.steps": str(last)}) for last in (4, 7, 10)]
    changed = Job(folder / "parts", common | {"training.steps": "12", "optimizer.lr": "5e-4"})
    again = Job(folder / "whole", common)
    bad = Job(folder / "whole", common | {"checkpoint.load_step": "999", "training.steps": "20"})
    assert run_jobs([whole, *parts, changed, again, bad]) == [0, 0, 0, 0, 0, 0, 2]
    return {"whole": whole, "parts": parts[-1]}


def test_resume_is_bit_exact(resumed):
    whole, parts = resumed["whole"], resumed["parts"]
    for key in ("loss", "max_loss", "grad_norm", "lr", "tokens", "data_hash"):
        assert parts.series(key)[:10] == whole.series(key), key


def test_no_step_is_missing_or_doubled(resumed):
    assert resumed["parts"].series("step") == list(range(1, 13))


def test_a_changed_learning_rate_applies(resumed):
    assert resumed["parts"].series("lr")[9:] == [1e-3, 5e-4, 5e-4]


def test_checkpoints_are_where_they_are_said_to_be(resumed):
    folder: Path = resumed["whole"].folder / "checkpoint"
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-10", "step-9"]  # keep_latest_k = 2


def test_the_run_folder_explains_itself(resumed):
    names = {path.name for path in resumed["whole"].folder.iterdir()}
    assert names >= {"config.toml", "model_config.json", "metrics.jsonl", "env.json", "checkpoint", "loss.svg"}
