"""Plans of jobs, each in a world of its own; FLA's operators are put back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from flame.cli.parse import parse_args
from flame.dry_run.plan import JobPlan, plan_job
from flame.models.backend import uninstall
from flame.parallel.distributed import shutdown

JOB = ("--model.tokenizer_path", "configs/tokenizer", "--training.dataset", "builtin:stdlib", "--training.varlen")


@pytest.fixture
def plan() -> Iterator[Callable[..., JobPlan]]:
    """``plan(model, world_size, "--section.option=value", ...)``, with ``model`` the name of a file in configs."""

    def make(model: str, world_size: int, *options: str) -> JobPlan:
        shutdown()
        return plan_job(parse_args(["--model.config", f"configs/{model}.json", *JOB, *options]), world_size)

    yield make
    shutdown()
    uninstall()
