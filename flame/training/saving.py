"""When a run saves, and what becomes of a checkpoint: on the disk at once, in the background, or not at all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from flame.checkpoint.background import Save
from flame.checkpoint.manager import CheckpointManager
from flame.checkpoint.writer import SaveError
from flame.config import Checkpoint
from flame.errors import UserError
from flame.parallel.distributed import Distributed

logger = logging.getLogger(__name__)

NOTICEABLE_SECONDS = 0.05  # a shorter wait for the save before is not worth a warning


@dataclass
class Saves:
    """The checkpoints that a run makes. All ranks call every method alike.

    Attributes:
        sync_metrics: puts the logged rows on the main rank's disk, so that no checkpoint is ahead of them; raises
            UserError when it cannot.
        saved_step: the step of the newest checkpoint that this process loaded or knows to be on the disk, −1 for none.
    """

    checkpoints: CheckpointManager
    section: Checkpoint
    dist: Distributed
    sync_metrics: Callable[[], None]
    saved_step: int = -1
    _begun_at: float = field(default_factory=time.monotonic)

    @property
    def is_async(self) -> bool:
        return self.checkpoints.background is not None

    def is_due(self, step: int) -> bool:
        """Whether ``checkpoint.interval`` is over after this step; rank 0's clock decides for all."""
        if self.section.interval_type == "steps":
            return step % self.section.interval == 0
        return bool(self.dist.broadcast(time.monotonic() - self._begun_at >= self.section.interval))

    def save(self, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], last: bool) -> None:
        """Save, unless that is done; on return the checkpoint is on the disk. A save under way is waited for.

        Args:
            last: the run is over, so that ``checkpoint.last_save_model_weights_only`` applies.

        Raises:
            SaveError: it could not be written.
        """
        self._begun_at = time.monotonic()
        self._report(self.checkpoints.finish_save())
        if step == self.saved_step:
            return
        self._sync_metrics(step)
        weights_only = last and self.section.last_save_model_weights_only
        self.checkpoints.save(step, tensors, state, weights_only, self.section.export_dtype)
        self.saved_step = step
        logger.info("checkpoint of step %d saved in %.1f s", step, time.monotonic() - self._begun_at)

    def try_save(self, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Save between steps, in the background where ``checkpoint.async_mode`` says so.

        A checkpoint that cannot be written (a full disk) is reported, and tried again when the next one is due.

        Raises:
            UserError: no later one could be written either: the nodes do not share the folder.
        """
        try:
            if not self.is_async:
                self.save(step, tensors, state, last=False)
                return
            self._begun_at = time.monotonic()
            self._wait_for_save_before(step)
            self._sync_metrics(step)
            self.checkpoints.start_save(step, tensors, state)
        except SaveError as error:
            self._report_failure(error)

    def report_finished(self) -> None:
        """Say what became of a save in the background, as soon as it is known; to be called after each step."""
        self._report(self.checkpoints.take_finished())

    def close(self, timeout: float) -> None:
        """Give a save under way ``timeout`` seconds to come to its end; raises nothing."""
        save = self.checkpoints.finish_save(timeout)
        if save is not None and save.error is not None:
            logger.error("%s", save.error)
        else:
            self._report(save)

    def _wait_for_save_before(self, step: int) -> None:
        """Let a save under way come to its end before that of ``step`` begins, and say how long training waited."""
        self.report_finished()  # what is still under way after this has to be waited for
        started = time.monotonic()
        save = self.checkpoints.finish_save()
        waited = time.monotonic() - started
        interval, unit = self.section.interval, self.section.interval_type
        if save is not None and self.dist.is_main and waited >= NOTICEABLE_SECONDS:
            logger.warning(
                "training waited %.2f s to save step %d, since step %d was still being saved: a longer "
                "checkpoint.interval (%d %s) or a faster disk helps",
                waited,
                step,
                save.step,
                interval,
                unit if interval > 1 else unit.removesuffix("s"),
            )
        self._report(save)

    def _sync_metrics(self, step: int) -> None:
        try:
            self.dist.on_main(self.sync_metrics)
        except UserError as error:
            raise SaveError(f"checkpoint of step {step} was not saved: {error}") from error

    def _report(self, save: Save | None) -> None:
        if save is None:
            return
        if isinstance(save.error, SaveError):
            self._report_failure(save.error)
        elif save.error is not None:
            raise save.error
        else:
            self.saved_step = save.step
            logger.info(
                "checkpoint of step %d saved in %.1f s; training waited %.2f s for its copy",
                save.step,
                save.total_seconds,
                save.blocked_seconds,
            )

    def _report_failure(self, error: SaveError) -> None:
        if self.dist.is_main:
            logger.error(
                "%s. Training goes on; the next try is after another checkpoint.interval (%d %s), and the last "
                "checkpoint is %s",
                error,
                self.section.interval,
                self.section.interval_type,
                self.describe_last(),
            )

    def describe_last(self) -> str:
        """The newest checkpoint, in words."""
        return "none" if self.saved_step < 0 else f"step {self.saved_step}"
