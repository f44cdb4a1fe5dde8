"""Rewriting a dataset into shards: the same rows in the same order, and going on after an interruption."""

import importlib.util
import json
import subprocess
import sys

import datasets
import pytest

from flame.data.loading import load_rows
from flame.data.sources import SourceSpec
from flame.paths import PACKAGE_ROOT

SCRIPT = PACKAGE_ROOT.parent / "utils" / "reshard.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="needs a checkout")


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("reshard", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ROWS = [{"text": f"row {number} é\n", "number": number, "tags": ["a", None][: 1 + number % 2]} for number in range(47)]


@pytest.fixture
def data(tmp_path) -> str:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return str(tmp_path / "rows.jsonl")


def read(folder) -> list[dict]:
    return load_rows(SourceSpec(str(folder))).to_list()


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "arrow"])
@pytest.mark.parametrize(("num_shards", "workers"), [(1, 1), (5, 1), (12, 3), (47, 2)])
def test_training_reads_the_same_rows_in_the_same_order(script, data, tmp_path, suffix, num_shards, workers):
    arguments = ["--data", data, "--output", str(tmp_path / "out"), "--num_shards", str(num_shards), "--quiet"]
    assert script.main([*arguments, "--format", suffix, "--num_workers", str(workers)]) == 0
    assert len(list((tmp_path / "out").glob(f"*.{suffix}"))) == num_shards
    assert read(tmp_path / "out") == ROWS


@pytest.mark.parametrize("kind", ["saved", "parquet", "jsonl.gz", "csv", "builtin"])
def test_every_input(script, data, tmp_path, kind):
    dataset = datasets.Dataset.from_list(ROWS).select_columns(["text", "number"])
    path, expected = str(tmp_path / f"input.{kind}"), "parquet"
    if kind == "saved":
        dataset.save_to_disk(path)
        expected = "arrow"
    elif kind == "parquet":
        dataset.to_parquet(path)
    elif kind == "jsonl.gz":
        dataset.to_json(path, compression="gzip")
        expected = "jsonl"
    elif kind == "csv":
        dataset.to_csv(path)
    else:
        path = "builtin:stdlib"
    assert script.main(["--data", path, "--output", str(tmp_path / "out"), "--num_shards", "4", "--quiet"]) == 0
    assert len(list((tmp_path / "out").glob(f"*.{expected}"))) == 4
    rows = read(tmp_path / "out")
    assert rows == dataset.to_list() if kind != "builtin" else len(rows) > 100


def test_finished_shards_are_not_written_again(script, data, tmp_path, capsys, monkeypatch):
    written = []
    write = script.ShardWriter.write

    def fail_at_the_fourth(self, part):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(part.path.name)
        write(self, part)

    monkeypatch.setattr(script.ShardWriter, "write", fail_at_the_fourth)
    arguments = ["--data", data, "--output", str(tmp_path / "out"), "--quiet", "--num_shards"]
    assert script.main([*arguments, "6"]) == 130
    assert not (tmp_path / "out").exists()
    assert script.main([*arguments, "7"]) == 2
    assert "begun with other input or options (num_shards: 6 then, 7 now)" in capsys.readouterr().err

    def note_and_write(self, part):
        written.append(part.path.name)
        write(self, part)

    monkeypatch.setattr(script.ShardWriter, "write", note_and_write)
    assert script.main([*arguments, "6"]) == 0
    assert sorted(written) == [f"train-{number:05}-of-00006.jsonl" for number in range(6)]
    assert read(tmp_path / "out") == ROWS
    assert not (tmp_path / "out.partial").exists()
    assert script.main([*arguments, "6"]) == 0
    assert "finished already" in capsys.readouterr().out
    assert script.main([*arguments, "7"]) == 2
    assert "made with other input or options (num_shards: 6 then, 7 now)" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["file", "folder", "glob", "saved"])
def test_an_input_that_changed_since_is_noticed(script, tmp_path, capsys, kind):
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(2):
        write_jsonl(folder / f"{number}.jsonl", [f"{number} {row}" for row in range(9)])
    data = {"file": folder / "1.jsonl", "folder": folder, "glob": folder / "*.jsonl", "saved": tmp_path / "saved"}[kind]
    if kind == "saved":
        datasets.Dataset.from_list(ROWS).save_to_disk(data)
    arguments = ["--data", str(data), "--output", str(tmp_path / "out"), "--quiet", "--num_shards", "3"]
    assert script.main(arguments) == 0 and script.main(arguments) == 0
    assert "finished already" in capsys.readouterr().out
    if kind == "saved":
        datasets.Dataset.from_list(ROWS[:5] + ROWS[4:5] + ROWS[6:]).save_to_disk(data)
    else:
        write_jsonl(folder / "1.jsonl", [f"1 {3 if row == 2 else row}" for row in range(9)])
    assert script.main(arguments) == 2
    message = capsys.readouterr().err
    assert "delete it, or give another folder" in message
    assert "(input " in message and ("(input 1.jsonl: " in message or kind == "saved")


def test_the_output_does_not_become_input(script, tmp_path, capsys):
    write_jsonl(tmp_path / "rows.jsonl", ["a"])
    arguments = ["--data", str(tmp_path), "--output", str(tmp_path / "out"), "--num_shards", "1", "--quiet"]
    assert script.main(arguments) == 2
    assert "lies in the input folder" in capsys.readouterr().err


def write_jsonl(path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def test_faults_are_readable(script, data, tmp_path, capsys):
    for options, part in [
        (("--data", data, "--num_shards", "48"), "--num_shards 48: must be from 1 to"),
        (("--data", data, "--num_shards", "0"), "--num_shards 0"),
        (("--data", "./nowhere", "--num_shards", "1"), "--data ./nowhere: there is no such file or folder"),
    ]:
        assert script.main([*options, "--output", str(tmp_path / "out"), "--quiet"]) == 2
        assert part in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_made_is_one_line(script, data, tmp_path, capsys):
    (tmp_path / "file").touch()
    output = tmp_path / "file" / "out"
    assert script.main(["--data", data, "--output", str(output), "--num_shards", "2", "--quiet"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"Not a directory: '{output}.partial'")


def test_values_that_json_has_not(script, tmp_path, capsys):
    datasets.Dataset.from_dict({"text": ["a"], "data": [b"\xff"]}).save_to_disk(tmp_path / "saved")
    arguments = ["--data", str(tmp_path / "saved"), "--output", str(tmp_path / "out"), "--num_shards", "1", "--quiet"]
    assert script.main([*arguments, "--format", "jsonl"]) == 2
    assert "use parquet or arrow" in capsys.readouterr().err
    assert script.main([*arguments[:3], str(tmp_path / "other"), *arguments[4:], "--format", "parquet"]) == 0


def test_published_command_runs_from_a_checkout(data, tmp_path):
    command = [sys.executable, str(SCRIPT), "--data", data, "--output", str(tmp_path / "out"), "--num_shards", "2"]
    done = subprocess.run(command, env={"HF_DATASETS_CACHE": str(tmp_path / "cache")}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "47 rows in 2 shards" in done.stdout and "47/47" in done.stderr
