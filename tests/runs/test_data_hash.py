"""What ``inspect_data --hash`` prints is what a run trains on."""

from __future__ import annotations

import pytest

from flame.utils.inspect_data import main as inspect_data
from flame.utils.preprocess import main as preprocess
from tests.runs.harness import Job, run_jobs

# name -> what the run sets; it runs on two ranks, with two micro-batches a step.
CASES = {
    "varlen": {},
    "plain": {"training.varlen": "false", "training.context_len": "64"},
    "workers": {"training.num_workers": "2"},
    "tokenized": {},  # trains on what preprocess wrote, and is compared with the text
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[str, Job]:
    folder = tmp_path_factory.mktemp("data_hash")
    tokenized = str(folder / "tokenized_rows")
    arguments = ["--dataset", "builtin:stdlib", "--tokenizer", "configs/tokenizer", "--path", tokenized, "--quiet"]
    assert preprocess([*arguments, "--num_workers", "2"]) == 0
    common = {
        "training.steps": "6",
        "training.log_data_hash": "true",
        "training.batch_size": "2",
        "training.gradient_accumulation_steps": "2",
        "checkpoint.interval": "4",
    }
    jobs = {name: Job(folder / name, common | options) for name, options in CASES.items()}
    jobs["tokenized"].options["training.dataset"] = tokenized
    assert run_jobs(list(jobs.values()), world_size=2) == [0] * len(jobs)
    return jobs


def inspect(capsys, job: Job, *arguments: str) -> list[str]:
    """The hashes of a finished run's data, by its own resolved job file."""
    assert inspect_data(["--job.config_file", str(job.folder / "config.toml"), "--hash", *arguments]) == 0
    return capsys.readouterr().out.split()


@pytest.mark.parametrize("name", CASES)
def test_hashes_are_those_of_the_run(jobs, name, capsys):
    job = jobs[name]
    expected = job.series("data_hash")
    assert len(set(expected)) == 6
    assert inspect(capsys, job, "--steps=6", "--dp_degree=2") == expected
    another_layout = ("--dp_degree=1", "--training.batch_size=8", "--training.gradient_accumulation_steps=1")
    assert inspect(capsys, job, "--steps=6", *another_layout, "--training.num_workers=1") == expected


def test_tokenized_rows_give_the_batches_of_their_text(jobs):
    assert jobs["tokenized"].series("data_hash") == jobs["varlen"].series("data_hash")


@pytest.mark.parametrize("name", CASES)
def test_inspection_goes_on_from_a_checkpoint(jobs, name, capsys):
    job = jobs[name]
    assert inspect(capsys, job, "--steps=2", "--load_step=4", "--dp_degree=2") == job.series("data_hash")[4:]
    from_there = ("--load_step=4", "--dp_degree=1", "--training.batch_size=4", "--training.num_workers=1")
    assert inspect(capsys, job, "--steps=2", *from_there) == job.series("data_hash")[4:]


def test_a_checkpoint_of_other_data_is_refused(jobs, capsys):
    job_file = str(jobs["varlen"].folder / "config.toml")
    assert inspect_data(["--job.config_file", job_file, "--load_step=4", "--training.seed=1"]) == 2
    assert "seed" in capsys.readouterr().err
