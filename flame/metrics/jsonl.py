"""``metrics.jsonl``: one JSON object per logged step, readable while the run goes on and after any crash."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path

from flame.errors import UserError

logger = logging.getLogger(__name__)

FILE_NAME = "metrics.jsonl"


# What a full disk answers: no space, no quota, a file as large as the system lets it be.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class JsonlWriter:
    """Append rows to ``path``, starting after ``last_step``.

    Rows of later steps, which an earlier attempt wrote before it was stopped, are removed first: training goes on from
    ``last_step`` and writes them again. Every row reaches the operating system at once, so that a killed process loses
    none; ``sync`` also makes them outlive a power failure. On a full disk rows wait in memory for the next call.
    """

    def __init__(self, path: str | Path, last_step: int = 0):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.num_removed = trim(self.path, last_step)
        self._descriptor: int | None = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._waiting = b""

    def write(self, row: dict) -> None:
        """Append ``row``; NaN and infinities, which JSON does not know, become ``null``."""
        was_waiting = bool(self._waiting)
        self._waiting += (to_json(row) + "\n").encode()
        fault = self._drain()
        if fault and not was_waiting:
            logger.error("%s: %s; the rows are kept in memory until there is room", self.path, fault)

    def sync(self) -> None:
        """Wait until every row is on the disk.

        Raises:
            UserError: the disk is full.
        """
        if fault := self._drain():
            raise UserError(f"{self.path}: {fault}")
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is None:
            return
        fault = self._drain()
        os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = None
        if fault:
            logger.error("%s: %s; the last rows are lost", self.path, fault)

    def _drain(self) -> str:
        """Write what waits; the reason when the disk takes no more."""
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            return error.strerror
        return ""


def read_rows(path: str | Path) -> Iterator[dict]:
    """The rows of a metrics file in order; the torn last line of a killed run is left out.

    Raises:
        ValueError: a line other than the last is not a JSON object.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            row = _parse(line)
            if row is not None:
                yield row
            elif line.endswith("\n") and line.strip():
                raise ValueError(f"{path}: line {number} is not a JSON object")


def last_validation(path: str | Path) -> int:
    """The step of the last validation in a metrics file, -1 where there is none."""
    rows = read_rows(path) if Path(path).exists() else []
    return max((row["step"] for row in rows if "val_loss" in row), default=-1)


def trim(path: Path, last_step: int) -> int:
    """Remove the rows after ``last_step`` and a torn last line, in one atomic step; returns how many went."""
    if not path.exists():
        return 0
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.readlines()
    kept = [line for line in lines if line.endswith("\n") and _is_up_to(line, last_step)]
    if len(kept) == len(lines):
        return 0
    aside = path.with_name(path.name + ".tmp")
    with open(aside, "w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    return len(lines) - len(kept)


def to_json(row: dict) -> str:
    return json.dumps(_finite(row), allow_nan=False, ensure_ascii=False)


def _is_up_to(line: str, last_step: int) -> bool:
    row = _parse(line)
    return row is not None and row.get("step", 0) <= last_step


def _parse(line: str) -> dict | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
