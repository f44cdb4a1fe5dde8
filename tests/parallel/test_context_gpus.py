"""FLA's Triton operators over pieces of a row that two GPUs share, values and gradients, against one GPU.

As in ``test_context_pieces``, and in the precision that training has.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.parallel.pieces import distances, make_operators
from tests.parallel.ranks import name_of, run_cases
from tests.runs.faults import fault

pytestmark = pytest.mark.gpu
SIZE = 2
ROW = [0, 100, 700, 1024]
OPERATORS = make_operators(heads=2, keys=64, values=128, slots=64, width=256, ranks=SIZE)
EXACT = (
    "mamba",
    "convolution",
    "token_shift",
)  # float32 throughout; of those that look at few tokens little is missing
TOLERANCE = {name: 1e-4 if name in EXACT else 2e-2 for name in OPERATORS}


def run(name: str) -> dict[str, float]:
    dtype = torch.float32 if name in EXACT else torch.bfloat16
    return distances(OPERATORS[name], ROW, "triton", torch.device("cuda", torch.cuda.current_device()), dtype)


def matches_one_gpu(name: str) -> None:
    found = run(name)
    assert all(distance < TOLERANCE[name] for distance in found.values()), found


def misses_it_without_exchange(name: str) -> None:
    with fault("no_exchange"):
        found = torch.tensor(run(name)["output"])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    assert found > 5 * TOLERANCE[name], found


NAMES = [name for name in OPERATORS if "window" not in name]
CASES = [partial(case, name) for name in NAMES for case in (matches_one_gpu, misses_it_without_exchange)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request) -> dict[str, list[str]]:
    if torch.cuda.device_count() < SIZE:
        pytest.skip(f"needs {SIZE} GPUs")
    wanted = {item.callspec.params["case"] for item in request.session.items if item.path == Path(__file__)}
    cases = [case for case in CASES if name_of(case) in wanted]  # a kernel takes up to a minute to be found
    return run_cases(cases, tmp_path_factory.mktemp("gpus"), SIZE, "cuda")


@pytest.mark.parametrize("case", [name_of(case) for case in CASES])
def test_pieces_on_two_gpus(outcomes, case):
    assert outcomes[case] == ["passed"] * SIZE
