"""What ranks do together, on two of them: differentiable collectives and clipping, against the same on one process.

Each case draws both ranks' inputs from one seed, so that every rank can compute what all of them should get.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flame.parallel.clip import clip_gradients, norm_of_shards
from flame.parallel.collectives import anchor, exchange, gather_stacked, sum_and_scatter
from tests.parallel.ranks import run_cases

SIZE = 2


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(collective: Callable[[Tensor, dist.ProcessGroup], Tensor], plain: Callable[[Tensor], Tensor], *shape: int):
    """Compare values and gradients with ``plain``, which maps all ranks' inputs [ranks, ...] to all their outputs."""
    rank = dist.get_rank()
    inputs = draw(SIZE, *shape).requires_grad_()
    expected = plain(inputs)
    weights = draw(*expected.shape, seed=1)
    (expected * weights).sum().backward()
    own = inputs.detach()[rank].clone().requires_grad_()
    # Not contiguous, as a transposed tensor in a model is.
    output = collective(own.mT.contiguous().mT, dist.group.WORLD)
    (output * weights[rank]).sum().backward()
    torch.testing.assert_close(output.detach(), expected.detach()[rank])
    torch.testing.assert_close(own.grad, inputs.grad[rank])


def gathers():
    check(gather_stacked, lambda inputs: inputs[None].expand(SIZE, *inputs.shape), 3, 4)


def sums_and_scatters():
    check(sum_and_scatter, lambda inputs: inputs.sum(0), SIZE, 3, 4)


def exchanges():
    check(exchange, lambda inputs: inputs.transpose(0, 1), SIZE, 3, 4)


def an_anchored_collective_runs_its_backward():
    """Only rank 0 uses what was gathered; without an anchor on rank 1 its backward would wait for ever."""
    own = draw(3).requires_grad_()
    gathered = gather_stacked(own, dist.group.WORLD)
    result = gathered[1] if dist.get_rank() == 0 else anchor(own * 2, gathered)
    result.sum().backward()
    torch.testing.assert_close(own.grad, torch.full((3,), 0.0 if dist.get_rank() == 0 else 3.0, dtype=torch.float64))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))


def whole_norm(model: nn.Module) -> Tensor:
    return nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])


def clips_over_stages():
    """Each rank has one layer, and rank 1 a copy of the first's bias besides, which counts once."""
    rank, whole = dist.get_rank(), make_model()
    whole(torch.ones(3, 4)).sum().backward()
    norm = whole_norm(whole)
    own, copy = list(whole[rank].parameters()), []
    if rank == 1:
        copy = [nn.Parameter(whole[0].bias.detach().clone())]
        copy[0].grad = whole[0].bias.grad.clone()
    clipped = [parameter.grad / (2 * norm) for parameter in (*own, *copy)]
    found = clip_gradients([*own, *copy], 0.5, stages=dist.group.WORLD, copies=copy)
    torch.testing.assert_close(found, norm)
    for parameter, expected in zip((*own, *copy), clipped, strict=True):
        torch.testing.assert_close(parameter.grad, expected, atol=1e-6, rtol=1e-4)


def clips_shards():
    whole, sharded = make_model(), make_model()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (SIZE,)))
    for model in (whole, sharded):
        model(torch.ones(3, 4)).sum().backward()
    found = clip_gradients(list(sharded.parameters()), float("inf"))
    torch.testing.assert_close(found, whole_norm(whole))
    torch.testing.assert_close(norm_of_shards(each.grad for each in sharded.parameters()), whole_norm(whole))


CASES = [
    gathers,
    sums_and_scatters,
    exchanges,
    an_anchored_collective_runs_its_backward,
    clips_over_stages,
    clips_shards,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, list[str]]:
    return run_cases(CASES, tmp_path_factory.mktemp("two_ranks"))


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_two_ranks(outcomes, case):
    assert outcomes[case] == ["passed"] * SIZE
