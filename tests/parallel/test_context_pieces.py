"""Reference operators over pieces of a row that three ranks share, values and gradients, against the whole row.

Then nothing is exchanged, which the comparison must see.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.parallel.pieces import distances, make_operators, normal
from tests.parallel.ranks import name_of, run_cases
from tests.runs.faults import fault

SIZE = 3
ROWS = {
    "over_three": [0, 7, 47, 51, 60],
    "from_a_border": [0, 20, 45, 60],
    "whole_row": [0, 60],
}
OPERATORS = make_operators(heads=2, keys=4, values=6, slots=3, width=5, ranks=SIZE)
del OPERATORS["gated_delta_product"]  # the reference backend has none
# As wide as a piece is long, the widest that is not refused.
OPERATORS["widest_convolution"] = replace(OPERATORS["convolution"], shared={"weight": (normal, 5, 20)})


def run(name: str, row: str) -> dict[str, float]:
    without_targets = 2 if row == "from_a_border" else None
    return distances(OPERATORS[name], ROWS[row], "reference", torch.device("cpu"), torch.float64, without_targets)


def matches_one_process(name: str, row: str) -> None:
    found = run(name, row)
    assert all(distance < 1e-9 for distance in found.values()), found


def misses_it_without_exchange(name: str) -> None:
    with fault("no_exchange"):
        found = torch.tensor(run(name, "over_three")["output"])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    assert found > 1e-3, found


ALIKE = [partial(matches_one_process, name, row) for name in OPERATORS for row in ROWS]
# A window of one token looks at no other.
BROKEN = [partial(misses_it_without_exchange, name) for name in OPERATORS if name != "softmax_window_of_one"]
CASES = [case for name in OPERATORS for case in ALIKE + BROKEN if case.args[0] == name]  # each backend is set up once


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, list[str]]:
    return run_cases(CASES, tmp_path_factory.mktemp("pieces"), SIZE)


@pytest.mark.parametrize("case", [name_of(case) for case in ALIKE])
def test_pieces_are_those_of_the_whole_row(outcomes, case):
    assert outcomes[case] == ["passed"] * SIZE


@pytest.mark.parametrize("case", [name_of(case) for case in BROKEN])
def test_pieces_without_exchange_are_not(outcomes, case):
    assert outcomes[case] == ["passed"] * SIZE
