"""A job's kernels, compiled before it starts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from flame.cli.parse import parse_args, to_toml
from flame.launch.caches import inductor_cache
from flame.utils import warmup
from flame.utils.warmup import Caches, report, shorten, write_rows

JOB = ["--job.config_file", "configs/debug.toml"]


def test_a_step_of_the_job_reads_and_keeps_nothing(tmp_path):
    seed = ["--checkpoint.create_seed_checkpoint", "--checkpoint.load_step", "5"]
    job = parse_args([*JOB, "--training.data_dir", "x", *seed, "--job.sample_prompt", "a"])
    shapes = (job.training.seq_len, job.training.context_len, job.training.batch_size, job.model)
    shorten(job, tmp_path)
    (tmp_path / "rows.jsonl").touch()
    path = tmp_path / "job.toml"
    path.write_text(to_toml(job))
    step = parse_args(["--job.config_file", str(path)])
    training = step.training
    assert (training.seq_len, training.context_len, training.batch_size, step.model) == shapes
    assert (training.steps, training.dataset, training.data_dir) == (1, [str(tmp_path / "rows.jsonl")], [])
    assert not step.checkpoint.enable_checkpoint and not step.checkpoint.export_hf
    assert not step.checkpoint.create_seed_checkpoint and not step.job.sample_prompt
    assert Path(step.job.dump_folder).is_relative_to(tmp_path)


def test_rows_are_documents_of_all_lengths(tmp_path):
    write_rows(tmp_path / "rows.jsonl", longest=1000)
    lengths = [len(json.loads(line)["text"].split()) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert min(lengths) < 20 and max(lengths) > 1000 and len(set(lengths)) == len(lengths)


def write_result(folder: Path) -> Path:
    def config(size: int) -> dict:
        return {"kwargs": {"B": size}, "num_warps": 4, "num_stages": 3, "num_ctas": 1}

    path = folder / "add_kernel.autotune.json"
    path.write_text(
        json.dumps({"key": [1], "configs_timings": [[config(64), [0.25, 0, 0]], [config(128), [0.5, 0, 0]]]})
    )
    return path


def test_what_was_added_is_told(tmp_path):
    before = Caches(frozenset({tmp_path / "old.cubin"}), frozenset(), frozenset())
    kernels = {tmp_path / "a" / "add_kernel.cubin", tmp_path / "b" / "add_kernel.cubin", tmp_path / "c" / "plain.cubin"}
    after = Caches(before.kernels | kernels, frozenset({write_result(tmp_path)}), frozenset())
    assert report(before, after, 61.4) == [
        "3 kernels compiled, 1 tuned, 0 graphs compiled in 61 s",
        "  add_kernel: B 64, num_warps 4, num_stages 3: 0.250 ms, of 2 candidates",
        "  plain: 1 compiled",
    ]
    assert report(after, after, 9.6) == ["nothing to do: what this job needs is there already (10 s)"]


def test_a_warm_up_is_a_run_of_the_launcher(tmp_path, monkeypatch, capsys):
    cache = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache / "triton"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    started = []

    def launch(argv):
        started.append(parse_args(argv))
        (cache / "triton" / "a").mkdir(exist_ok=True)
        (cache / "triton" / "a" / "k.cubin").touch()
        return len(started) // 3  # the third fails

    monkeypatch.setattr("flame.launch.launcher.main", launch)
    words = [*JOB, "--job.cache_dir", str(cache)]
    assert warmup.main(words) == 0
    assert capsys.readouterr().out.startswith("1 kernels compiled, 0 tuned")
    assert warmup.main(words) == 0
    assert capsys.readouterr().out.startswith("nothing to do")
    assert warmup.main(words) == 1
    assert capsys.readouterr().out == ""
    assert started[0].training.steps == 1


def test_a_wrong_job_is_refused(capsys):
    assert warmup.main(["--model.config", "no/such/file.json"]) == 2
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize("plan", ["--job.dry_run", "--memory_estimation.enabled"])
def test_a_plan_warms_nothing(plan, capsys):
    assert warmup.main([*JOB, plan]) == 2
    assert "a warm-up trains a step" in capsys.readouterr().err


def test_graphs_of_before_are_not_this_job_s(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    graphs = inductor_cache({}) / "fxgraph" / "a" / "b"
    graphs.mkdir(parents=True)
    (graphs / "old").touch()

    def launch(argv):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(inductor_cache({})))  # as torch does when it compiles
        (graphs / f"new{len(os.listdir(graphs))}").touch()
        return 0

    monkeypatch.setattr("flame.launch.launcher.main", launch)
    assert warmup.main(JOB) == 0
    assert capsys.readouterr().out.startswith("0 kernels compiled, 0 tuned, 1 graphs compiled")


@pytest.mark.gpu
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_the_second_warm_up_has_nothing_to_do(tmp_path, monkeypatch, capsys):
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    words = [*JOB, "--model.config", "configs/debug/gla.json", "--job.cache_dir", str(tmp_path / "cache")]
    assert warmup.main(words) == 0
    told = capsys.readouterr().out
    assert "chunk_fwd_kernel_h: " in told and "nothing to do" not in told
    assert warmup.main(words) == 0
    assert "nothing to do" in capsys.readouterr().out
