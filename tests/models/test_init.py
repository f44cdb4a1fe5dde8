"""flame.models.init: every tensor of every family is set, as the plain build sets it, in any layout."""

from __future__ import annotations

import functools
import logging
import math
import re

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from flame.errors import UserError
from flame.fqn import clean_fqn
from flame.models.blocks import find_blocks
from flame.models.init import (
    EagerRecipe,
    TapeRecipe,
    build_recipe,
    init_weights,
    named_tensors,
    tied_groups,
)
from flame.models.recorder import Constant, recording
from tests.models.families import FAMILIES, build_eagerly, tiny_config


def poison(model: nn.Module) -> None:
    """Fill the memory that ``to_empty`` left as it was with values that no initialisation gives."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.detach().fill_(float("nan") if tensor.is_floating_point() else 77)


def initialised(build, seed: int = 0) -> nn.Module:
    """Build on meta, materialise, poison, initialise."""
    model, recipe = build_recipe(build)
    tied = tied_groups(model)
    assert all(tensor.is_meta for _, tensor in named_tensors(model))
    model.to_empty(device="cpu")
    poison(model)
    init_weights(model, recipe, seed, tied)
    return model


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in named_tensors(model)}


@pytest.fixture
def filled_memory():
    """Memory from ``torch.empty`` is NaN for the time of a test, so that nothing unset goes unseen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("family", FAMILIES)
def test_poison_init(family, filled_memory):
    build = functools.partial(build_eagerly, tiny_config(family))
    got = tensors_of(initialised(build))
    torch.manual_seed(0)
    eager = tensors_of(build())

    assert got.keys() == eager.keys()
    for name, tensor in got.items():
        assert (tensor.shape, tensor.dtype) == (eager[name].shape, eager[name].dtype), name
        assert torch.isfinite(tensor).all(), f"{family}: {name} is left unset"
        if not tensor.is_floating_point():
            assert torch.equal(tensor, eager[name]), name


def test_no_registered_class_is_left_out():
    """Of the causal language models that FLA registers with transformers, these tests know every one."""
    registered = {cls.__name__ for cls in MODEL_FOR_CAUSAL_LM_MAPPING.values() if cls.__module__.startswith("fla.")}
    assert registered == {f"{family}ForCausalLM" for family in FAMILIES}
    assert len(registered) >= 40


