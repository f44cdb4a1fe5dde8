"""Layouts that cannot work: both ranks of a job say so at once, with the option to change, and none waits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from flame.launch import exit_codes
from tests.runs.harness import Job, run_ranks

PP2 = {"experimental.pipeline_parallel_degree": "2", "training.gradient_accumulation_steps": "4"}
CP2 = {"experimental.context_parallel_degree": "2"}
TP2 = {"training.tensor_parallel_degree": "2"}
SCHEDULE = "experimental.pipeline_parallel_schedule"
LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 4096, "max_position_embeddings": 128,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A job, and what each rank must say."""

    options: dict[str, str]
    message: str
    family: str = "gla"


ROWS = {
    "degrees": Row({"experimental.pipeline_parallel_degree": "3"}, "must multiply to the 2 processes"),
    "streams": Row({"training.num_streams": "15"}, "training.num_streams"),
    "few microbatches": Row(PP2 | {"training.gradient_accumulation_steps": "1"}, "a step has 1 micro-batches only"),
    "uneven microbatches": Row(
        PP2 | {"experimental.pipeline_parallel_microbatches": "3"}, "microbatches = 3 does not divide a rank's 4"
    ),
    "rounds": Row(
        PP2 | {SCHEDULE: "Interleaved1F1B", "training.gradient_accumulation_steps": "5"},
        "schedule = Interleaved1F1B with 5 micro-batches a step",
    ),
    "a CSV file for others": Row(
        PP2 | {f"{SCHEDULE}_csv": "tests/runs/schedule.csv", "training.gradient_accumulation_steps": "8"},
        "schedule_csv = tests/runs/schedule.csv with 8 micro-batches a step",
    ),
    "unknown schedule": Row(PP2 | {SCHEDULE: "2F2B"}, "schedule = 2F2B: must be one of 1F1B, GPipe"),
    "both ends on one rank": Row(PP2 | {SCHEDULE: "ZBVZeroBubble"}, "tie_word_embeddings false"),
    "more than hidden states": Row(PP2, "is given v_first", "rwkv7"),
    "a parameter of all blocks": Row(PP2, "lower_bounds", "hgrn2"),
    "stages without proofs": Row(PP2, "is no model of flash-linear-attention", "llama"),
    "no pieces": Row(CP2, "mamba2 cannot be split along the sequence", "mamba2"),
    "uneven pieces": Row(CP2 | {"training.seq_len": "63"}, "a row of 63 tokens"),
    "uneven sequence": Row(TP2 | {"training.seq_len": "63"}, "does not divide training.seq_len = 63"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, list[tuple[int, str]]]:
    """Exit code and output of each rank, for each row."""
    folder: Path = tmp_path_factory.mktemp("refusals")
    (folder / "llama.json").write_text(json.dumps(LLAMA))
    jobs = {}
    for name, row in ROWS.items():
        config = folder / "llama.json" if row.family == "llama" else f"configs/debug/{row.family}.json"
        jobs[name] = Job(folder / name, {"model.config": str(config)} | row.options)
    codes, outputs = run_ranks(list(jobs.values()), 2, timeout=400)
    return {
        name: [(code[i], output) for code, output in zip(codes, outputs, strict=True)] for i, name in enumerate(jobs)
    }


@pytest.mark.parametrize("name", ROWS)
def test_both_ranks_say_what_is_wrong(outcomes, name):
    for code, output in outcomes[name]:
        assert code == exit_codes.USER_ERROR
        assert ROWS[name].message in output
