import logging
import subprocess
import sys

import pytest

from flame.config import JobConfig
from flame.metrics.jsonl import read_rows
from flame.metrics.logger import MetricLogger


def make_config(**metrics):
    config = JobConfig()
    config.training.steps = 20
    for name, value in metrics.items():
        setattr(config.metrics, name, value)
    return config


def make_row(step):
    return {"step": step, "loss": 1 / step, "lr": 1e-3, "step_time_s": 0.5, "time": 0.0}


def log_steps(config, folder, steps, **options):
    metric_logger = MetricLogger(config, folder, **options)
    for step in steps:
        metric_logger.log(make_row(step))
    metric_logger.close()


def test_rows_go_to_jsonl_and_console(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="flame"):
        log_steps(make_config(), tmp_path, [1, 2])
    assert list(read_rows(tmp_path / "metrics.jsonl")) == [make_row(1), make_row(2)]
    assert "step  2/20" in caplog.text and "eta 9s" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


KILLED_RUN = """
import os, signal, sys
from flame.config import JobConfig
from flame.metrics.logger import MetricLogger
config = JobConfig()
config.metrics.enable_tensorboard = True
metric_logger = MetricLogger(config, sys.argv[1])
for step in range(1, 8):
    metric_logger.log({"step": step, "loss": 1 / step})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_run_loses_no_row_and_resumes_without_a_gap(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    killed = subprocess.run([sys.executable, "-c", KILLED_RUN, str(tmp_path)], capture_output=True)
    assert killed.returncode == -9
    log_steps(make_config(enable_tensorboard=True), tmp_path, range(7, 9), last_step=6)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == list(range(1, 9))
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    # Files begun within the same second, as only here, are read in any order.
    assert sorted(event.step for event in events.Scalars("train/loss")) == list(range(1, 9))


def test_resume_trims_every_outlet(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = make_config(enable_tensorboard=True)
    log_steps(config, tmp_path, range(1, 8))
    log_steps(config, tmp_path, range(5, 11), last_step=4)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == list(range(1, 11))
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 11))


def test_only_rank_zero_writes_by_default(tmp_path):
    metric_logger = MetricLogger(make_config(enable_tensorboard=True, enable_wandb=True), tmp_path, rank=1)
    metric_logger.log(make_row(1))
    metric_logger.close()
    assert not metric_logger.active
    assert not list(tmp_path.iterdir())


def test_all_ranks_have_tensorboard_folders_when_wanted(tmp_path):
    config = make_config(enable_tensorboard=True, save_for_all_ranks=True, save_tb_folder="events")
    for rank in range(2):
        log_steps(config, tmp_path, [1, 2], rank=rank)
    assert sorted(path.name for path in (tmp_path / "events").iterdir()) == ["rank_0", "rank_1"]
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]


def test_validation_rows_are_kept_and_have_a_line_of_their_own(tmp_path, caplog):
    metric_logger = MetricLogger(make_config(), tmp_path)
    with caplog.at_level(logging.INFO, logger="flame"):
        metric_logger.log({"step": 5, "val_loss": 2.0, "val_ppl": 7.4})
    metric_logger.close()
    assert list(read_rows(tmp_path / "metrics.jsonl")) == [{"step": 5, "val_loss": 2.0, "val_ppl": 7.4}]
    assert "step  5/20  validation: loss 2.0000, perplexity 7.40" in caplog.text


@pytest.mark.parametrize("enabled", [False, True])
def test_wandb_is_imported_only_when_enabled(tmp_path, monkeypatch, enabled):
    opened = []

    class Writer:
        id = "x"

        def __init__(self, *args):
            opened.append(args)

        def write(self, step, scalars):
            opened.append((step, scalars))

        def close(self):
            pass

    monkeypatch.setattr("flame.metrics.logger.WandbWriter", Writer)
    log_steps(make_config(enable_wandb=enabled), tmp_path, [3])
    assert bool(opened) == enabled
    if enabled:
        assert opened[-1] == (3, {"train/loss": 1 / 3, "train/lr": 1e-3, "speed/step_time_s": 0.5})
