"""Tokenising ahead of training: the same batches, in parallel, and going on after an interruption."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pytest

from flame.utils import preprocess as command
from flame.utils.inspect_data import main as inspect_data
from flame.utils.preprocess import main
from tests.data.corpus import word_tokenizer
from tests.processes import left_of_group


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(command, "MIN_ROWS_PER_PART", 25)


@pytest.fixture
def rows(tmp_path) -> str:
    """230 rows, some empty, in 10 parts."""
    texts = [" ".join(f"word{row * word}" for word in range(row % 23)) for row in range(230)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"content": text}) for text in texts))
    return str(tmp_path / "rows.jsonl")


def run(dataset: str, path, *options: str, tokenizer: str = "configs/tokenizer") -> int:
    return main(["--dataset", dataset, "--tokenizer", tokenizer, "--path", str(path), "--quiet", *options])


def step_hashes(capsys, dataset: str, *options: str) -> list[str]:
    job = ["--job.config_file=configs/debug.toml", "--training.num_workers=0", "--training.seq_len=64"]
    job += ["--training.context_len=48", f"--training.dataset={dataset}", "--training.batch_size=8"]
    assert inspect_data([*job, *options, "--steps=6", "--hash"]) == 0
    return capsys.readouterr().out.split()


@pytest.mark.parametrize("workers", ["1", "3"])
def test_same_batches_as_tokenizing_while_training(rows, tmp_path, capsys, workers):
    assert run(rows, tmp_path / "data", "--num_workers", workers) == 0
    assert "230 rows" in capsys.readouterr().out
    hashes = step_hashes(capsys, rows)
    assert len(set(hashes)) == 6
    assert step_hashes(capsys, str(tmp_path / "data")) == hashes
    assert not (tmp_path / "data.partial").exists()


def test_same_batches_with_the_tokenizer_s_own_bos_and_eos(rows, tmp_path, capsys):
    from tokenizers.processors import TemplateProcessing

    tokenizer = word_tokenizer(bos_token="<bos>", eos_token="<eos>")
    frame = TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", 2001), ("<eos>", 2000)])
    tokenizer.backend_tokenizer.post_processor = frame
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert run(rows, tmp_path / "data", tokenizer=str(tmp_path / "tokenizer")) == 0
    saved = datasets.load_from_disk(tmp_path / "data")
    assert saved[0]["input_ids"] == [] and saved[2]["input_ids"] == [2001, 0, 0, 2000]
    capsys.readouterr()
    options = ("--model.tokenizer_path", str(tmp_path / "tokenizer"))
    assert step_hashes(capsys, str(tmp_path / "data"), *options) == step_hashes(capsys, rows, *options)


def test_builtin_corpus_gives_small_integers(tmp_path, capsys):
    assert run("builtin:stdlib", tmp_path / "data", "--num_workers", "2") == 0
    saved = datasets.load_from_disk(tmp_path / "data")
    assert saved.features["input_ids"].feature.dtype == "uint16"  # half the disk of int32
    assert np.mean([len(ids) for ids in saved["input_ids"]]) > 100


def test_finished_work_is_not_done_again(rows, tmp_path, capsys, monkeypatch):
    """An interrupted run leaves whole parts, the next one makes the rest, one more has nothing to do."""
    written = []
    write = command.PartWriter.write

    def fail_at_the_fifth(self, part):
        if len(written) == 4:
            raise KeyboardInterrupt
        written.append(part.path.name)
        return write(self, part)

    monkeypatch.setattr(command.PartWriter, "write", fail_at_the_fifth)
    assert run(rows, tmp_path / "data", "--num_workers", "1") == 130
    assert "goes on from here" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
    assert run(rows, tmp_path / "data", "--num_workers", "1", "--add_eos", "false") == 2
    assert "begun with other input or options (tokenizer closing: [0] then, [] now)" in capsys.readouterr().err

    def note_and_write(self, part):
        written.append(part.path.name)
        return write(self, part)

    monkeypatch.setattr(command.PartWriter, "write", note_and_write)
    assert run(rows, tmp_path / "data", "--num_workers", "1") == 0
    assert sorted(written) == [f"part-{number:05}.arrow" for number in range(10)]
    assert run(rows, tmp_path / "data") == 0
    assert "finished already" in capsys.readouterr().out
    assert len(written) == 10
    assert step_hashes(capsys, str(tmp_path / "data")) == step_hashes(capsys, rows)


def test_an_input_that_changed_since_is_noticed(rows, tmp_path, capsys, monkeypatch):
    """The rows that are compared stay: the change is in one that is not looked at."""
    assert run(rows, tmp_path / "data") == 0
    monkeypatch.setattr(command.PartWriter, "write", lambda self, part: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run(rows, tmp_path / "begun", "--num_workers", "1") == 130
    path = Path(rows)
    path.write_text(path.read_text().replace("word2 ", "word3 "))
    capsys.readouterr()
    for folder, how in [("data", "was made"), ("begun", "was begun")]:
        assert run(rows, tmp_path / folder) == 2
        message = capsys.readouterr().err
        assert how in message and "input rows.jsonl: " in message and "delete it, or give another folder" in message


def test_a_killed_run_goes_on_and_leaves_no_process(tmp_path):
    texts = [f"{row} " * 3_000 for row in range(400)]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "rows")
    arguments = [sys.executable, "-m", "flame.utils.preprocess", "--dataset", str(tmp_path / "rows"), "--quiet"]
    arguments += ["--tokenizer", "configs/tokenizer", "--path", str(tmp_path / "data"), "--num_workers", "2"]
    process = subprocess.Popen(arguments, start_new_session=True)
    parts = tmp_path / "data.partial"
    while not list(parts.glob("part-*.arrow")):
        assert process.poll() is None, "it was done before it could be killed"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = {path: path.stat().st_mtime_ns for path in parts.glob("part-*.arrow")}
    assert not left_of_group(process.pid, seconds=20), "workers outlived their parent"
    assert done.keys() <= set(parts.glob("part-*.arrow"))
    assert subprocess.run(arguments, check=True).returncode == 0
    saved = datasets.load_from_disk(tmp_path / "data")
    assert len(saved) == 400 and len(list((tmp_path / "data").glob("*.arrow"))) > 0


@pytest.mark.parametrize("workers", ["1", "2"])
def test_bad_rows_are_named_or_left_empty(tmp_path, capsys, workers):
    rows = [{"text": "a b"}] * 60 + [{"text": None}] + [{"text": "c"}] * 9
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ("--num_workers", workers)
    assert run(str(tmp_path / "rows.jsonl"), tmp_path / "data", *options) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "row 60" in message and "--on_bad_row skip" in message and "--training" not in message
    assert not (tmp_path / "data").exists()
    assert run(str(tmp_path / "rows.jsonl"), tmp_path / "other", *options, "--on_bad_row", "skip") == 0
    assert "1 bad rows were left empty" in capsys.readouterr().out
    saved = datasets.load_from_disk(tmp_path / "other")
    assert [row for row, ids in enumerate(saved["input_ids"]) if not ids] == [60]


def test_a_worker_s_death_is_told(rows, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command.PartWriter, "write", lambda self, part: os.kill(os.getpid(), signal.SIGKILL))
    assert run(rows, tmp_path / "data", "--num_workers", "2") == 2
    assert "a worker process died" in capsys.readouterr().err


def test_faults_name_this_command_s_options(rows, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for path, options, part in [
        ("full", (), "--path"),
        ("data", ("--text_column", "txt"), "--text_column txt: "),
        ("data", ("--split", "none"), "none"),
        ("data", ("--add_bos", "true", "--tokenizer", str(tmp_path)), "--tokenizer"),
    ]:
        assert run(rows, tmp_path / path, *options) == 2
        message = capsys.readouterr().err.splitlines()[-1]
        assert part in message and "training." not in message and "model." not in message
    datasets.Dataset.from_dict({"input_ids": [[1, 2]]}).save_to_disk(tmp_path / "tokens")
    assert run(str(tmp_path / "tokens"), tmp_path / "data") == 2
    assert "token ids already" in capsys.readouterr().err
