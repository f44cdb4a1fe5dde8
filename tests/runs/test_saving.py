"""Whole runs on two ranks that save in other ways: in the background, by the clock, on a disk that is full at times."""

from __future__ import annotations

import pytest

from flame.checkpoint.folders import list_steps
from tests.runs.harness import Job, run_ranks

SAVING = {"checkpoint.interval": "2", "checkpoint.keep_latest_k": "3"}
SPIKES = SAVING | {"training.skip_loss_spike": "6", "training.loss_spike_window": "8"}
MODES = ("disabled", "async", "async_with_pinned_mem")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The runs by name, and what rank 0 printed."""
    folder = tmp_path_factory.mktemp("saving")
    jobs = [Job(folder / mode, SAVING | {"checkpoint.async_mode": mode}) for mode in MODES]
    # Goes on from step 8, which was saved in the background; steps 9 and 10 are trained again.
    again = SAVING | {"checkpoint.load_step": "8", "checkpoint.async_mode": "async"}
    jobs.append(Job(folder / "async", again | {"training.steps": "12"}))
    seconds = {"checkpoint.interval_type": "seconds", "checkpoint.interval": "1", "checkpoint.keep_latest_k": "0"}
    jobs.append(Job(folder / "seconds", seconds | {"training.steps": "60", "checkpoint.async_mode": "async"}))
    jobs.append(Job(folder / "full", SAVING, fault="full_disk_at_step_4"))
    jobs.append(Job(folder / "full_async", SAVING | {"checkpoint.async_mode": "async"}, fault="full_disk_at_step_4"))
    jobs += [
        Job(folder / name, SPIKES | {"training.steps": steps}, fault="jump_at_step_12")
        for name, steps in (("spikes", "14"), ("spikes_resumed", "11"), ("spikes_resumed", "14"))
    ]
    weights = {"checkpoint.last_save_model_weights_only": "true", "checkpoint.export_dtype": "bfloat16"}
    jobs += [
        Job(folder / "weights", SAVING | options)
        for options in (weights | {"training.steps": "4"}, {"training.steps": "6"})
    ]
    codes, outputs = run_ranks(jobs, world_size=2)
    assert codes == [[0] * len(jobs)] * 2, outputs[0][-3000:]
    return {job.folder.name: job for job in jobs}, outputs[0]


def steps(job: Job) -> list[int]:
    listing = list_steps(job.folder / "checkpoint")
    assert not listing.broken
    return sorted(listing.complete)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "disabled"])
def test_the_mode_changes_no_number(saved, mode):
    jobs, _ = saved
    assert jobs[mode].series("loss")[:10] == jobs["disabled"].series("loss")


def test_a_run_goes_on_from_a_checkpoint_that_was_written_in_the_background(saved):
    jobs, _ = saved
    assert jobs["async"].series("step") == list(range(1, 13))
    assert steps(jobs["async"]) == [8, 10, 12]
    assert steps(jobs["async_with_pinned_mem"]) == [6, 8, 10]
    assert not list((jobs["async_with_pinned_mem"].folder / "checkpoint").glob(".*"))


def test_a_run_goes_on_from_weights_alone(saved):
    jobs, output = saved
    job = jobs["weights"]
    manifest = list_steps(job.folder / "checkpoint").complete[4]
    assert manifest.dtype == "bfloat16" and "optimizer" not in manifest.contents
    assert job.series("step") == [1, 2, 3, 4, 5, 6]
    assert job.series("tokens") == jobs["disabled"].series("tokens")[:6]
    assert job.series("loss")[:4] == jobs["disabled"].series("loss")[:4]
    assert job.series("loss")[4] == pytest.approx(jobs["disabled"].series("loss")[4], abs=0.01)  # rounded weights
    assert "the optimizer starts fresh" in output


def test_all_ranks_save_by_the_clock_of_one(saved):
    jobs, _ = saved
    assert len(steps(jobs["seconds"])) > 1
    assert steps(jobs["seconds"])[-1] == 60


@pytest.mark.parametrize("name", ["full", "full_async"])
def test_a_full_disk_costs_one_checkpoint(saved, name):
    jobs, output = saved
    assert steps(jobs[name]) == [6, 8, 10]
    assert jobs[name].series("loss") == jobs["disabled"].series("loss")
    assert output.count("checkpoint of step 4 was not saved") == 2
    assert "No space left on device. Training goes on" in output
    assert "the last checkpoint is step 2" in output


def test_steps_whose_loss_jumps_are_left_out_and_named(saved):
    jobs, output = saved
    assert jobs["spikes"].series("skipped_steps") == [0] * 11 + [1] * 3
    assert jobs["spikes"].series("loss")[:10] == jobs["disabled"].series("loss")
    assert "step 12 left out: loss" in output
    assert "the sequences 22 to 23: python -m flame.utils.inspect_data" in output


def test_a_resumed_run_knows_the_losses_before(saved):
    jobs, _ = saved
    for key in ("loss", "skipped_steps"):
        assert jobs["spikes_resumed"].series(key) == jobs["spikes"].series(key)