def build_sba() -> nn.Module:
    """The custom model that ships, small."""
    import custom_models.sba  # noqa: F401 - registers it

    config = CONFIG_MAPPING["sba"](hidden_size=64, num_hidden_layers=2, num_heads=4, vocab_size=128)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def test_poison_init_of_a_custom_model(filled_memory):
    got, eager = tensors_of(initialised(build_sba)), tensors_of(build_sba())
    assert got.keys() == eager.keys()
    assert all(torch.isfinite(tensor).all() for tensor in got.values())


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "pad_token_id": 0}
TRANSFORMERS = {
    "llama": SMALL | {"intermediate_size": 48},
    "qwen3": SMALL | {"intermediate_size": 48, "head_dim": 8},
    "mixtral": SMALL | {"intermediate_size": 48, "num_local_experts": 4, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
    "falcon_mamba": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "pad_token_id": 0, "state_size": 4},
    "qwen3_next": SMALL
    | {
        "intermediate_size": 48,
        "head_dim": 8,
        "num_key_value_heads": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "gemma2": SMALL | {"intermediate_size": 48, "head_dim": 8, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("model_type", TRANSFORMERS)
def test_poison_init_of_transformers_models(model_type, filled_memory):
    config = CONFIG_MAPPING[model_type](**TRANSFORMERS[model_type])
    build = functools.partial(AutoModelForCausalLM.from_config, config, dtype=torch.float32)
    got, eager = tensors_of(initialised(build)), tensors_of(build())
    assert got.keys() == eager.keys()
    assert all(torch.isfinite(tensor).all() for tensor in got.values())
    constant = [name for name in eager if name in dict(build().named_buffers()) or eager[name].std() == 0]
    assert all(torch.equal(got[name], eager[name]) for name in constant)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_build_is_the_eager_build(family, filled_memory):
    """Replaying the whole recording in order, with one seed, gives the plain build's weights bit for bit."""
    config = tiny_config(family)
    with recording() as recorder:
        model = build_eagerly(config)
    targets = {name: recorder.name(tensor) for name, tensor in named_tensors(model)}
    torch.manual_seed(5)
    replayed = recorder.tape.replay(range(len(recorder.tape.events)), torch.device("cpu"))
    torch.manual_seed(5)
    eager = tensors_of(build_eagerly(config))

    assert targets.keys() == eager.keys()
    for name, target in targets.items():
        value = target.value if isinstance(target, Constant) else replayed.tensor(target)
        assert torch.equal(value, eager[name]), name


def pooled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Values of tensors that differ by the numbers in their names only, sorted and joined: [n]."""
    pools: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            pools.setdefault(re.sub(r"\d+", "*", name), []).append(tensor.flatten())
    return {name: torch.cat(values).sort().values for name, values in pools.items()}


def largest_gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """Kolmogorov–Smirnov distance of two sorted samples of the same size: the largest gap between their shares."""
    values = torch.cat([one, other]).unique()
    shares = [torch.searchsorted(sample, values, right=True) / len(sample) for sample in (one, other)]
    return (shares[0] - shares[1]).abs().max().item()


@pytest.mark.parametrize("family", [*FAMILIES, "sba"])
def test_same_distribution_as_an_eager_build(family):
    """Constants are equal; random values pass a Kolmogorov–Smirnov test that a right one fails once in 30,000 times."""
    build = build_sba if family == "sba" else functools.partial(build_eagerly, tiny_config(family))
    torch.manual_seed(0)
    got, eager = pooled(tensors_of(initialised(build))), pooled(tensors_of(build()))
    for name in got:
        size = len(got[name])
        assert largest_gap(got[name], eager[name]) <= 2.4 * math.sqrt(2 / size), name
        if eager[name][0] == eager[name][-1]:
            assert torch.equal(got[name], eager[name]), name


def test_seed_decides():
    build = functools.partial(build_eagerly, tiny_config("GatedDeltaNet"))
    first, again, other = (tensors_of(initialised(build, seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    random = [name for name in first if "norm" not in name]
    assert not any(torch.equal(first[name], other[name]) for name in random)
    layers = [name for name in random if name.startswith("model.layers.0")]
    assert not any(torch.equal(first[name], first[name.replace(".0.", ".1.", 1)]) for name in layers)


def test_global_generator_is_left_alone():
    build = functools.partial(build_eagerly, tiny_config("GLA"))
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    initialised(build)
    assert torch.equal(torch.rand(1), expected)


def test_a_name_keeps_its_weights_when_the_model_grows():
    """More layers or rows of the vocabulary do not move the draws of the others."""
    small = tensors_of(initialised(functools.partial(build_eagerly, tiny_config("GLA"))))
    large = tensors_of(initialised(functools.partial(build_eagerly, tiny_config("GLA", num_hidden_layers=3))))
    assert all(torch.equal(small[name], large[name]) for name in small)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["GatedDeltaNet", "Transformer", "RWKV7"])
def test_on_a_gpu(family):
    build = functools.partial(build_eagerly, tiny_config(family))
    cpu = tensors_of(initialised(build))
    model, recipe = build_recipe(build)
    model.to_empty(device="cuda")
    poison(model)
    state = torch.cuda.get_rng_state()
    init_weights(model, recipe, seed=0)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    for name, tensor in tensors_of(model).items():
        assert tensor.is_cuda
        assert torch.isfinite(tensor).all(), name
        if cpu[name].numel() >= 4096:
            assert tensor.std().item() == pytest.approx(cpu[name].std().item(), rel=0.1, abs=1e-6), name


def test_tied_weights_stay_tied():
    build = functools.partial(build_eagerly, tiny_config("Transformer", tie_word_embeddings=True))
    model = initialised(build)
    assert model.lm_head.weight is model.model.embeddings.weight


def test_wrapped_names():
    assert clean_fqn("model._orig_mod.layers.0._checkpoint_wrapped_module.w") == "model.layers.0.w"


class Unusual(nn.Module):
    """Everything that a constructor may do besides filling parameters."""

    def __init__(self):
        super().__init__()
        draw = torch.rand(8)
        self.first = nn.Parameter(draw.log())
        self.second = nn.Parameter(draw.clone())  # shares its draw with the first
        self.ramp = nn.Parameter(torch.zeros(8))
        for i in range(8):
            self.ramp.data[i] = i**2
        self.blocks = nn.Parameter(torch.empty(4, 4))
        with torch.no_grad():
            self.blocks[:2].fill_(1.0)
            self.blocks[2:].normal_()
        self.ramp_drawn_later = nn.Parameter(torch.zeros(8))
        nn.init.normal_(self.ramp_drawn_later[4:])
        self.replaced = nn.Parameter(torch.empty(8))
        self.replaced.data = torch.linspace(0, 1, torch.tensor(8).item())
        self.plain = torch.arange(3) * 2
        self.register_buffer("table", torch.tensor([1, 2, 3]), persistent=False)


def test_unusual_constructors():
    model = initialised(Unusual)
    assert torch.allclose(model.first.exp(), model.second)
    assert model.ramp.tolist() == [i**2 for i in range(8)]
    assert (model.blocks[:2] == 1).all()
    assert model.blocks[2:].std() > 0
    assert (model.ramp_drawn_later[:4] == 0).all()
    assert (model.ramp_drawn_later[4:] != 0).all()
    assert torch.equal(model.replaced, torch.linspace(0, 1, 8))
    assert model.plain.tolist() == [0, 2, 4]
    assert model.table.tolist() == [1, 2, 3]


class ReadsItsDraws(nn.Module):
    """Cannot be recorded: control flow that depends on a random value."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), torch.rand(1).item()))


def test_what_cannot_be_recorded_is_built_in_full(caplog):
    with caplog.at_level(logging.WARNING):
        model, recipe = build_recipe(ReadsItsDraws)
    assert isinstance(recipe, EagerRecipe)
    assert "reads the value of a random tensor" in caplog.text
    model.to_empty(device="cpu")
    poison(model)
    init_weights(model, recipe, seed=4)
    torch.manual_seed(4)
    assert torch.equal(model.weight, ReadsItsDraws().weight)


class HidesTensors(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.hidden = [torch.ones(2)]


def test_tensors_in_a_list_are_refused():
    with pytest.raises(UserError, match=r"HidesTensors\.hidden"):
        build_recipe(HidesTensors)


# Families that start in different ways: rescaled layers, ramps, lists of projections, two kinds of mixers.
ACROSS_RANKS = {
    **{family: tiny_config(family) for family in ("Mamba2", "RWKV7", "Mom", "Samba")},
    # Sizes that ranks do not divide.
    "GatedDeltaNet": tiny_config("GatedDeltaNet", num_heads=3, head_dim=11, vocab_size=101, tie_word_embeddings=True),
}
LAYOUTS = ("shard over 4", "replicate 2, shard 2", "shard the last dimension over 4")


def _shard_in_layout(model: nn.Module, layout: str) -> None:
    if layout.startswith("replicate"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (4,))

    def place(parameter: nn.Parameter) -> Shard | None:
        even = parameter.shape[-1] % 4 == 0  # FSDP cuts other dimensions than the first into equal parts only
        return Shard(parameter.ndim - 1) if "last" in layout and even else None

    for _, block in find_blocks(model):
        fully_shard(block, mesh=mesh, shard_placement_fn=place)
    fully_shard(model, mesh=mesh, shard_placement_fn=place)


def _compare_layouts(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    wrong = []
    for family, config in ACROSS_RANKS.items():
        build = functools.partial(build_eagerly, config)
        single = {name: parameter.detach() for name, parameter in initialised(build, seed=7).named_parameters()}
        for layout in LAYOUTS:
            model, recipe = build_recipe(build)
            assert isinstance(recipe, TapeRecipe)
            tied = tied_groups(model)
            _shard_in_layout(model, layout)
            model.to_empty(device="cpu")
            for parameter in model.parameters():
                parameter.to_local().detach().fill_(float("nan"))
            init_weights(model, recipe, seed=7, tied=tied)
            assert tied_groups(model) == tied
            for name, parameter in model.named_parameters():
                if not torch.equal(parameter.full_tensor(), single[name]):
                    wrong.append(f"{family}, {layout}: {name}")
    if rank == 0:
        torch.save(wrong, f"{folder}/wrong.pt")
    dist.destroy_process_group()


def test_four_ranks_start_as_one_in_every_layout(tmp_path):
    mp.spawn(_compare_layouts, args=(str(tmp_path),), nprocs=4)
    assert torch.load(tmp_path / "wrong.pt") == []
