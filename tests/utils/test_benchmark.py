"""The figures that utils/benchmark.py draws from a run's metrics and from a profiler's trace."""

from pathlib import Path

import pytest

from flame.cli.parse import parse_args
from flame.launch.caches import FOLDERS, set_up_caches
from flame.paths import find_resource
from utils import benchmark


def row(step, seconds, tps):
    return {
        "step": step,
        "step_time_s": seconds,
        "tps": tps,
        "mfu": tps / 1000,
        "memory_gib": 1.0 + step,
        "data_time_pct": 0.0,
        "loss": 9.0 - step,
    }


def test_steps_at_the_beginning_do_not_count():
    rows = [row(0, 60.0, 1.0)] + [row(step, 2.0, 100.0 + step) for step in range(1, 6)]
    result = benchmark.summarise(rows, 1, flops_ratio=1.5)
    assert (result["steps"], result["tokens_per_second"], result["step_time_s"]) == (6, 103.0, 2.0)
    assert result["mfu_torchtitan"] == pytest.approx(1.5 * result["mfu"])
    assert (result["first_loss"], result["memory_gib"]) == (9.0, 6.0)


def test_one_slow_step_in_twenty_is_the_95th_percentile():
    rows = [row(step, 9.0 if step == 7 else 1.0, 1.0) for step in range(20)]
    result = benchmark.summarise(rows, 0, 1.0)
    assert (result["step_time_s"], result["step_time_p95_s"]) == (1.0, 9.0)


def test_kernels_of_one_name_are_added_up_and_the_longest_comes_first():
    trace = [
        {"cat": "kernel", "name": "short", "dur": 500.0},
        {"cat": "kernel", "name": "long", "dur": 3000.0},
        {"cat": "kernel", "name": "short", "dur": 250.0},
        {"cat": "cpu_op", "name": "aten::mm", "dur": 9000.0},
        {"name": "no category"},
    ]
    assert benchmark.kernels_of(trace) == [
        {"name": "long", "calls": 1, "ms": 3.0},
        {"name": "short", "calls": 2, "ms": 0.75},
    ]


def test_idle_gaps_between_the_operations_of_a_device():
    def event(name: str, start: int, duration: int, category: str = "kernel") -> dict:
        return {"cat": category, "name": name, "ts": start, "dur": duration}

    trace = [
        event("on the host", 0, 9000, "cpu_op"),
        event("c", 2600, 100),
        event("a", 100, 2000),
        event("copy", 1000, 1500, "gpu_memcpy"),  # beside a, and longer
        event("b", 1500, 100),
        event("d", 3700, 100),
        {"name": "no time"},
    ]
    assert benchmark.idle_gaps_of(trace) == [
        {"ms": 1.0, "after": "c", "before": "d"},
        {"ms": 0.1, "after": "copy", "before": "c"},
    ]


def test_torchtitan_counts_all_pairs_of_attention():
    """The true count has half of them, and the same linear layers."""
    config = find_resource("configs/debug/transformer.json")
    short, long = benchmark.torchtitan_ratio(config, 64), benchmark.torchtitan_ratio(config, 65_536)
    assert 1 < short < long < 2


def test_the_job_options_of_the_user_come_last(tmp_path):
    options = benchmark.build_parser().parse_args(["--config", "configs/debug/gla.json"])
    options.job = ["--training.num_workers", "0"]
    arguments = benchmark.job_arguments(options, tmp_path / "run", {"training.dataset": "builtin:stdlib"}, 3)
    assert arguments == ["--job.config_file", str(tmp_path / "run.toml"), "--training.num_workers", "0"]

    config = parse_args(arguments)
    assert (config.training.num_workers, config.training.steps, config.training.varlen) == (0, 3, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--skip", "-1"], "-1: must be a whole number, at least 0"),
        (["--context_len", "0"], "0: must be a whole number, at least 1"),
        (["--json", "no/such/folder/a.json"], "must be a file in a folder that exists"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_trained(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--config", "configs/debug/gla.json", *options])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_job_that_trains_nothing_is_said(tmp_path):
    with pytest.raises(SystemExit, match=r"leave job\.dump_folder and job\.dry_run out"):
        benchmark.read_rows(tmp_path)


def test_validations_are_no_steps(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 8.0}\n{"step": 1, "val_loss": 8.1}\n')
    assert benchmark.read_rows(tmp_path) == [{"step": 1, "loss": 8.0}]


def test_a_cold_start_finds_no_cache_and_no_choice_of_the_users(tmp_path, monkeypatch):
    class Started(Exception):
        pass

    def train(arguments, environment):
        raise Started(parse_args(arguments), environment)

    monkeypatch.setattr(benchmark, "train", train)
    options = benchmark.build_parser().parse_args(["--config", str(find_resource("configs/gla_340M.json")), "--cold"])
    options.job = []
    with pytest.raises(Started) as started:
        benchmark.measure(options, tmp_path)
    config, environment = started.value.args
    assert set_up_caches(config.job.cache_dir, environment) == []  # nothing goes before it
    assert Path(config.job.cache_dir).is_relative_to(tmp_path)
    assert all(Path(environment[name]).is_relative_to(tmp_path) for name in FOLDERS)
