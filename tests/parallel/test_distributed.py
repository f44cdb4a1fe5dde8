"""What the ranks of a job agree on."""

from __future__ import annotations

import pytest

from flame.parallel.distributed import describe_faults


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (["no tokenizer", "no tokenizer"], "no tokenizer"),
        ([None, "no tokenizer"], "rank 1: no tokenizer"),
        (["heads", None, "norm", "heads"], "ranks 0, 3: heads\nrank 2: norm"),
        (["heads", "norm"], "rank 0: heads\nrank 1: norm"),
    ],
)
def test_reasons_come_once_with_their_ranks(faults, message):
    assert describe_faults(faults) == message
