import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from flame.checkpoint.manager import CheckpointManager
from flame.checkpoint.names import (
    check_exclusions,
    clean_fqn,
    create_optimizer_state,
    is_excluded,
    model_tensors,
    optimizer_tensors,
    tied_names,
)
from flame.errors import UserError

from .tiny import assert_equal, make_model, train


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("layers.0.mlp.weight", "layers.0.mlp.weight"),
        ("layers.0._orig_mod.mlp.weight", "layers.0.mlp.weight"),
        ("_orig_mod.layers.0._checkpoint_wrapped_module.mlp", "layers.0.mlp"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
    ],
)
def test_clean_fqn(name, clean):
    assert clean_fqn(name) == clean


def test_compile_names(tmp_path):
    """Saved with compile and activation checkpointing on, loaded with both off: the same names."""
    wrapped, plain = make_model(seed=0), make_model(seed=1)
    wrapped.block[0] = torch.compile(wrapped.block[0])
    wrapped.block[1] = checkpoint_wrapper(torch.compile(wrapped.block[1]))
    optimizer = torch.optim.AdamW(wrapped.parameters())
    train(wrapped, optimizer)
    saved = model_tensors(wrapped) | optimizer_tensors(wrapped, optimizer)
    assert not [name for name in saved if "_orig_mod" in name or "_checkpoint_wrapped_module" in name]

    other = torch.optim.AdamW(plain.parameters())
    create_optimizer_state(other)
    loaded = model_tensors(plain) | optimizer_tensors(plain, other)
    manager = CheckpointManager(tmp_path)
    manager.save(1, saved, {})
    manager.load(1, loaded)
    assert_equal(saved, loaded)


def test_tied_parameters_appear_once():
    model = make_model()
    model.head.weight = model.embeddings.weight
    assert [name for name in model_tensors(model) if "weight" in name and "block" not in name] == [
        "model.embeddings.weight"
    ]
    assert tied_names(model) == {"model.head.weight": "model.embeddings.weight"}


def test_non_persistent_buffers_are_left_out():
    model = nn.Module()
    model.register_buffer("table", torch.zeros(2), persistent=False)
    model.register_buffer("counts", torch.zeros(2))
    assert list(model_tensors(model)) == ["model.counts"]


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)])
def test_create_optimizer_state_moves_no_parameter(make):
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model_tensors(model).items()}
    optimizer = make(model.parameters())
    rate = optimizer.param_groups[0]["lr"]
    create_optimizer_state(optimizer)
    assert_equal(before, model_tensors(model))
    assert optimizer.param_groups[0]["lr"] == rate
    state = optimizer_tensors(model, optimizer)
    assert len(state) >= len(before)
    assert not any(tensor.any() for tensor in state.values())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1)])
def test_a_created_state_trains_like_none(make):
    fresh, created = make_model(), make_model()
    optimizer, other = make(fresh.parameters()), make(created.parameters())
    create_optimizer_state(other)
    train(fresh, optimizer)
    train(created, other)
    assert_equal(model_tensors(fresh), model_tensors(created))


@pytest.mark.parametrize(
    ("key", "entry", "excluded"),
    [
        ("optimizer.head.weight.exp_avg", "optimizer", True),
        ("model.head.weight", "optimizer", False),
        ("model.head.weight", "head", True),
        ("model.head.weight", "head.weight", True),
        ("model.headset.weight", "head", False),
        ("model.head.weight", "model.head", True),
        ("model.layers.0.A_log", "*.A_log", True),
        ("optimizer.layers.0.A_log.exp_avg", "*.A_log", True),
        ("optimizer.head.weight.step", "head", True),
    ],
)
def test_is_excluded(key, entry, excluded):
    assert is_excluded(key, [entry]) is excluded


def test_exclusion_that_matches_nothing_is_refused():
    check_exclusions(["lr_scheduler", "optimizer", "head"], ["model.head.weight"])
    with pytest.raises(UserError, match=r"'lm_haed' matches no tensor"):
        check_exclusions(["lm_haed"], ["model.lm_head.weight"])
