"""Whole runs as a user types them: ``bash train.sh …``, the demo to its end, the commands of the README."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from flame.launch import exit_codes
from tests.processes import left_of
from tests.runs.harness import ROOT, Job, launch, run_ranks, train_all, user_environment

NUM_DEMO_STEPS = 400


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Job:
    """The demo, whole: `bash train.sh` with nothing changed but its folder."""
    job = Job(tmp_path_factory.mktemp("demo") / "run")
    done = launch("--job.config_file", "configs/debug.toml", "--job.dump_folder", str(job.folder), timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (job.folder / "console.txt").write_text(done.stdout + done.stderr)
    return job


def test_demo_learns(demo):
    rows = demo.rows()
    assert 8.2 < rows[0]["loss"] < 8.6, "an untrained model is as good as a guess among 4,096 tokens: ln 4096 = 8.3"
    last = [row["loss"] for row in rows if row["step"] > NUM_DEMO_STEPS - 20]
    assert sum(last) / len(last) < 5
    assert rows[-1]["step"] == NUM_DEMO_STEPS


def test_demo_metrics_have_all_keys(demo):
    keys = (
        "step loss max_loss grad_norm lr tokens tps tflops mfu memory_gib data_time_pct step_time_s skipped_steps time"
    )
    assert all(row.keys() >= set(keys.split()) for row in demo.rows())
    assert demo.rows()[-1]["tokens"] == NUM_DEMO_STEPS * 1024


def test_demo_leaves_what_the_readme_says(demo):
    names = {path.name for path in demo.folder.iterdir()}
    expected = "config.toml model_config.json tokenizer metrics.jsonl loss.svg tb logs env.json checkpoint config.json"
    assert names >= {*expected.split(), "model.safetensors", "generation_config.json", "tokenizer.json"}
    assert sorted(path.name for path in (demo.folder / "checkpoint").glob("step-*")) == ["step-200", "step-400"]
    config = tomllib.loads((demo.folder / "config.toml").read_text())
    assert config["training"]["steps"] == NUM_DEMO_STEPS


def test_demo_console_is_readable(demo):
    console = (demo.folder / "console.txt").read_text()
    assert "a sample of the reloaded model:\ndef " in console
    for noise in ("Warning", "Traceback", "torchao", "it/s]"):
        assert noise not in console


def test_exported_folder_loads_and_predicts(demo):
    code = f"""
