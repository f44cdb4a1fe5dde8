"""FSDP2 on one rank: what is sharded, and that a lone forward leaves the shards in place."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from flame.config import Comm, Optimizer
from flame.errors import UserError
from flame.parallel import fsdp
from flame.parallel.clip import clip_gradients
from flame.parallel.distributed import Distributed, init_distributed
from flame.parallel.fsdp import reshard, shard_model, units_of
from flame.training.optimizer import build_optimizer


def make_sharded(dist: Distributed, reshard_after_forward: str = "default") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)).to(dist.device)
    shard_model(
        model,
        [("1", model[1])],
        dist.fsdp_mesh,
        param_dtype="bfloat16",
        reduce_dtype="float32",
        reshard_after_forward=reshard_after_forward,
    )
    return model


def test_masters_stay_float32_and_compute_is_bfloat16(alone):
    model = make_sharded(alone)
    output = model(torch.ones(3, 4, device=alone.device))
    output.sum().backward()
    assert output.dtype == torch.bfloat16
    assert all(parameter.dtype == parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == 2


def test_a_lone_forward_leaves_gathered_parameters_until_reshard(alone):
    model = make_sharded(alone)
    with torch.no_grad():
        model(torch.ones(3, 4, device=alone.device))
    with pytest.raises(AssertionError, match="reshard"):
        build_optimizer(model, Optimizer(), ())
    reshard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    build_optimizer(model, Optimizer(), ())


def test_small_blocks_share_a_unit_and_large_ones_do_not():
    blocks = [nn.Linear(1, size, bias=False) for size in (3, 4, 3, 20, 1, 9)]
    sizes = [[len(block.weight) for block in unit] for unit in units_of(blocks, 10)]
    assert sizes == [[3, 4, 3], [20], [1, 9]]
    assert units_of(blocks, 0) == [[block] for block in blocks]


def test_sharing_units_changes_no_bit_of_the_gradients(alone, monkeypatch):
    def gradients(largest: int) -> list[torch.Tensor]:
        monkeypatch.setattr(fsdp, "LARGEST_UNIT", largest)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))).to(alone.device)
        blocks = [(str(number), model[number]) for number in range(1, 5)]
        dtypes = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
        shard_model(model, blocks, alone.fsdp_mesh, **dtypes, reshard_after_forward="default")
        for scale in (1.0, 2.0):  # accumulated
            model(scale * torch.ones(3, 8, device=alone.device)).square().sum().backward()
        return [parameter.grad.full_tensor() for parameter in model.parameters()]

    assert all(map(torch.equal, gradients(0), gradients(150)))


def test_every_block_of_a_unit_is_given_inputs_of_the_compute_dtype(alone, monkeypatch):
    """Also with torch 2.11, whose FSDP casts those of one block of a unit; here it casts none."""
    seen = []

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x, number, tables):
            seen.append((x.dtype, number.dtype, tables["cos"][0].dtype))
            return x.float()

    monkeypatch.setattr(fsdp, "fully_shard", lambda *args, **options: None)
    blocks = [(str(number), Block()) for number in range(3)]
    dtypes = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    shard_model(nn.Module(), blocks, alone.fsdp_mesh, **dtypes, reshard_after_forward="default")
    x = torch.ones(2)
    for _, block in blocks:
        x = block(x, torch.tensor(3), tables={"cos": [torch.ones(2)]})
    assert seen == [(torch.bfloat16, torch.int64, torch.bfloat16)] * 3


@pytest.mark.parametrize(("choice", "is_sharded"), [("default", False), ("never", False), ("always", True)])
def test_blocks_on_one_rank_are_resharded_only_when_asked(alone, choice, is_sharded):
    model = make_sharded(alone, choice)
    model(torch.ones(3, 4, device=alone.device))
    assert isinstance(model[1].weight, DTensor) == is_sharded


def test_clipping_gives_the_norm_before_it(alone):
    model = make_sharded(alone)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(parameter.numel() for parameter in model.parameters())
    norm = clip_gradients(model.parameters(), 1.0)
    assert norm.item() == pytest.approx(count**0.5)
    assert clip_gradients(model.parameters(), 1.0).item() == pytest.approx(1.0, abs=1e-4)


def test_collectives_and_plain_values(alone):
    assert alone.sum(torch.tensor(3)).item() == alone.max(torch.tensor(3)).item() == 3
    assert alone.gather({"a": 1}) == [{"a": 1}]
    assert alone.broadcast(7) == 7
    assert alone.is_main and alone.is_local_main
    alone.long_barrier()


def test_a_process_without_a_rank_is_told_how_to_start(tmp_path, monkeypatch):
    monkeypatch.delitem(os.environ, "RANK", raising=False)
    with pytest.raises(UserError, match=r"train\.sh"):
        init_distributed(Comm(), tmp_path)
