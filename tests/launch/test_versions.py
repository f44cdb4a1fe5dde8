"""Version checks: one readable line, and the same bounds as the packaging."""

import tomllib

import pytest

from flame.errors import UserError
from flame.launch import versions
from flame.launch.versions import REQUIRED, check_versions, main, parse
from flame.paths import PACKAGE_ROOT

PYPROJECT = PACKAGE_ROOT.parent / "pyproject.toml"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2.13.0+cpu", (2, 13, 0)), ("2.11.0a0+git1", (2, 11, 0)), ("5", (5,)), ("0.6.0.dev1", (0, 6, 0))],
)
def test_parse(text, expected):
    assert parse(text) == expected


def test_this_environment_is_right():
    check_versions()
    assert main(["pytest"]) == 0


@pytest.mark.parametrize(
    ("name", "installed", "message"),
    [
        ("torch", "2.5.1+cu121", r"torch 2.5.1\+cu121 \(needs >=2.11\)"),
        ("torchtitan", "0.3.0", r"torchtitan 0.3.0 \(needs >=0.2.2,<0.3\)"),
        ("datasets", None, r"no datasets \(needs >=4\)"),
    ],
)
def test_what_is_wrong_and_how_to_mend_it(monkeypatch, name, installed, message):
    real = versions.installed_version
    monkeypatch.setattr(versions, "installed_version", lambda each: installed if each == name else real(each))
    with pytest.raises(UserError, match=message) as error:
        check_versions()
    assert "pip install" in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_module(capsys):
    assert main(["no_such_module"]) == 2
    assert "no_such_module" in capsys.readouterr().err


@pytest.mark.skipif(not PYPROJECT.exists(), reason="an installed package has no pyproject.toml")
def test_packaging_asks_for_the_same():
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    for name, (lowest, too_new) in REQUIRED.items():
        bounds = f">={'.'.join(map(str, lowest))}" if any(lowest) else ""
        bounds += f",<{'.'.join(map(str, too_new))}" if too_new else ""
        assert name + bounds in project["dependencies"]
    assert project["requires-python"] == ">=3.11"
