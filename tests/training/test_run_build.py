"""What the ranks of a run must have in common before it starts."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from flame.config import JobConfig
from flame.errors import UserError
from flame.training import build


def read(monkeypatch, num_steps: int, of_others: list[int]) -> list:
    """What a rank whose held-out data are so many steps goes on with."""
    monkeypatch.setattr(build, "build_held_out", lambda *_args: [[] for _ in range(num_steps)])
    monkeypatch.setattr(build, "local_leader_first", lambda *_args: nullcontext())
    dist = SimpleNamespace(
        is_local_main=True,
        long_barrier=None,
        data_rank=0,
        data_size=1,
        together=lambda action: action(),
        gather=lambda value: [value, *of_others],
    )
    config = JobConfig()
    config.validation.dataset = ["held.jsonl"]
    return build.read_held_out(config, None, dist)


def test_ranks_validate_on_as_many_steps(monkeypatch):
    assert len(read(monkeypatch, 3, [3, 3])) == 3


@pytest.mark.parametrize("num_steps", [2, 5])
def test_ranks_that_read_other_held_out_data_are_refused(monkeypatch, num_steps):
    with pytest.raises(UserError, match=r"--validation.dataset held.jsonl: .* 2 to 5 steps"):
        read(monkeypatch, num_steps, [2, 5])
