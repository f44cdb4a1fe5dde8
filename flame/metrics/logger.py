"""Hand each logged step to everything that wants it: metrics.jsonl, TensorBoard, W&B and the console."""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict
from pathlib import Path

from flame.config import JobConfig
from flame.metrics import jsonl
from flame.metrics.console import has_colors, step_line, validation_line
from flame.metrics.keys import scalars
from flame.metrics.tensorboard import TensorBoardWriter
from flame.metrics.wandb import WandbWriter

logger = logging.getLogger(__name__)


class MetricLogger:
    """The outlets of one rank.

    Rank 0 writes ``metrics.jsonl`` and the console lines, and TensorBoard (``{dump_folder}/{metrics.save_tb_folder}``)
    and W&B where they are on. With ``metrics.save_for_all_ranks`` every rank has a TensorBoard folder ``rank_N`` in
    there and a W&B run of its own. What an earlier attempt logged after ``last_step`` is removed, so that no step is
    missing or doubled.

    Args:
        config: the job; its ``metrics`` section says which outlets there are.
        dump_folder: the run folder.
        rank: of this process among all.
        last_step: the step of the loaded checkpoint, 0 for a new run.

    Raises:
        UserError: W&B is wanted and does not start.
    """

    def __init__(self, config: JobConfig, dump_folder: str | Path, *, rank: int = 0, last_step: int = 0):
        metrics, dump_folder = config.metrics, Path(dump_folder)
        self.rank = rank
        self.total_steps = config.training.steps
        self._color = not metrics.disable_color_printing and has_colors(sys.stdout)
        self._jsonl = jsonl.JsonlWriter(dump_folder / jsonl.FILE_NAME, last_step) if rank == 0 else None
        self._writers = _open_writers(config, dump_folder, rank, last_step)
        if self._jsonl and self._jsonl.num_removed:
            logger.info("%s: removed %d rows after step %d", jsonl.FILE_NAME, self._jsonl.num_removed, last_step)

    @property
    def active(self) -> bool:
        """Whether this rank writes anything; ``log`` does nothing where it is false."""
        return self._jsonl is not None or bool(self._writers)

    def log(self, row: dict) -> None:
        """Write one logged step or validation; ``row`` holds ``step`` and keys of ``flame.metrics.keys``."""
        if self._jsonl is not None:
            self._jsonl.write(row)
            if "loss" in row:
                logger.info(step_line(row, self.total_steps, self._eta(row), self._color))
            elif "val_loss" in row:
                logger.info(validation_line(row, self.total_steps, self._color))
        for writer in self._writers:
            writer.write(row["step"], scalars(row))

    def sync(self) -> None:
        """Put the rows on the disk; called before a checkpoint is published, so that none of its steps can be lost.

        Raises:
            UserError: the disk is full.
        """
        if self._jsonl is not None:
            self._jsonl.sync()

    def close(self) -> None:
        if self._jsonl is not None:
            self._jsonl.close()
        for writer in self._writers:
            writer.close()

    def _eta(self, row: dict) -> float | None:
        step_time = row.get("step_time_s")
        return None if step_time is None else step_time * (self.total_steps - row["step"])


def _open_writers(
    config: JobConfig, dump_folder: Path, rank: int, last_step: int
) -> list[TensorBoardWriter | WandbWriter]:
    metrics = config.metrics
    if rank != 0 and not metrics.save_for_all_ranks:
        return []
    writers: list[TensorBoardWriter | WandbWriter] = []
    if metrics.enable_tensorboard:
        folder = dump_folder / metrics.save_tb_folder
        writers.append(TensorBoardWriter(folder / f"rank_{rank}" if metrics.save_for_all_ranks else folder, last_step))
    if metrics.enable_wandb:
        writers.append(WandbWriter(dump_folder, asdict(config), rank, last_step))
    return writers
