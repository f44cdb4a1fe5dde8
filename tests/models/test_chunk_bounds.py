"""Chunks of documents counted on the host are those that FLA counts on the device."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from flame.host_copy import host_copy, send, send_and_remember
from flame.models import chunk_bounds
from flame.models.backend import import_fla, setup_backend, uninstall
from flame.models.build import build_model
from flame.models.chunk_bounds import REPLACED
from flame.models.init import init_weights
from flame.models.loss import attach_training_forward
from flame.models.model_config import load_model_config

BOUNDS = ([0, 5], [0, 64], [0, 1, 65, 129, 300], [0, 63, 64, 192, 193, 4096], list(range(40)))


def pair(name):
    """FLA's function, and the stand-in for it, which must not call FLA's."""
    import_fla()
    module, name, maker = next(each for each in REPLACED if each[1] == name)

    def refused(*args):
        raise AssertionError("known bounds were left to FLA")

    return getattr(importlib.import_module(module), name), getattr(chunk_bounds, maker)(refused)


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("chunk_size", [1, 16, 64])
@pytest.mark.parametrize("name", ["prepare_chunk_indices", "prepare_chunk_offsets", "get_max_num_splits"])
def test_as_fla_counts_them(name, chunk_size, bounds):
    original, standin = pair(name)
    plain = torch.tensor(bounds, dtype=torch.int32)
    expected, got = original(plain.clone(), chunk_size), standin(known(plain), chunk_size)
    if isinstance(expected, int):
        assert got == expected
    else:
        assert got.dtype == expected.dtype
        assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_the_longest_document(bounds):
    original, standin = pair("prepare_maxlens")
    plain = torch.tensor(bounds, dtype=torch.int32)
    assert standin(known(plain)) == original(plain.clone())


def known(plain):
    return send_and_remember(plain.clone(), torch.device("cpu"))


def test_the_number_of_chunks_is_on_the_host():
    _, standin = pair("prepare_chunk_offsets")
    offsets = standin(send_and_remember(torch.tensor([0, 100, 130]), torch.device("meta")), 64)
    assert offsets.device.type == "meta"
    assert offsets[-1].item() == 3
    assert offsets[1:].shape == (2,)


def test_what_is_computed_from_offsets_has_numbers_of_its_own():
    _, standin = pair("prepare_chunk_offsets")
    offsets = standin(known(torch.tensor([0, 100, 130, 140])), 64)
    assert (offsets + 5)[-1].item() == 9
    assert offsets[:3][-1].item() == 3
    assert offsets.detach()[-1].item() == 4


@pytest.mark.parametrize(("module", "name", "maker"), REPLACED, ids=[name for _, name, _ in REPLACED])
def test_bounds_that_only_the_device_knows_are_left_to_fla(module, name, maker):
    given = []
    standin = getattr(chunk_bounds, maker)(lambda *args: given.append(args))
    bounds = torch.tensor([0, 3])
    standin(bounds, *([64] if name != "prepare_maxlens" else []))
    assert given[0][0] is bounds


def test_a_result_is_made_once_for_the_layers_of_a_model():
    _, standin = pair("prepare_chunk_indices")
    bounds = known(torch.tensor([0, 3, 9]))
    assert standin(bounds, 64) is standin(bounds, 64)
    assert standin(bounds, 16) is not standin(bounds, 64)


def test_only_what_was_sent_is_known():
    bounds = torch.tensor([0, 3])
    assert host_copy(bounds) is None
    assert host_copy(send(bounds, torch.device("meta"))) is None
    assert host_copy(send_and_remember(bounds, torch.device("meta"))).values is bounds


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["transformer", "gla", "gated_deltanet", "delta_net", "hgrn2", "mamba2", "retnet"])
def test_a_training_step_on_a_gpu_waits_for_nothing(family):
    """Forward and backward over packed documents, once everything is compiled and tuned."""
    device = torch.device("cuda", 0)
    setup_backend("triton", "cuda", context_len=512)
    try:
        config = SimpleNamespace(config=f"configs/debug/{family}.json", norm_type="", trust_remote_code=False)
        built = build_model(load_model_config(config))
        model = attach_training_forward(built.model).to_empty(device=device)
        init_weights(model, built.recipe, 0, built.tied)
        model.to(torch.bfloat16).train()
        ids = torch.randint(100, (1, 1024), device=device)
        for number in range(3):
            bounds = torch.tensor([0, 100 + number, 612, 1024], dtype=torch.int32)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if number == 2 else "default")
            model(ids, labels=ids, cu_seqlens=send_and_remember(bounds, device)).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        uninstall()
