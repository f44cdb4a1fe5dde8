"""Which jobs have something to compile beside their start."""

from __future__ import annotations

import importlib
import inspect
import json

import pytest

from flame.cli.parse import parse_args
from flame.launch import works
from flame.launch.works import ATTENTION_BACKWARD, ATTENTION_FORWARD, KERNELS, WORKS

BASE = {"model.config": "configs/transformer_340M.json", "model.tokenizer_path": "configs/tokenizer"}
BASE |= {"training.dataset": "builtin:stdlib"}


def wanted(changes=None, environ=None):
    """The works that a job with these options wants."""
    words = [f"--{name}={value}" for name, value in (BASE | (changes or {})).items()]
    config = parse_args(words)
    return [name for name, work in WORKS.items() if work.is_wanted(config, environ or {})]


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(works, "installed_version", lambda name: "4.0.0")


ATTENTION = [ATTENTION_FORWARD, ATTENTION_BACKWARD]


@pytest.mark.parametrize("backend", ["fa4", "auto"])
def test_flash_attention_4_unless_it_is_refused(backend, installed):
    changes = {"model.attention_backend": backend}
    assert wanted(changes) == ATTENTION
    assert wanted(changes | {"job.compile_ahead": "true"}) == [KERNELS, *ATTENTION]
    assert wanted(changes | {"job.compile_ahead": "false"}) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"model.attention_backend": "varlen"},
        {"training.deterministic": "true"},
        {"checkpoint.create_seed_checkpoint": "true"},
        {"model.config": "configs/gla_340M.json"},
        {"model.config": "configs/no_such_file.json"},
    ],
    ids=str,
)
def test_jobs_without_flash_attention_4(changes, installed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flame.cli.parse.find_faults", lambda config: [])
        assert wanted(changes) == []


def test_layers_of_a_hybrid_are_compiled_too(installed):
    assert wanted({"model.config": "configs/hybrid_340M.json"}) == ATTENTION


def test_what_is_not_installed_is_not_compiled(monkeypatch):
    monkeypatch.setattr(works, "installed_version", lambda name: None)
    assert wanted({"model.attention_backend": "fa4"}) == []


def test_a_package_that_is_to_keep_nothing_is_not_compiled_ahead(installed):
    assert wanted(environ={"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}) == []


def test_a_model_of_transformers(installed, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "num_attention_heads": 4}))
    assert wanted({"model.config": path}) == wanted({"model.config": tmp_path}) == ATTENTION


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.backend": "reference"},
        {"checkpoint.create_seed_checkpoint": "true"},
        {"training.batch_size": "auto"},
    ],
    ids=str,
)
def test_tritons_kernels_must_be_asked_for(changes):
    assert KERNELS not in wanted(changes)
    assert (KERNELS in wanted(changes | {"job.compile_ahead": "true"})) == (not changes)


@pytest.mark.parametrize("name", WORKS)
def test_what_a_work_names_is_there(name):
    if name == KERNELS:
        pytest.importorskip("triton")
    module, function = WORKS[name].function.split(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), function)).parameters
    assert list(parameters) == ["config", "world_size"]


def test_only_what_shapes_the_attention_counts():
    work = WORKS[ATTENTION_FORWARD]
    same, other = {"training.steps": 7, "optimizer.lr": 1e-3}, {"training.seq_len": 512}

    def options(changes):
        return work.options(parse_args([f"--{name}={value}" for name, value in (BASE | changes).items()]))

    assert options({}) == options(same) != options(other)
