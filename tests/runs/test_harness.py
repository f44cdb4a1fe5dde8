"""Processes that were never connected are started again, once; whatever else goes wrong is a failure."""

from __future__ import annotations

import pytest

from tests.runs import harness
from tests.runs.harness import Job, run_ranks

WAITING = 'File "distributed_c10d.py", line 1 in _new_process_group_helper'


def play(monkeypatch, *groups: harness._Group) -> list[list[str]]:
    """Have these groups take the place of processes; returns the names of the jobs that each is given."""
    given: list[list[str]] = []
    left = iter(groups)

    def run_group(jobs, world_size, timeout):
        given.append([job.folder.name for job in jobs])
        return next(left)

    monkeypatch.setattr(harness, "_run_group", run_group)
    return given


def group(*codes: list[int], ends=(0, 0), output="", is_late=False) -> harness._Group:
    return harness._Group(list(codes), list(ends), [output, output], is_late)


@pytest.fixture
def jobs(tmp_path) -> list[Job]:
    return [Job(tmp_path / name) for name in "abc"]


def test_the_jobs_left_go_to_new_processes(monkeypatch, jobs):
    lost = group([0], [0], ends=(-6, -6), output=WAITING, is_late=True)
    given = play(monkeypatch, lost, group([2, 0], [2, 0]))
    with pytest.warns(UserWarning, match="b: gloo did not connect"):
        codes, outputs = run_ranks(jobs, 2)
    assert codes == [[0, 2, 0]] * 2
    assert given == [["a", "b", "c"], ["b", "c"]]
    assert outputs == [WAITING] * 2


@pytest.mark.parametrize(
    "end",
    [
        group([0], [0], ends=(-6, -6), output="in train_step", is_late=True),
        group([0], [0, 0], ends=(-6, -6), output=WAITING, is_late=True),
        group([0], [0], ends=(1, 1), output=WAITING),
    ],
)
def test_other_ends_are_failures(monkeypatch, jobs, end):
    play(monkeypatch, end)
    with pytest.raises(AssertionError, match="rank 1 ended with"):
        run_ranks(jobs, 2)


@pytest.mark.filterwarnings("ignore:b. gloo")
def test_a_second_time_is_a_failure(monkeypatch, jobs):
    lost = group([0], [0], ends=(-6, -6), output=WAITING, is_late=True)
    play(monkeypatch, lost, group([], [], ends=(-6, -6), output=WAITING, is_late=True))
    with pytest.raises(AssertionError, match="rank 0 ended with -6"):
        run_ranks(jobs, 2)
