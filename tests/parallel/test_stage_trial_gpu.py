"""The trial of models native to transformers on a GPU, in bfloat16 and with the attention that training has there."""

from __future__ import annotations

import functools

import pytest
import torch

from flame.models.backend import setup_backend, uninstall
from flame.models.build import BuiltModel
from flame.models.init import build_recipe, tied_groups
from flame.parallel.stage_trial import try_stages
from tests.models.native import tiny_native

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def backend():
    setup_backend("auto", "cuda")
    yield
    uninstall()


@pytest.mark.parametrize("model_type", ["llama", "gemma", "gpt2", "qwen3_moe"])
def test_families_that_run_in_stages(model_type):
    model, recipe = build_recipe(functools.partial(tiny_native, model_type))
    built = BuiltModel(model, recipe, tied_groups(model), frozenset())
    try_stages(built, torch.device("cuda"), torch.bfloat16, seed=0, varlen=True)
