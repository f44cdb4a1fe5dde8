"""The commands of docs/data.md do what the page says; those that need a finished run are in tests/runs."""

import importlib.util
import json
import re
import shlex
import sys

import pytest

from flame.paths import PACKAGE_ROOT
from flame.utils.inspect_data import main as inspect_data
from flame.utils.preprocess import main as preprocess

ROOT = PACKAGE_ROOT.parent
PAGE = ROOT / "docs" / "data.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="needs a checkout")


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "utils" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def documented(command: str) -> list[list[str]]:
    """The arguments of each line of the page that runs ``command``."""
    lines = re.findall(rf"^python {re.escape(command)}(.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert lines, f"{command} is not documented"
    return [shlex.split(line) for line in lines]


def test_inspect_data(capsys):
    show, hashes, from_checkpoint = documented("-m flame.utils.inspect_data")
    assert inspect_data(show) == 0
    assert "step 2: " in capsys.readouterr().out
    assert inspect_data([word.replace("100", "2") for word in hashes]) == 0
    assert [len(line) for line in capsys.readouterr().out.splitlines()] == [64, 64]
    assert "--load_step" in from_checkpoint


def test_preprocess_and_reshard(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (arguments,) = documented("-m flame.utils.preprocess")
    assert preprocess(arguments) == 0
    (arguments,) = documented("utils/reshard.py")
    assert load_script("reshard").main(arguments) == 0
    assert len(list((tmp_path / "shards").glob("*.parquet"))) == 8


def test_benchmark_data(tmp_path, capsys):
    assert documented("utils/benchmark_data.py") == [[]]
    small = ["--tokens=50000", "--pairs=1", "--workers=0,2", "--seq_lens=256", "--start_rows=5000"]
    small += ["--modes=single,streaming,mixture"]
    assert load_script("benchmark_data").main([*small, "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(figures["speed"]) == 11 and all(row["share"] > 0.05 for row in figures["speed"])
    assert figures["start"].keys() == {"10", "1000000"}
    output = capsys.readouterr().out
    assert output.count("| single | paragraphs | 256 | on |") == 2 and "| 1,000,000 | " in output
