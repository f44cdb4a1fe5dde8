"""Plans of measurements, with commands that compute nothing."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

import pytest

from flame.cli.parse import parse_args
from utils.measure import ROOT, main, read_plan

SIDE_BY_SIDE = """
[first]
command = "touch {output}/first; until [ -e {output}/second ]; do sleep 0.05; done; echo $CUDA_VISIBLE_DEVICES"
[second]
command = "until [ -e {output}/first ]; do sleep 0.05; done; touch {output}/second; echo $CUDA_VISIBLE_DEVICES"
[both]
gpus = 2
command = "echo $CUDA_VISIBLE_DEVICES"
[host]
gpus = 0
after = ["both"]
command = "[ -e {output}/both.log ] && echo after"
"""


def run(folder: Path, text: str, *arguments: str) -> tuple[int, dict[str, str]]:
    """A plan on two devices; the exit code and each measurement's result."""
    plan = folder / "plan.toml"
    plan.write_text(text)
    code = main([str(plan), "--output", str(folder / "out"), "--gpus", "2", *arguments])
    summary = json.loads((folder / "out" / "summary.json").read_text())
    return code, {name: end["result"] for name, end in summary.items()}


def test_measurements_share_the_devices(tmp_path):
    code, results = run(tmp_path, SIDE_BY_SIDE, "--seconds", "60")
    assert code == 0 and set(results.values()) == {"done"}
    logs = {name: (tmp_path / "out" / f"{name}.log").read_text().strip() for name in results}
    assert {logs["first"], logs["second"]} == {"0", "1"}
    assert logs["both"] == "0,1" and logs["host"] == "after"


def test_what_takes_too_long_is_ended_with_all_its_processes(tmp_path):
    alive = tmp_path / "alive"
    text = f"""
[slow]
seconds = 0.3
command = "(trap '' TERM; while true; do date +%s.%N > {alive}; sleep 0.02; done) & wait"
[next]
gpus = 2
command = "true"
[broken]
command = "exit 3"
"""
    code, results = run(tmp_path, text, "--seconds", "60")
    assert code == 1
    assert results == {"slow": "longer than 0.3 s", "next": "done", "broken": "exit code 3"}
    last = alive.read_text()
    time.sleep(0.3)
    assert alive.read_text() == last


def test_nothing_outlasts_the_time_and_what_is_done_is_not_done_again(tmp_path):
    text = '[quick]\ncommand = "date >> {output}/dates"\n[long]\ngpus = 2\ncommand = "sleep 60"\n'
    text += '[never]\ncommand = "true"\nafter = ["long"]\n'
    for _ in range(2):
        code, results = run(tmp_path, text, "--seconds", "1")
        assert code == 1
        assert results == {"quick": "done", "long": "out of time", "never": "not started"}
    assert len((tmp_path / "out" / "dates").read_text().splitlines()) == 1


@pytest.mark.parametrize("table", ['[a]\ncomand = "x"', '[a]\ncommand = "x"\nafter = ["b"]'])
def test_a_wrong_plan_is_refused(tmp_path, table):
    (tmp_path / "plan.toml").write_text(table)
    with pytest.raises(SystemExit, match=r"\[a\]: unknown or missing"):
        read_plan(tmp_path / "plan.toml")


MEASUREMENTS = [one for plan in sorted((ROOT / "utils" / "measurements").glob("*.toml")) for one in read_plan(plan)]


@pytest.mark.parametrize("measurement", MEASUREMENTS, ids=lambda measurement: measurement.name)
def test_the_measurements_of_the_docs_can_run(measurement, monkeypatch):
    """Every file that a command names is there, and the options of its job are accepted together."""
    monkeypatch.chdir(ROOT)
    words = shlex.split(measurement.command)
    files = [word for word in words if word.startswith(("configs/", "utils/", "tests/"))]
    assert [file for file in files if not Path(file).exists()] == []
    # utils/benchmark.py makes the rest of its job; train.sh is given a whole one.
    made = ["--model.config=configs/transformer_340M.json", "--model.tokenizer_path=configs/tokenizer"]
    made += ["--training.dataset=builtin:stdlib", "--training.mixed_precision_param=bfloat16"]
    job = [*made, *words[words.index("--") + 1 :]] if "--" in words else words[2:] if "train.sh" in words else made
    parse_args(job)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a\n", "cannot be read as TOML"),
        ("a = 1\n", "a stands outside a table"),
        ('[a]\ncommand = "true"\ngpus = -1\n', "gpus is a whole number from 0 on"),
        ('[a]\ncommand = "true"\ngpus = "1"\n', "gpus is a whole number from 0 on"),
        ('[a]\ncommand = "true"\nseconds = nan\n', "seconds a number above 0"),
        (
            '[a]\ncommand = "true"\nafter = ["b"]\n[b]\ncommand = "true"\nafter = ["a"]\n',
            r"none of these could start: (a after b after a|b after a after b)",
        ),
    ],
)
def test_a_plan_that_cannot_be_run_is_one_line(tmp_path, text, message):
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(SystemExit, match=message) as ended:
        read_plan(tmp_path / "plan.toml")
    assert "\n" not in str(ended.value).strip()


def test_a_plan_that_is_not_there(tmp_path):
    with pytest.raises(SystemExit, match="cannot be read"):
        read_plan(tmp_path / "plan.toml")


def test_a_damaged_summary_is_named(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "summary.json").write_text("[1")
    with pytest.raises(SystemExit, match=r"summary.json: is damaged; remove it"):
        run(tmp_path, '[a]\ncommand = "true"\n')
