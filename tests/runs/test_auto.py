"""Whole runs that leave activation checkpointing and the batch size to the memory there is."""

from __future__ import annotations

import re
import tomllib
from itertools import pairwise

import pytest

from flame.cli.parse import parse_args
from flame.launch import exit_codes
from tests.runs.harness import Job, run_ranks

MODE, BATCH, MEMORY = "activation_checkpoint.mode", "training.batch_size", "job.device_memory_gib"
LONG = {
    "model.config": "configs/debug/transformer.json",
    "training.seq_len": "1024",
    "training.context_len": "512",
    "training.steps": "2",
    MODE: "auto",
}
FOUR = {"training.steps": "4", BATCH: "auto", MEMORY: "0.08"}
SIX = {"training.steps": "6", BATCH: "auto"}


def resolved(job: Job) -> dict:
    return tomllib.loads((job.folder / "config.toml").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Runs of one process by name, their exit codes, and what they printed."""
    folder = tmp_path_factory.mktemp("auto")
    enough = {"none": "1", "op": "0.105", "full": "0.08"}
    jobs = [Job(folder / name, LONG | {MEMORY: gib}) for name, gib in enough.items()]
    jobs += [
        Job(folder / "too_small", LONG | {MEMORY: "0.03"}),
        Job(folder / "unlimited", {"training.steps": "1", BATCH: "auto"}),
        Job(folder / "batch", FOUR),
        Job(folder / "batch", SIX | {MEMORY: "4"}),
        Job(folder / "batch", {"training.steps": "7", BATCH: "auto", MEMORY: "0.01"}),
        Job(folder / "expected", {"training.steps": "6", BATCH: "2"}),
    ]
    codes, outputs = run_ranks(jobs, world_size=1, timeout=300)
    return jobs, codes[0], outputs[0]


def test_each_mode_is_chosen_where_it_fits(alone):
    jobs, codes, output = alone
    assert codes[:3] == [exit_codes.OK] * 3, output[-3000:]
    chosen = [resolved(job)["activation_checkpoint"] for job in jobs[:3]]
    assert [each["mode"] for each in chosen] == ["none", "selective", "full"]
    assert chosen[1]["selective_ac_option"] == "op"
    assert "activation_checkpoint.mode = auto: selective op; planned none 0.11, selective op 0.08 of 0.08 GiB" in output
    assert "activation checkpointing (selective): 4 of 4 blocks" in output


def test_recomputing_changes_no_number(alone):
    jobs, _, _ = alone
    for key in ("loss", "grad_norm"):
        assert jobs[0].series(key) == jobs[1].series(key) == jobs[2].series(key)


def test_what_fits_in_no_way_is_refused(alone):
    _, codes, output = alone
    assert codes[3] == exit_codes.USER_ERROR
    assert "activation_checkpoint.mode = auto: the job does not fit the 0.03 GiB of job.device_memory_gib" in output


def test_a_cpu_has_no_largest_batch_of_its_own(alone):
    _, codes, output = alone
    assert codes[4] == exit_codes.USER_ERROR
    assert "training.batch_size = auto: on a CPU larger batches are no faster" in output


def test_a_resumed_run_keeps_its_batch_size(alone):
    jobs, codes, output = alone
    assert codes[5:7] == [exit_codes.OK] * 2, output[-3000:]
    assert "training.batch_size = auto: 2; planned 1: " in output
    assert "training.batch_size = auto: 2, which keeps the tokens a step of the checkpoint" in output
    assert jobs[6].series("loss") == jobs[8].series("loss")
    assert "tokens per step changed" not in output


def test_a_resumed_run_is_refused_where_its_batch_does_not_fit(alone):
    _, codes, output = alone
    assert codes[7] == exit_codes.USER_ERROR
    assert "training.batch_size = auto: the job does not fit the 0.01 GiB of job.device_memory_gib: 2 x 64" in output


def test_the_run_folder_holds_what_was_chosen(alone):
    jobs, _, _ = alone
    written = resolved(jobs[6])
    assert (written["training"]["batch_size"], written["job"]["device_memory_gib"]) == (2, 0)
    assert parse_args(["--job.config_file", str(jobs[6].folder / "config.toml")]).training.batch_size == 2


@pytest.fixture(scope="module")
def together(alone, tmp_path_factory):
    """Runs of two processes, their exit codes, and what rank 0 printed."""
    folder, batch = tmp_path_factory.mktemp("auto2"), alone[0][6].folder
    jobs = [
        Job(folder / "unlike", LONG | {MEMORY: "0.65"}, fault="less_on_rank_1"),
        Job(batch, {"training.steps": "8", BATCH: "auto", MEMORY: "4"}),
        Job(batch, {"training.steps": "9", BATCH: "auto", "training.gradient_accumulation_steps": "3"}),
    ]
    codes, outputs = run_ranks(jobs, world_size=2, timeout=300)
    return jobs, codes, outputs[0]


def test_the_rank_with_the_least_memory_decides(together):
    jobs, codes, output = together
    assert [each[0] for each in codes] == [exit_codes.OK] * 2, output[-3000:]
    assert resolved(jobs[0])["activation_checkpoint"]["mode"] == "full"
    assert "(0.06 on rank 1, 10% kept back)" in output


def test_more_ranks_keep_the_tokens_of_a_step(together):
    jobs, codes, output = together
    assert [each[1] for each in codes] == [exit_codes.OK] * 2, output[-3000:]
    assert resolved(jobs[1])["training"]["batch_size"] == 1
    assert {after - before for before, after in pairwise(jobs[1].series("tokens"))} == {128}


def test_tokens_that_do_not_divide_are_refused(together):
    _, codes, output = together
    assert [each[2] for each in codes] == [exit_codes.USER_ERROR] * 2
    assert "keeps the 128 tokens a step of the checkpoint of step 8, which do not divide by 2 data-parallel" in output


@pytest.mark.gpu
@pytest.mark.parametrize(("memory", "words"), [("40", "none"), ("14", "selective op"), ("9", "full")])
def test_a_gpu_takes_what_was_planned(tmp_path, memory, words):
    options = {
        "model.config": "configs/transformer_340M.json",
        "training.seq_len": "16384",
        "training.context_len": "4096",
        "training.steps": "3",
        "training.mixed_precision_param": "bfloat16",
        "checkpoint.enable_checkpoint": "false",
    }
    job = Job(tmp_path / "run", options | {MODE: "auto", MEMORY: memory})
    codes, outputs = run_ranks([job], world_size=1, timeout=500)
    assert codes == [[exit_codes.OK]], outputs[0][-3000:]
    chosen = re.search(r"activation_checkpoint\.mode = auto: ([a-z ]+); planned (.*) of ", outputs[0])
    assert chosen[1] == words
    planned = float(chosen[2].split()[-1])
    assert job.series("memory_gib")[-1] == pytest.approx(planned, rel=0.1)
