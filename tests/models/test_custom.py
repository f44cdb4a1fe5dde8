"""Custom models are imported when they are named, register themselves, and fail in one line when they do not."""

from __future__ import annotations

import json
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from flame.checkpoint.artifacts import save_run_artifacts
from flame.checkpoint.hf_model import load_config
from flame.config import JobConfig
from flame.errors import UserError
from flame.models.backend import setup_backend
from flame.models.custom import load_custom_models, load_entry, load_recorded, load_shipped, registered_configs
from flame.models.mixers import mixer_flops
from flame.models.model_config import load_model_config
from tests.runs.harness import ROOT

CONFIG_ONLY = """
from transformers import AutoConfig, PretrainedConfig

class TinyConfig(PretrainedConfig):
    model_type = "{name}"

AutoConfig.register("{name}", TinyConfig)
"""
WHOLE = (
    CONFIG_ONLY
    + """
from transformers import AutoModelForCausalLM, PreTrainedModel

class TinyForCausalLM(PreTrainedModel):
    config_class = TinyConfig

AutoModelForCausalLM.register(TinyConfig, TinyForCausalLM)
"""
)


@pytest.fixture(scope="module", autouse=True)
def backend():
    setup_backend("reference", "cpu")


@pytest.fixture
def write(tmp_path):
    """Write a module called ``name``; its path."""

    def write_module(name: str, text: str) -> str:
        path = tmp_path / f"{name}.py"
        path.write_text(text.replace("{name}", name))
        return str(path)

    return write_module


def job(*entries: str, path: str = "") -> JobConfig:
    config = JobConfig()
    config.model.custom_models = list(entries)
    config.experimental.custom_model_path = path
    return config


def test_both_options_import_what_they_name(write):
    load_custom_models(job(write("tiny_one", WHOLE), path=write("tiny_two", WHOLE)))
    assert {"tiny_one", "tiny_two"} <= {config.model_type for config in registered_configs()}


def test_loading_again_changes_nothing(write):
    path = write("tiny_again", WHOLE)
    load_entry(path, "--custom_models")
    config_class = CONFIG_MAPPING["tiny_again"]
    load_entry(path, "--custom_models")
    assert CONFIG_MAPPING["tiny_again"] is config_class


def test_a_package_imports_its_own_modules(tmp_path):
    package = tmp_path / "tiny_package"
    package.mkdir()
    (package / "__init__.py").write_text("from .model import TinyForCausalLM\nimport tiny_package.model\n")
    (package / "model.py").write_text(WHOLE.replace("{name}", "tiny_package"))
    load_entry(str(package), "--custom_models")
    assert "tiny_package" in CONFIG_MAPPING


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("tiny_missing", "import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("tiny_broken", "x = 1\nx.y", r"AttributeError: .*tiny_broken.py, line 2\)"),
        ("tiny_exit", "raise SystemExit(0)", "importing it fails: SystemExit"),
        ("tiny_syntax", "def f(:", "SyntaxError"),
        ("tiny_nothing", "x = 1", "registers no model"),
        ("tiny_config", CONFIG_ONLY, "registers tiny_config without a causal language model"),
        ("llama", WHOLE, "ValueError: 'llama' is already used"),
        ("gla", WHOLE, r"registers model_type 'gla', which is that of fla\..*GLAConfig"),
    ],
)
def test_code_that_cannot_be_used(write, name, text, reason):
    path = write(name, text)
    with pytest.raises(UserError, match=reason) as fault:
        load_custom_models(job(path))
    assert str(fault.value).startswith(f"--model.custom_models = {path}: ")
    assert "\n" not in str(fault.value)
    assert name in ("gla", "llama") or name not in CONFIG_MAPPING or name == "tiny_config"


def test_a_refused_registration_leaves_the_one_before_in_place():
    assert CONFIG_MAPPING["gla"].__module__.startswith("fla.")


