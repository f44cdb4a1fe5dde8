"""A rank that does not come: the others do not wait for ever, and what each was doing is written down."""

from __future__ import annotations

import pytest

from tests.runs.harness import Job, run_ranks


def test_a_hang_becomes_a_stack_of_every_rank(tmp_path):
    job = Job(tmp_path / "run", {"comm.train_timeout_seconds": "6"}, fault="stuck_at_step_3")
    with pytest.raises(AssertionError, match="a rank did not come to a collective within"):
        run_ranks([job], world_size=2, timeout=120)
    waiting, stuck = ((job.folder / "logs" / f"stacks_rank{rank}.txt").read_text() for rank in (0, 1))
    assert "all_reduce" in waiting and "stuck_at_step_3" not in waiting
    assert "stuck_at_step_3" in stuck
    assert job.series("step") == [1, 2]
