"""A training run between its steps: what it holds, and how it is logged, saved and closed."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from flame import __version__
from flame.checkpoint.manager import CheckpointManager
from flame.checkpoint.names import model_tensors, optimizer_tensors
from flame.config import JobConfig
from flame.data.batch import Batch, combine_digests
from flame.data.prefetch import DevicePrefetcher
from flame.data.state import merge_state_dicts
from flame.errors import UserError, WorkerDied
from flame.metrics.logger import MetricLogger
from flame.metrics.meter import StepMeter
from flame.models.flops import FlopCounter
from flame.parallel.distributed import Distributed
from flame.training.lock import RunFolderLock
from flame.training.preemption import StopRequest
from flame.training.profiling import Profiler
from flame.training.restore import hyperparameters
from flame.training.runtime import GarbageCollector, seconds_since_start

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """Everything that the training loop works with.

    Attributes:
        step: training steps done.
        lr: learning rate of the newest step.
        saved_step: the step of the newest checkpoint that this process saved or loaded, −1 for none.
        parameters: the trainable parameters, in the model's order.
    """

    config: JobConfig
    dist: Distributed
    tokenizer: PreTrainedTokenizerBase
    model_config: PretrainedConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: DevicePrefetcher
    flops: FlopCounter
    checkpoints: CheckpointManager | None
    metrics: MetricLogger
    meter: StepMeter
    profiler: Profiler
    gc: GarbageCollector
    stop_request: StopRequest
    lock: RunFolderLock | None
    step: int = 0
    lr: float = 0.0
    saved_step: int = -1
    parameters: list[nn.Parameter] = field(init=False)
    _first_step: int = field(init=False)
    _saved_at: float = field(init=False)
    _data_hash: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._first_step = self.step + 1
        self._saved_at = time.monotonic()

    @property
    def dump_folder(self) -> Path:
        return Path(self.config.job.dump_folder)

    @property
    def is_first_step(self) -> bool:
        """Whether the current step is the first that this process trains."""
        return self.step == self._first_step

    @property
    def is_log_step(self) -> bool:
        """Whether the current step is logged; the first and the last always are."""
        last = self.config.training.steps
        return self.step % self.config.metrics.log_freq == 0 or self.is_first_step or self.step == last

    def next_batches(self) -> list[Batch] | None:
        """This rank's micro-batches of the next step, or None on all ranks when ``training.max_epochs`` is over."""
        try:
            batches = self.data.next_step()
        except StopIteration:
            return None
        if self.config.training.log_data_hash:
            self._data_hash = self._hash_data(batches)
        return batches

    def _hash_data(self, batches: list[Batch]) -> str:
        """One hash of the step's sequences in global order, whatever rank each of them is on."""
        own = {number: digest for batch in batches for number, digest in zip(batch.numbers, batch.digests, strict=True)}
        return combine_digests({number: digest for part in self.dist.gather(own) for number, digest in part.items()})

    def log_first_step(self) -> None:
        """Say how long the start took; the first step includes compilation and tuning."""
        if self.dist.device.type == "cuda":
            torch.cuda.synchronize(self.dist.device)
        logger.info("first step done %.1f s after the process began", seconds_since_start())

    def log_step(self) -> None:
        """Fetch the interval's numbers from the device and write them down.

        Raises:
            UserError: ``training.max_consecutive_skips`` steps in a row had no finite gradient.
        """
        row: dict[str, Any] = {"step": self.step} | self.meter.collect() | {"lr": self.lr, "epochs": self.data.epochs()}
        row["skipped_rows"] = int(self.dist.sum(torch.tensor(self.data.num_skipped_rows)))
        if self._data_hash is not None:
            row["data_hash"] = self._data_hash
        self.metrics.log(row)
        if not math.isfinite(row["loss"]):
            logger.warning(
                "the loss is not finite: a lower optimizer.lr, more warm-up or training.skip_nan_inf may help"
            )
        limit = self.config.training.max_consecutive_skips
        if self.meter.consecutive_skips >= limit:
            raise UserError(
                f"{self.meter.consecutive_skips} steps in a row had no finite gradient "
                f"(training.max_consecutive_skips = {limit}); the last checkpoint is "
                f"{self._describe_last_checkpoint()}; resume from an earlier step with another seed, a lower "
                "optimizer.lr or more warm-up"
            )

    def _describe_last_checkpoint(self) -> str:
        return "none" if self.checkpoints is None or self.saved_step < 0 else f"step {self.saved_step}"

    def should_save(self) -> bool:
        """Whether a checkpoint is due after this step; all ranks agree."""
        section = self.config.checkpoint
        if self.checkpoints is None or self.step == self.config.training.steps:
            return False
        if section.interval_type == "steps":
            return self.step % section.interval == 0
        return bool(self.dist.broadcast(time.monotonic() - self._saved_at >= section.interval))

    def save(self, last: bool = False) -> None:
        """Save a checkpoint of the current step.

        Args:
            last: the run is over, so that ``checkpoint.last_save_model_weights_only`` applies.
        """
        if self.checkpoints is None:
            return
        section = self.config.checkpoint
        weights_only = last and section.last_save_model_weights_only
        data_state = merge_state_dicts(self.dist.gather(self.data.state_dict()))
        tensors = model_tensors(self.model) | optimizer_tensors(self.model, self.optimizer)
        self.metrics.sync()
        started = time.monotonic()
        with self.meter.paused():
            self.checkpoints.save(self.step, tensors, self._train_state(data_state), weights_only, section.export_dtype)
        self.saved_step, self._saved_at = self.step, time.monotonic()
        logger.info("checkpoint of step %d saved in %.1f s", self.step, self._saved_at - started)

    def _train_state(self, data_state: dict) -> dict[str, Any]:
        """What a checkpoint holds besides tensors, as plain JSON data."""
        return {
            "flame_version": __version__,
            "step": self.step,
            "meter": self.meter.state_dict(),
            "dataloader": data_state,
            "hyperparameters": hyperparameters(self.config, self.dist.world_size),
        }

    def end_step(self) -> None:
        """Housekeeping after a step."""
        self.profiler.step()
        self.gc.step(self.step)

    def __enter__(self) -> Run:
        self.profiler.__enter__()
        self.stop_request.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop workers and writers.

        Raises:
            WorkerDied: a data worker was killed, which torch reports by a RuntimeError in whatever runs at that moment.
        """
        error = exception[1]
        death = self.data.dead_workers() if isinstance(error, RuntimeError) else ""
        self.stop_request.__exit__(*exception)
        self.profiler.__exit__(*exception)
        self.data.close()
        self.metrics.close()
        self.gc.close()
        if self.lock is not None:
            self.lock.release()
        if death:
            raise WorkerDied(death) from error
