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
# A model that no debug config has.
MPT = {"model_type": "mpt", "d_model": 32, "n_heads": 2, "n_layers": 2, "vocab_size": 4096, "max_seq_len": 128}


@dataclass(frozen=True)
class Row:
    """A job, and what each rank must say."""

    options: dict[str, str]
    message: str
    family: str = "gla"


KEEP_OPERATORS = {"activation_checkpoint.selective_ac_option": "op"}

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
    "kept operators": Row(
        PP2 | {SCHEDULE: "InterleavedZeroBubble", "activation_checkpoint.mode": "selective"} | KEEP_OPERATORS,
        "selective_ac_option = op and experimental.pipeline_parallel_schedule = InterleavedZeroBubble do not go",
    ),
    "both ends on one rank": Row(PP2 | {SCHEDULE: "ZBVZeroBubble"}, "tie_word_embeddings false"),
    "a parameter of all blocks": Row(PP2 | {SCHEDULE: "Interleaved1F1B"}, "lower_bounds belongs to all", "hgrn2"),
    "stages that mix documents": Row(PP2, "mixes packed documents", "mpt"),
    "no pieces": Row(CP2, "sba cannot be split along the sequence", "sba"),
    "no earlier keys": Row(CP2, "rotate_method = allgather: FLA's stick-breaking", "stickbreaking_attn"),
    "uneven pieces": Row(CP2 | {"training.seq_len": "63"}, "a row of 63 tokens"),
    "uneven sequence": Row(TP2 | {"training.seq_len": "63"}, "does not divide training.seq_len = 63"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, list[tuple[int, str]]]:
    """Exit code and output of each rank, for each row."""
    folder: Path = tmp_path_factory.mktemp("refusals")
    (folder / "mpt.json").write_text(json.dumps(MPT))
    jobs = {}
    for name, row in ROWS.items():
        own = folder / f"{row.family}.json"
        config = own if own.exists() else f"configs/debug/{row.family}.json"
        jobs[name] = Job(folder / name, {"model.config": str(config)} | row.options)
    codes, outputs = run_ranks(list(jobs.values()), 2)
    return {
        name: [(code[i], output) for code, output in zip(codes, outputs, strict=True)] for i, name in enumerate(jobs)
    }


@pytest.mark.parametrize("name", ROWS)
def test_both_ranks_say_what_is_wrong(outcomes, name):
    for code, output in outcomes[name]:
        assert code == exit_codes.USER_ERROR
        assert ROWS[name].message in output