import torch
from flame.models.backend import setup_backend
from transformers import AutoModelForCausalLM, AutoTokenizer
setup_backend("auto", "cpu")
model = AutoModelForCausalLM.from_pretrained({str(demo.folder)!r})
tokenizer = AutoTokenizer.from_pretrained({str(demo.folder)!r})
ids = tokenizer("import os\\nimport sys\\n\\ndef main(", return_tensors="pt").input_ids
print(model(ids, labels=ids).loss.item())
"""
    assert float(run_python("-c", code)) < 5.5


def test_a_finished_run_says_so(demo):
    done = launch("--job.config_file", str(demo.folder / "config.toml"))
    assert done.returncode == 0
    assert "already finished: step 400 of 400" in done.stdout


def test_readme_conversions(demo, tmp_path):
    """DCP → HF → DCP → HF is bit-equal, and training starts from the converted step-0."""
    run_python(
        "-m", "flame.utils.convert_dcp_to_hf", "--path", demo.folder, "--step", "400", "--output", tmp_path / "a"
    )
    run = tmp_path / "other"
    run_python(
        "-m", "flame.utils.convert_hf_to_dcp", "--model", tmp_path / "a", "--checkpoint", run / "checkpoint/step-0"
    )
    run_python("-m", "flame.utils.convert_dcp_to_hf", "--path", run, "--output", tmp_path / "b")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert first.keys() == second.keys()
    assert all((first[name] == second[name]).all() for name in first)

    options = {"model.config": str(tmp_path / "a"), "training.steps": "2", "training.seq_len": "256"}
    job = Job(run, options | {"training.context_len": "256"})
    assert launch(*job.argv).returncode == 0
    assert job.series("loss")[0] < 6, "the weights are the demo's, not new ones"


def test_starting_from_a_hugging_face_folder_with_part_left_out(demo, tmp_path):
    options = {
        "model.config": str(demo.folder),
        "training.steps": "1",
        "checkpoint.initial_load_path": str(demo.folder),
    }
    whole = Job(tmp_path / "whole", options)
    without_head = Job(tmp_path / "part", options | {"checkpoint.exclude_from_loading": "lm_head"})
    train_all([whole, without_head])
    assert whole.series("loss")[0] < 6 < without_head.series("loss")[0]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_sigterm_saves_and_the_run_goes_on(tmp_path, num_processes):
    job = Job(tmp_path / "run", {"training.steps": "100000", "training.num_workers": "1"})
    process = start(job, num_processes)
    wait_until(lambda: (job.folder / "metrics.jsonl").exists() and len(job.rows()) > 2, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == exit_codes.PREEMPTED
    last = job.rows()[-1]["step"]
    assert [path.name for path in (job.folder / "checkpoint").glob("step-*")] == [f"step-{last}"]
    longer = Job(job.folder, {"training.steps": str(last + 2)})
    assert launch(*longer.argv, NGPU=str(num_processes)).returncode == 0
    assert longer.series("step") == list(range(1, last + 3))


def test_a_bad_job_says_so_and_leaves_the_run_folder_alone(demo):
    """A step without a checkpoint, which names those there are, and another model than that of the checkpoints."""
    job_file = ["--job.config_file", str(demo.folder / "config.toml")]
    jobs = [
        SimpleNamespace(argv=[*job_file, "--checkpoint.load_step=999"], fault=""),
        SimpleNamespace(argv=[*job_file, "--model.config=configs/debug/gla.json", "--training.steps=500"], fault=""),
    ]
    before = (demo.folder / "model_config.json").read_text(), (demo.folder / "config.toml").read_text()
    codes, (output,) = run_ranks(jobs, 1)
    assert codes == [[exit_codes.USER_ERROR] * 2]
    assert "200, 400" in output and "model_type = 'gla'" in output
    assert "Traceback" not in output
    assert before == ((demo.folder / "model_config.json").read_text(), (demo.folder / "config.toml").read_text())


def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    options = {"training.num_workers": "1", "training.steps": "30", "checkpoint.interval": "5"}
    whole, killed = Job(tmp_path / "whole", options), Job(tmp_path / "killed", options)
    assert launch(*whole.argv).returncode == 0
    process = start(killed, 1)
    wait_until(lambda: (killed.folder / "checkpoint" / "step-5").exists(), process)
    process.kill()
    process.wait()
    assert launch(*killed.argv).returncode == 0
    for key in ("step", "loss", "grad_norm"):
        assert killed.series(key) == whole.series(key)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
def test_a_killed_data_worker_ends_all_ranks_and_says_so(tmp_path):
    job = Job(tmp_path, {"training.num_workers": "1", "training.steps": "100000", "checkpoint.interval": "100000"})
    with (tmp_path / "console").open("w") as console:
        process = start(job, 2, console)
        wait_until(lambda: (job.folder / "metrics.jsonl").exists() and len(job.rows()) > 2, process)
        workers = data_workers(process.pid)
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        assert process.wait(60) == exit_codes.CRASH
    text = (tmp_path / "console").read_text()
    assert f"a data worker died (process {workers[0]}: exit code -9;" in text and "--training.num_workers" in text
    assert "DataLoader worker" not in text  # torch's own report, which comes with a traceback
    # torch's workers look every five seconds whether their parent is there.
    assert not left_of(*workers, seconds=10), "a worker is left behind"


def data_workers(root: int) -> list[int]:
    """Descendants of a process that were forked and run their parent's program on."""
    parents, programs = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            programs[int(entry.name)] = (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended

    def descends(process: int) -> bool:
        return process == root or (process in parents and descends(parents[process]))

    return [each for each in parents if descends(each) and programs[each] == programs.get(parents[each])]


def start(job: Job, num_processes: int, console=subprocess.DEVNULL) -> subprocess.Popen:
    """``bash train.sh`` in the background."""
    return subprocess.Popen(
        ["bash", str(ROOT / "train.sh"), *job.argv],
        env=user_environment(NGPU=str(num_processes)),
        stdout=console,
        stderr=subprocess.STDOUT,
    )


def wait_until(condition, process: subprocess.Popen, timeout: float = 180) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, f"the run ended with {process.returncode}"
        assert time.monotonic() < deadline, "the run did not get there in time"
        time.sleep(0.05)


def run_python(*arguments: object) -> str:
    """A Python command from the checkout's root; its standard output."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