def test_a_name_that_another_module_has(write, monkeypatch):
    with pytest.raises(UserError, match="'torch' is the name of an installed package"):
        load_entry(write("torch", WHOLE), "--custom_models")
    other = ModuleType("loaded_elsewhere")
    other.__file__ = "elsewhere/loaded_elsewhere.py"
    monkeypatch.setitem(sys.modules, "loaded_elsewhere", other)
    with pytest.raises(UserError, match="a module named 'loaded_elsewhere' is loaded already"):
        load_entry(write("loaded_elsewhere", WHOLE), "--custom_models")


def test_nothing_is_imported_that_is_not_asked_for():
    code = (
        "import sys\nfrom flame.models.custom import load_shipped\nimport flame.models.model_config\n"
        "assert not load_shipped('gla')\nassert not any(name.startswith('custom_models') for name in sys.modules)\n"
        "assert load_shipped('sba')\nassert 'custom_models.sba' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_a_model_type_brings_its_shipped_package():
    assert load_shipped("sba")
    assert not load_shipped("gla")
    section = SimpleNamespace(config="configs/debug/sba.json", norm_type="", trust_remote_code=False)
    assert type(load_model_config(section)).__module__.startswith("custom_models.sba")


def test_an_unknown_model_type_names_the_custom_ones(tmp_path, write):
    load_entry(write("tiny_known", WHOLE), "--custom_models")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "tiny_unknown"}))
    with pytest.raises(UserError, match="unknown model_type 'tiny_unknown'") as fault:
        load_model_config(SimpleNamespace(config=str(path), norm_type="", trust_remote_code=False))
    assert all(part in str(fault.value) for part in ("sba", "tiny_known", "--model.custom_models"))


def test_a_run_folder_remembers(tmp_path, write):
    run, path = tmp_path / "run", write("tiny_kept", WHOLE)
    sections = {"model": {"custom_models": [path]}}
    load_recorded(sections, run)
    save_run_artifacts(run, AutoConfig.for_model("tiny_kept"))
    assert load_config(run / "model_config.json").model_type == "tiny_kept"


def test_code_inside_a_run_folder_is_not_run(tmp_path, write, caplog):
    path = write("tiny_inside", WHOLE)
    load_recorded({"experimental": {"custom_model_path": path}}, tmp_path)
    assert "tiny_inside" not in CONFIG_MAPPING
    assert f"give --custom_models {path}" in caplog.text


def test_code_that_has_moved_is_given_anew(tmp_path, write, caplog):
    load_recorded({"model": {"custom_models": [str(tmp_path / "gone.py")]}}, tmp_path / "run")
    assert "passed over" in caplog.text
    load_entry(write("tiny_moved", WHOLE), "--custom_models")
    (tmp_path / "old").mkdir()
    old = tmp_path / "old" / "tiny_moved.py"
    old.write_text("1 / 0")
    load_recorded({"model": {"custom_models": [str(old)]}}, tmp_path / "run")


def test_fla_operators_are_those_of_the_backend(write):
    text = WHOLE + "\nfrom fla.ops.gla import chunk_gla\nassert chunk_gla.__module__ == 'flame.models.reference.gla'\n"
    load_entry(write("tiny_on_fla", text), "--custom_models")


class DeclaringMixer(nn.Module):
    """A mixer that says what it costs, as the document on custom models asks."""

    def mixer_flops(self):
        return {"per_token": 6.0, "per_pair": 4.0, "window": 8}


def test_a_mixer_declares_its_flops():
    flops = mixer_flops(DeclaringMixer())
    assert (flops.per_token, flops.per_pair, flops.window) == (6.0, 4.0, 8)


def test_a_model_with_cu_seqlens_of_its_own_gets_it():
    from flame.models.build import build_model
    from flame.models.loss import takes_cu_seqlens

    section = SimpleNamespace(config="configs/debug/sba.json", norm_type="", trust_remote_code=False)
    model = build_model(load_model_config(section)).model
    assert takes_cu_seqlens(model)
    assert all(parameter.device == torch.device("meta") for parameter in model.parameters())
