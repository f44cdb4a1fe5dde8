"""Weights & Biases: one W&B run per run folder, however often the job is restarted."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from flame.errors import UserError

logger = logging.getLogger(__name__)

ID_FILE = "wandb_run_id"


class WandbWriter:
    """Send one rank's rows to its W&B run; rank 0's is the run of ``dump_folder``, the others' are grouped with it.

    The run's id stands in ``{dump_folder}/wandb_run_id`` (or in ``WANDB_RUN_ID``), so that a restarted job goes on
    with the same run, offline too. ``WANDB_PROJECT`` ("flame" by default), ``WANDB_NAME``, ``WANDB_MODE`` and the other
    ``WANDB_*`` variables act as W&B documents them. W&B takes each step once: those that it holds already and that a
    restart trains again keep their first values there.

    Raises:
        UserError: wandb is not installed, or the run cannot be started (not logged in, no network).
    """

    def __init__(self, dump_folder: str | Path, job_config: dict, rank: int = 0, last_step: int = 0):
        dump_folder = Path(dump_folder).resolve()
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                f"metrics.enable_wandb: wandb cannot be imported ({error}); `pip install wandb` or turn it off"
            ) from error
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "flame"),
                name=os.environ.get("WANDB_NAME", dump_folder.name) + suffix(rank),
                group=os.environ.get("WANDB_RUN_GROUP", dump_folder.name),
                id=run_id(dump_folder, rank),
                resume="allow",
                dir=dump_folder,
                config=job_config,
                settings=wandb.Settings(quiet=True),
            )
        except (wandb.Error, OSError) as error:
            raise UserError(
                f"metrics.enable_wandb: W&B did not start: {error}. Run `wandb login` or set WANDB_API_KEY; "
                "WANDB_MODE=offline keeps the data for a later `wandb sync`; --no-metrics.enable_wandb turns it off"
            ) from error
        self._failed = False
        self._first_new_step = self._run.starting_step  # 0 for a new run, and always when offline
        self._report_start(dump_folder, last_step)

    @property
    def id(self) -> str:
        return self._run.id

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Send ``scalars`` (tag -> value). The first failure is reported and ends the sending, not the training."""
        if self._failed or step < self._first_new_step:
            return
        try:
            self._run.log(scalars, step=step)
        except Exception as error:  # whatever breaks in W&B, a run of weeks must outlive it
            self._failed = True
            logger.warning(
                "W&B failed at step %d and gets nothing from now on; metrics.jsonl goes on: %s: %s",
                step,
                type(error).__name__,
                error,
            )

    def close(self) -> None:
        self._run.finish()

    def _report_start(self, dump_folder: Path, last_step: int) -> None:
        logger.info("W&B run %s", self.id)
        if self._first_new_step > last_step + 1:
            logger.info(
                "W&B run %s holds steps up to %d already and gets only later ones; remove %s to begin a new run",
                self.id,
                self._first_new_step - 1,
                dump_folder / ID_FILE,
            )


def run_id(dump_folder: Path, rank: int = 0) -> str:
    """The W&B run id of a run folder and rank, made and written down when there is none yet."""
    if chosen := os.environ.get("WANDB_RUN_ID"):
        return chosen + suffix(rank)
    path = dump_folder / (ID_FILE + suffix(rank))
    if path.exists() and (known := path.read_text(encoding="utf-8").strip()):
        return known
    dump_folder.mkdir(parents=True, exist_ok=True)
    new = secrets.token_hex(4)
    path.write_text(new + "\n", encoding="utf-8")
    return new


def suffix(rank: int) -> str:
    return f"-rank{rank}" if rank else ""
