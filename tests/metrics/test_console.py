import logging

import pytest

from flame.metrics.console import ConsoleFormatter, format_duration, setup_logging, step_line

ROW = {
    "step": 40,
    "loss": 5.43211,
    "grad_norm": 0.812,
    "lr": 9.8e-3,
    "tps": 4312.4,
    "mfu": 0.412,
    "memory_gib": 1.214,
    "data_time_pct": 0.43,
    "skipped_steps": 0,
}


@pytest.fixture(autouse=True)
def restore_logger(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", raising=False)
    logger = logging.getLogger("flame")
    state = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = state


def test_step_line_reads_well():
    assert step_line(ROW, 400, eta_s=72) == (
        "step  40/400  loss  5.4321  grad   0.812  lr 9.80e-03    4,312 tok/s  mfu 41.2%  mem 1.21 GiB  data 0.4%"
        "  eta 1m 12s"
    )


def test_step_line_leaves_out_what_is_unknown():
    assert step_line({"step": 1, "loss": 2.0, "mfu": None}, 1) == "step 1/1  loss  2.0000"


def test_step_line_shows_skips_and_nan():
    line = step_line({"step": 1, "loss": float("nan"), "skipped_steps": 2}, 1)
    assert "nan" in line and "skipped 2" in line


def test_colors_only_where_wanted():
    assert "\033[" in step_line(ROW, 400, color=True)
    assert "\033[" not in step_line(ROW, 400)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(9.4, "9s"), (59.7, "1m 00s"), (72, "1m 12s"), (7500, "2h 05m"), (273600, "3d 4h"), (float("nan"), "?")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_formatter_names_level_and_rank():
    record = logging.LogRecord("flame.x", logging.WARNING, "x.py", 1, "low %s", ("disk",), None)
    assert ConsoleFormatter(rank=3).format(record).endswith(" [rank 3] warning: low disk")
    record.levelno = logging.INFO
    assert ConsoleFormatter().format(record).endswith(" low disk")


def test_rank_zero_writes_and_others_only_warn(monkeypatch, capsys):
    monkeypatch.delenv("LOG_RANK", raising=False)
    setup_logging(rank=0, local_rank=0)
    logging.getLogger("flame.data").info("hello")
    setup_logging(rank=1, local_rank=1)
    logging.getLogger("flame.data").info("unseen")
    logging.getLogger("flame.data").warning("trouble")
    out = capsys.readouterr().out
    assert "hello" in out and "unseen" not in out and "[rank 1] warning: trouble" in out
    assert out.count("hello") == 1


def test_log_rank_chooses_who_writes(monkeypatch, capsys):
    monkeypatch.setenv("LOG_RANK", "0,3")
    setup_logging(rank=3, local_rank=3)
    logging.getLogger("flame").info("third")
    assert "[rank 3] third" in capsys.readouterr().out


def test_rank_is_not_said_twice_under_torchrun(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank ${rank}] ")
    setup_logging(rank=1, local_rank=1)
    logging.getLogger("flame").warning("trouble")
    assert "rank" not in capsys.readouterr().out


def test_no_colors_off_a_terminal(monkeypatch, capsys):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    setup_logging()
    logging.getLogger("flame").warning("plain")
    assert "\033[" not in capsys.readouterr().out


def test_force_color_and_the_flag(monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    setup_logging(color=True)
    logging.getLogger("flame").warning("bright")
    assert "\033[" in capsys.readouterr().out
    setup_logging(color=False)
    logging.getLogger("flame").warning("flat")
    assert "\033[" not in capsys.readouterr().out
