"""Parameters and activations in the host's memory: the same numbers, and what goes where."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from flame.cli.parse import parse_args
from flame.config import ActivationCheckpoint, Optimizer
from flame.dry_run.allocations import Allocations
from flame.errors import UserError
from flame.parallel.clip import clip_gradients
from flame.parallel.degrees import Degrees
from flame.parallel.fsdp import shard_model
from flame.parallel.offload import give_memory, offload_activations, offloads_parameters
from flame.parallel.recompute import recompute_blocks
from flame.training.optimizer import build_optimizer, step_unless

CPU, META = torch.device("cpu"), torch.device("meta")


class Model(nn.Module):
    """Blocks with a buffer, between layers that are tied."""

    def __init__(self, width: int = 512):
        super().__init__()
        self.embedding = nn.Linear(width, width, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(3))
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def blocks(self) -> list[tuple[str, nn.Module]]:
        return [(f"layers.{number}", layer) for number, layer in enumerate(self.layers)]


def make_model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def offload_config(*options: str):
    return parse_args(["--training.enable_cpu_offload", *options], check=False)


def test_a_cpu_has_everything_in_the_hosts_memory_already():
    assert not offloads_parameters(offload_config(), CPU, Degrees())
    assert offloads_parameters(offload_config(), torch.device("cuda"), Degrees())
    assert not offloads_parameters(parse_args([], check=False), torch.device("cuda"), Degrees())
    with pytest.raises(UserError, match="on a CPU"):
        offload_activations(make_model().blocks(), CPU)


def test_a_pipeline_is_refused():
    with pytest.raises(UserError, match="pipeline_parallel_degree = 2"):
        offloads_parameters(offload_config(), torch.device("cuda"), Degrees(pipeline=2))


@pytest.mark.parametrize("mode", ["none", "full"])
def test_activations_leave_the_device_and_come_back(mode):
    """On the meta device, which stands for a GPU: what stays is less, and the backward has the shapes that it needs."""
    saved = {}
    for offloads in (False, True):
        model = Model().to(META)
        recompute_blocks(model.blocks(), ActivationCheckpoint(mode=mode))
        if offloads:
            offload_activations(model.blocks(), META)
        with Allocations() as allocations:
            output = model(torch.empty(1024, 512, device=META))
            saved[offloads] = allocations.live
            output.sum().backward()
        assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())
    assert saved[True] < saved[False]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["none", "full", "compiled"])
def test_offloaded_activations_change_no_gradient(mode):
    expected, model = make_model().cuda(), make_model().cuda()
    if mode == "compiled":
        for _, block in model.blocks():
            block.forward = torch.compile(block.forward)
    else:
        recompute_blocks(model.blocks(), ActivationCheckpoint(mode=mode))
    offload_activations(model.blocks(), torch.device("cuda"))
    x = torch.randn(4096, 512, device="cuda")
    before = torch.cuda.memory_allocated()
    kept = model(x)
    taken = torch.cuda.memory_allocated() - before
    kept.square().sum().backward()
    before = torch.cuda.memory_allocated()
    plain = expected(x)
    assert taken < torch.cuda.memory_allocated() - before
    plain.square().sum().backward()
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, atol=1e-2, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_offloaded_parameters_train_as_others_do(alone, implementation):
    device, results = alone.device, {}
    state = copy.deepcopy(make_model().state_dict())
    for offload in (False, True):
        with META:
            model = Model()
        model.head.weight = model.embedding.weight
        options = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "reshard_after_forward": "default"}
        shard_model(model, model.blocks(), alone.fsdp_mesh, **options, offload=offload)
        give_memory(model, device, CPU if offload else device)
        model.head.weight = model.embedding.weight
        for name, tensor in model.state_dict(keep_vars=True).items():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            local.detach().copy_(state[name])
        optimizer = build_optimizer(model, Optimizer(implementation=implementation), ())
        torch.manual_seed(1)
        for _ in range(3):
            x = torch.randn(64, 512, device=device)
            model(x).square().sum().backward()
            norm = clip_gradients(model.parameters(), 1.0)
            assert norm.device.type == "cuda"
            step_unless(optimizer, (~torch.isfinite(norm)).float())
            optimizer.zero_grad(set_to_none=True)
        where = {parameter.device.type for parameter in model.parameters()}
        where |= {value.device.type for slots in optimizer.state.values() for value in slots.values() if value.ndim}
        assert where == {"cpu" if offload else "cuda"}
        assert model.scale.device.type == "cuda"
        results[offload] = [parameter.to_local().detach().cpu() for parameter in model.parameters()]
    for own, other in zip(results[True], results[False], strict=True):
        torch.testing.assert_close(own, other, atol=1e-6, rtol=1e-5)
