"""Log lines of flame: who may write to the console, and how a training step reads there."""

from __future__ import annotations

import logging
import math
import os
import sys
from pathlib import Path

from flame.quiet import silence_known_noise

LOGGER_NAME = "flame"
HANDLER_NAME = "flame-console"
TORCHRUN_PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"

DIM, CYAN, GREEN, YELLOW, RED = "2", "36", "32", "33", "31"
LEVEL_COLORS = {logging.WARNING: YELLOW, logging.ERROR: RED, logging.CRITICAL: RED}


def setup_logging(rank: int = 0, local_rank: int = 0, *, color: bool = True) -> None:
    """Send the ``flame`` loggers (``logging.getLogger(__name__)`` in every module) to standard output.

    Rank 0 and the local ranks named in the environment variable ``LOG_RANK`` ("0" or "0,3"; 0 by default) write
    everything, the others warnings and errors only; torchrun keeps all of it in files and shows the ranks of
    ``LOG_RANK``. A line tells its rank where more than one may write or the writer is not rank 0, unless torchrun was
    told to put something before every line itself. What other libraries say in every healthy run is silenced
    (``flame.quiet``).

    Args:
        rank: of this process among all.
        local_rank: of this process on its node.
        color: whether colours are wanted; they are used on a terminal, or anywhere when ``FORCE_COLOR`` is set, and
            never when ``NO_COLOR`` is.
    """
    log_ranks = _log_ranks()
    shows_rank = (rank != 0 or len(log_ranks) > 1) and TORCHRUN_PREFIX not in os.environ
    handler = logging.StreamHandler(sys.stdout)
    handler.name = HANDLER_NAME
    handler.setFormatter(ConsoleFormatter(rank if shows_rank else None, color and has_colors(sys.stdout)))
    logger = logging.getLogger(LOGGER_NAME)
    for old in [old for old in logger.handlers if old.name == HANDLER_NAME]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if rank == 0 or local_rank in log_ranks else logging.WARNING)
    logger.propagate = False
    silence_known_noise()


def log_to_file(path: Path) -> None:
    """Append what the console shows to a file too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger(LOGGER_NAME)
    for old in [old for old in logger.handlers if isinstance(old, logging.FileHandler)]:
        logger.removeHandler(old)
        old.close()
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(ConsoleFormatter())
    logger.addHandler(handler)


class ConsoleFormatter(logging.Formatter):
    """``20:15:04 message``, with the level named from WARNING on and the rank where it helps."""

    def __init__(self, rank: int | None = None, color: bool = False):
        super().__init__(datefmt="%H:%M:%S")
        self._prefix = "" if rank is None else f"[rank {rank}] "
        self.color = color

    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        if record.levelno >= logging.WARNING:
            level = paint(f"{record.levelname.lower()}:", LEVEL_COLORS.get(record.levelno), self.color)
            message = f"{level} {message}"
        return f"{paint(self.formatTime(record, self.datefmt), DIM, self.color)} {self._prefix}{message}"


def step_line(row: dict, total_steps: int, eta_s: float | None = None, color: bool = False) -> str:
    """One line for the logged step ``row`` (keys as in ``metrics.jsonl``) of ``total_steps``.

    ``step  40/400  loss  5.4321  grad   0.812  lr 9.80e-03    4,312 tok/s  mfu 41.2%  mem 1.21 GiB  data 0.4%  eta 9s``

    A number that the row lacks is left out; NaN is shown as such.
    """
    parts = [_step_label(row, total_steps, color)]
    for key, text, code in STEP_PARTS:
        if row.get(key) is not None:
            parts.append(paint(text.format(row[key]), code, color))
    if row.get("skipped_steps"):
        parts.append(paint(f"skipped {row['skipped_steps']}", YELLOW, color))
    if eta_s is not None:
        parts.append(paint(f"eta {format_duration(eta_s)}", DIM, color))
    return "  ".join(parts)


def validation_line(row: dict, total_steps: int, color: bool = False) -> str:
    """One line for a validation: ``step  40/400  validation: loss 5.1234, perplexity 167.9``."""
    step = _step_label(row, total_steps, color)
    return f"{step}  {paint('validation: loss {val_loss:.4f}, perplexity {val_ppl:.2f}'.format(**row), GREEN, color)}"


def _step_label(row: dict, total_steps: int, color: bool) -> str:
    width = len(str(total_steps))
    return paint(f"step {row['step']:>{width}}/{total_steps}", CYAN, color)


# (key, how it reads, colour)
STEP_PARTS = (
    ("loss", "loss {:7.4f}", GREEN),
    ("grad_norm", "grad {:7.3f}", None),
    ("lr", "lr {:.2e}", None),
    ("tps", "{:>7,.0f} tok/s", None),
    ("mfu", "mfu {:.1%}", None),
    ("memory_gib", "mem {:.2f} GiB", None),
    ("data_time_pct", "data {:.1f}%", None),
)


def format_duration(seconds: float) -> str:
    """``3d 4h``, ``2h 05m``, ``1m 12s`` or ``9s``."""
    if not math.isfinite(seconds):
        return "?"
    minutes, secs = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {secs:02d}s" if minutes else f"{secs}s"


def paint(text: str, code: str | None, color: bool) -> str:
    return f"\033[{code}m{text}\033[0m" if color and code else text


def has_colors(stream) -> bool:
    """Whether ``stream`` shows colours; ``NO_COLOR`` and ``FORCE_COLOR`` overrule the terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def _log_ranks() -> set[int]:
    words = os.environ.get("LOG_RANK", "0").replace(",", " ").split()
    return {int(word) for word in words if word.isdigit()} or {0}
