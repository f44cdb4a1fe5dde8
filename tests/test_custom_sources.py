"""Where the code of custom models is found."""

import pytest

from flame.cli.parse import parse_args, to_toml
from flame.custom_sources import SHIPPED, find_custom, find_shipped, shipped_packages
from flame.errors import ConfigError, UserError

JOB = ["--model.config", "org/model", "--training.dataset", "builtin:stdlib"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a file, a package, a package in custom_models, and a folder that is no package."""
    for package in ("mixers", "custom_models/linear", "stuff/inner"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "gated.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_kind_of_entry(folder):
    assert find_custom("gated.py").path == folder / "gated.py"
    assert find_custom("gated").path == folder / "gated.py"
    assert find_custom("mixers").module == "mixers"
    assert find_custom(str(folder / "mixers")).path == folder / "mixers"
    assert find_custom("linear").path == folder / "custom_models" / "linear"
    assert find_custom("json.decoder").path is None


def test_the_shipped_package_is_found_from_any_folder_and_by_any_name(folder):
    for entry in ("sba", "custom_models.sba", str(SHIPPED / "sba")):
        source = find_custom(entry)
        assert (source.module, source.entry, source.path) == ("custom_models.sba", "custom_models.sba", SHIPPED / "sba")
    assert find_shipped("sba").module == "custom_models.sba"
    assert "sba" in shipped_packages()


@pytest.mark.parametrize("model_type", ["linear", "gla", "..", "sba/..", ""])
def test_only_packages_beside_flame_are_taken_for_a_model_type(folder, model_type):
    assert find_shipped(model_type) is None


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("stuff", "no __init__.py; packages in it: inner"),
        ("./nothing", "no such file or folder"),
        ("nothing.py", "neither a package in custom_models (there: sba"),
        ("nothing", "nor a module that Python can import"),
        ("", "empty"),
    ],
)
def test_what_is_not_there(folder, entry, reason):
    with pytest.raises(UserError) as fault:
        find_custom(entry)
    assert reason in str(fault.value)


@pytest.mark.parametrize(
    ("name", "reason"), [("my-model.py", "no name of a module"), ("class.py", "no name"), ("queue.py", "Python's own")]
)
def test_a_name_that_cannot_be_used(folder, name, reason):
    (folder / name).touch()
    with pytest.raises(UserError, match=reason):
        find_custom(name)


@pytest.mark.parametrize("name", ["datasets.py", "tensorboard"])
def test_the_name_of_an_installed_package_cannot_be_used(folder, name):
    """Whoever imports that package later, such as the data pipeline, would get the custom model instead."""
    if name.endswith(".py"):
        (folder / name).touch()
    else:
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
    with pytest.raises(UserError, match="is the name of an installed package; rename it"):
        find_custom(f"./{name}")


def test_a_model_that_is_itself_installed_can_be_given_by_its_path(folder, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda kind: str(folder))
    monkeypatch.syspath_prepend(folder)
    assert find_custom("./gated.py").module == "gated"
    assert find_custom("./mixers").module == "mixers"


def test_a_job_with_wrong_entries_is_refused_with_each_of_them():
    with pytest.raises(ConfigError) as error:
        parse_args([*JOB, "--model.custom_models", "sba,nothing", "--experimental.custom_model_path", "/no/where"])
    assert len(error.value.faults) == 2
    assert all(option in str(error.value) for option in ("--model.custom_models", "--experimental.custom_model_path"))


def test_the_kept_job_means_the_same_code_from_any_folder(folder, monkeypatch):
    config = parse_args([*JOB, "--model.custom_models=sba,gated,mixers", "--experimental.custom_model_path=linear"])
    kept = folder / "config.toml"
    kept.write_text(to_toml(config))
    monkeypatch.chdir("/")
    again = parse_args(["--job.config_file", str(kept)])
    assert again.model.custom_models == ["custom_models.sba", str(folder / "gated.py"), str(folder / "mixers")]
    assert again.experimental.custom_model_path == str(folder / "custom_models" / "linear")
