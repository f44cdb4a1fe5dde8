"""The typed config: documented fields, pure data, values that follow from others."""

import ast
import sys
from dataclasses import fields

import pytest

from flame.cli import names
from flame.cli.usage import field_docs
from flame.config import JobConfig, resolve_defaults
from flame.options import ALIASES, default_of, rule_of
from flame.paths import PACKAGE_ROOT


@pytest.mark.parametrize("name", names.options())
def test_every_option_is_documented(name):
    section, _, key = name.partition(".")
    assert field_docs()[f"{names.sections()[section].__name__}.{key}"].endswith((".", ":"))


@pytest.mark.parametrize("name", names.options())
def test_every_default_keeps_its_own_limits(name):
    option = names.options()[name]
    default = default_of(option)
    assert all(rule_of(option).allows(each) for each in (default if isinstance(default, list) else [default]))


def test_every_alias_sets_an_option_and_hides_none():
    for alias, target in ALIASES.items():
        assert target.target in names.options()
        assert alias not in names.options()


def test_instances_share_no_list():
    JobConfig().training.dataset_split.append("validation")
    assert JobConfig().training.dataset_split == ["train"]


BEFORE_TRAINING = [
    *(PACKAGE_ROOT / name for name in ("config.py", "options.py", "errors.py", "paths.py")),
    *(PACKAGE_ROOT / "cli").glob("*.py"),
    *(PACKAGE_ROOT / "launch").glob("*.py"),
]


@pytest.mark.parametrize("path", BEFORE_TRAINING, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_what_comes_before_training_imports_only_the_standard_library(path):
    tree = ast.parse(path.read_text())
    imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names | {"flame"}


def test_job_config_has_one_attribute_per_section():
    assert [each.name for each in fields(JobConfig)] == [*names.sections(), "given"]


@pytest.mark.parametrize(("varlen", "expected"), [(False, 8), (True, 1)])
def test_batch_size_follows_varlen(varlen, expected):
    config = JobConfig()
    config.training.varlen = varlen
    resolve_defaults(config)
    assert config.training.batch_size == expected


@pytest.mark.parametrize(("seq_len", "expected"), [(512, 512), (2048, 2048), (65536, 2048)])
def test_unset_context_len_is_at_most_seq_len(seq_len, expected):
    config = JobConfig()
    config.training.seq_len = seq_len
    resolve_defaults(config)
    assert config.training.context_len == expected


def test_unset_warmup_is_at_most_the_run():
    config = JobConfig()
    config.training.steps = 10
    resolve_defaults(config)
    assert config.lr_scheduler.warmup_steps == 10


@pytest.mark.parametrize(("decay_ratio", "expected"), [(None, 0.1), (0.3, 0.3), (0.0, 0.0)])
def test_wsd_is_linear_over_the_last_part(decay_ratio, expected):
    config = JobConfig()
    config.lr_scheduler.decay_type = "wsd"
    config.lr_scheduler.decay_ratio = decay_ratio
    resolve_defaults(config)
    assert (config.lr_scheduler.decay_type, config.lr_scheduler.decay_ratio) == ("linear", expected)


def test_other_decays_keep_an_unset_ratio():
    config = JobConfig()
    config.lr_scheduler.decay_type = "cosine"
    resolve_defaults(config)
    assert config.lr_scheduler.decay_ratio is None


@pytest.mark.parametrize(("config_path", "expected"), [("a/model.json", ""), ("org/model", "org/model")])
def test_tokenizer_beside_the_model(config_path, expected):
    config = JobConfig()
    config.model.config = config_path
    resolve_defaults(config)
    assert config.model.tokenizer_path == expected


def test_run_folder_in_the_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = JobConfig()
    config.job.dump_folder = "~/run"
    resolve_defaults(config)
    assert config.job.dump_folder == "/home/me/run"


def test_resolving_twice_changes_nothing():
    once = JobConfig()
    resolve_defaults(once)
    twice = JobConfig()
    resolve_defaults(twice)
    resolve_defaults(twice)
    assert once == twice
