"""A training run between its steps: what it holds, and how it is logged, saved and closed."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from flame import __version__
from flame.checkpoint.names import model_tensors, optimizer_tensors
from flame.config import JobConfig
from flame.data.batch import Batch, combine_digests
from flame.data.prefetch import DevicePrefetcher
from flame.data.state import merge_state_dicts
from flame.errors import UserError, WorkerDied
from flame.metrics.logger import MetricLogger
from flame.metrics.meter import Interval, StepMeter
from flame.models.flops import FlopCounter
from flame.parallel.clip import clip_gradients
from flame.parallel.context import ContextParallel
from flame.parallel.distributed import Distributed
from flame.parallel.pipeline import Pipeline
from flame.training.bad_steps import BadSteps
from flame.training.hang import StackDump
from flame.training.lock import RunFolderLock
from flame.training.preemption import Stopped, StopRequest
from flame.training.profiling import Profiler
from flame.training.restore import hyperparameters
from flame.training.runtime import GarbageCollector, seconds_since_start
from flame.training.saving import Saves

logger = logging.getLogger(__name__)

LAST_ROW_SECONDS = 10.0  # that a run which fails waits for the device to come to the last logged step


@dataclass(frozen=True)
class UnwrittenRow:
    """A logged step whose numbers the device may not have come to yet.

    Attributes:
        step: the training step.
        interval: the steps that the row sums up.
        extra: what the host adds to their numbers, by the keys of the row.
    """

    step: int
    interval: Interval
    extra: dict[str, Any]


@dataclass
class Run:
    """Everything that the training loop works with.

    Attributes:
        step: training steps done.
        validated_step: the step behind which the last validation was, -1 before the first.
        has_validated: this process has validated.
        lr: learning rate of the newest step.
        saves: the run's checkpoints, None with ``checkpoint.enable_checkpoint`` off.
        pipeline: what runs the model's stages when it is cut into some.
        context: the ranks that this rank shares its rows with.
        held_out: this rank's batches of a validation, step by step; none without ``validation.dataset``.
        parameters: the trainable parameters, in the model's order.
    """

    config: JobConfig
    dist: Distributed
    tokenizer: PreTrainedTokenizerBase
    model_config: PretrainedConfig
    model: nn.Module
    pipeline: Pipeline | None
    context: ContextParallel | None
    optimizer: torch.optim.Optimizer
    data: DevicePrefetcher
    held_out: list[list[Batch]]
    flops: FlopCounter
    saves: Saves | None
    metrics: MetricLogger
    meter: StepMeter
    bad_steps: BadSteps
    profiler: Profiler
    gc: GarbageCollector
    stacks: StackDump
    stop_request: StopRequest
    lock: RunFolderLock | None
    step: int = 0
    validated_step: int = -1
    lr: float = 0.0
    parameters: list[nn.Parameter] = field(init=False)
    has_validated: bool = field(init=False, default=False)
    _first_step: int = field(init=False)
    _data_hash: str | None = field(init=False, default=None)
    _unwritten: UnwrittenRow | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._first_step = self.step + 1

    @property
    def dump_folder(self) -> Path:
        return Path(self.config.job.dump_folder)

    @property
    def is_first_step(self) -> bool:
        """Whether the current step is the first that this process trains."""
        return self.step == self._first_step

    @property
    def has_trained(self) -> bool:
        """Whether this process has trained a step."""
        return self.step >= self._first_step

    @property
    def is_log_step(self) -> bool:
        """Whether the current step is logged; the first and the last always are."""
        last = self.config.training.steps
        return self.step % self.config.metrics.log_freq == 0 or self.is_first_step or self.step == last

    @property
    def is_ahead(self) -> bool:
        """Whether the host goes on to the next step while the device computes."""
        return self.dist.device.type == "cuda"

    def start_clock(self) -> None:
        """Have the stacks of all ranks written down if the step that begins takes longer than collectives may."""
        comm = self.config.comm
        self.stacks.arm(comm.train_timeout_seconds if self.has_trained else comm.init_timeout_seconds)

    def count_targets(self, batches: list[Batch]) -> int:
        """Targets whose losses this rank computes: none without the last stage of a pipeline."""
        if self.pipeline is not None and not self.pipeline.has_last:
            return 0
        return sum(self.context.count_targets(batch) if self.context else batch.num_valid for batch in batches)

    def clip_gradients(self) -> torch.Tensor:
        """Clip to ``training.max_norm``; returns the norm before, over all ranks' parameters."""
        max_norm = self.config.training.max_norm
        if self.pipeline is None:
            return clip_gradients(self.parameters, max_norm)
        return clip_gradients(self.parameters, max_norm, stages=self.pipeline.group, copies=self.pipeline.copies)

    def next_batches(self) -> list[Batch] | None:
        """This rank's micro-batches of the next step, or None on all ranks when ``training.max_epochs`` is over.

        Raises:
            Stopped: a single process was asked to stop.
        """
        try:
            with self.stop_request.interruptible(alone=self.dist.world_size == 1):
                batches = self.data.next_step()
        except StopIteration:
            return None
        if self.config.training.log_data_hash:
            self._data_hash = self._hash_data(batches)
        return batches

    def prefetch(self) -> None:
        """Fetch the next step's batches, unless a single process is asked to stop meanwhile."""
        with suppress(Stopped), self.stop_request.interruptible(alone=self.dist.world_size == 1):
            self.data.prefetch()

    def _hash_data(self, batches: list[Batch]) -> str:
        """One hash of the step's sequences in global order, whatever rank each of them is on."""
        own = {number: digest for batch in batches for number, digest in zip(batch.numbers, batch.digests, strict=True)}
        return combine_digests({number: digest for part in self.dist.gather(own) for number, digest in part.items()})

    def end_first_step(self) -> None:
        """Let go of what compilation and tuning have left, and say how long the start took, with them."""
        if self.dist.device.type == "cuda":
            torch.cuda.synchronize(self.dist.device)
        self.gc.collect()
        logger.info("first step done %.1f s after the process began", seconds_since_start())

    def log_step(self) -> None:
        """End the log interval. Its row is written now where the device is done with it, or else by ``write_row``.

        Raises:
            UserError: too many steps in a row were left out.
        """
        self.write_row()
        num_skipped_rows = self.dist.sum_over_data(torch.tensor(self.data.num_skipped_rows))
        extra = {"lr": self.lr, "epochs": self.data.epochs(), "skipped_rows": int(num_skipped_rows)}
        if self._data_hash is not None:
            extra["data_hash"] = self._data_hash
        self._unwritten = UnwrittenRow(self.step, self.meter.collect(), extra)
        if self.is_first_step or not self.is_ahead:
            self.write_row()

    def write_row(self) -> None:
        """Write the row of the last logged step, if there is one to be written; the device is waited for up to there.

        Called a step later, this costs no time: the device has that step's work to go on with. All ranks call it at the
        same steps.

        Raises:
            UserError: too many steps in a row were left out.
        """
        if self._unwritten is not None:
            step = self._unwritten.step
            self._write()
            self.check_bad_steps(up_to=step)

    def _write(self) -> None:
        """Write the row that is to be written."""
        unwritten, self._unwritten = self._unwritten, None
        row = {"step": unwritten.step} | self.meter.row(unwritten.interval) | unwritten.extra
        self.metrics.log(row)
        if not math.isfinite(row["loss"]):
            logger.warning(
                "the loss is not finite: a lower optimizer.lr, more warm-up or training.skip_nan_inf may help"
            )

    def _write_at_failure(self, error: BaseException | None) -> None:
        """Write the row that an error came before, if the device still comes to its numbers."""
        if self._unwritten is None:
            return
        seconds = math.inf if isinstance(error, UserError) else LAST_ROW_SECONDS  # the device is well, or may hang
        if self._unwritten.interval.sent.arrives_within(seconds):
            self._write()
        else:
            logger.warning("step %d is not in the metrics: the device did not come to its end", self._unwritten.step)

    def check_bad_steps(self, up_to: int = 0) -> None:
        """As ``BadSteps.check``, with what the user can do.

        Raises:
            UserError: too many steps in a row were left out.
        """
        try:
            self.bad_steps.check(up_to)
        except UserError as error:
            if self.meter.num_steps:
                self.log_step()
            self.write_row()
            last = self.saves.describe_last() if self.saves else "none"
            raise UserError(
                f"{error}; the last checkpoint is {last}; resume from an earlier step with another seed, a lower "
                "optimizer.lr or more warm-up"
            ) from error

    def should_validate(self) -> bool:
        """Whether a validation of the model as it stands is due, and not done: also one that an end has cut off."""
        step, section = self.step, self.config.validation
        return step > 0 and step % section.interval == 0 and self.should_validate_last()

    def should_validate_last(self) -> bool:
        """Whether the model as it stands has not been validated."""
        return bool(self.held_out) and self.validated_step != self.step

    def log_validation(self, loss: torch.Tensor) -> None:
        """Write a validation's row; ``loss`` is a scalar, in nats per token."""
        self.validated_step, self.has_validated = self.step, True
        row = {"step": self.step, "val_loss": loss.item(), "val_ppl": loss.exp().item(), "time": time.time()}
        self.metrics.log(row)

    def describe_data(self, batches: list[Batch]) -> str:
        """Where the data of the step in hand lie, and the command that shows them."""
        end = self.data.consumed.num_sequences
        start = end - sum(len(batch.numbers) for batch in batches) * self.dist.data_size
        load = f"--load_step {self.saves.saved_step} " if self.saves and self.saves.saved_step >= 0 else ""
        return (
            f"its data are the sequences {start} to {end - 1}: python -m flame.utils.inspect_data --job.config_file "
            f"{self.dump_folder / 'config.toml'} --dp_degree {self.dist.data_size} {load}--first_step {self.step}"
        )

    def should_save(self) -> bool:
        """Whether a checkpoint is due after this step; all ranks agree. The last step's is another matter."""
        return self.saves is not None and self.step < self.config.training.steps and self.saves.is_due(self.step)

    def save(self, last: bool = False) -> None:
        """Save a checkpoint of the current step; on return it is on the disk.

        Args:
            last: the run is over, so that ``checkpoint.last_save_model_weights_only`` applies.

        Raises:
            SaveError: it could not be written.
            UserError: too many steps in a row were left out.
        """
        self.write_row()  # while the clock runs: the device may hang
        self.stacks.disarm()
        if self.saves is not None:
            with self.meter.paused():
                self.saves.save(self.step, self._tensors(), self._train_state(), last)

    def try_save(self) -> None:
        """Save a checkpoint between steps; one that fails is reported and does not stop the run.

        Raises:
            UserError: too many steps in a row were left out, or see ``Saves.try_save``.
        """
        self.write_row()
        self.stacks.disarm()
        with nullcontext() if self.saves.is_async else self.meter.paused():
            self.saves.try_save(self.step, self._tensors(), self._train_state())

    def prepare_saves(self) -> None:
        """Take what saves in the background need, once the optimizer's state is there."""
        if self.saves is not None:
            self.saves.checkpoints.prepare(self._tensors())

    def wait_for_snapshot(self) -> None:
        """Wait until the parameters may change: a save in the background copies them first."""
        if self.saves is not None:
            self.saves.checkpoints.wait_for_snapshot()

    def _tensors(self) -> dict[str, torch.Tensor]:
        return model_tensors(self.model) | optimizer_tensors(self.model, self.optimizer)

    def _train_state(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors, as plain JSON data. Collective."""
        return {
            "flame_version": __version__,
            "step": self.step,
            "meter": self.meter.state_dict(),
            "bad_steps": self.bad_steps.state_dict(),
            "dataloader": merge_state_dicts(self.dist.gather_from_data(self.data.state_dict())),
            "hyperparameters": hyperparameters(self.config, self.dist.data_size),
        }

    def end_step(self) -> None:
        """Housekeeping after a step."""
        if self.saves is not None:
            self.saves.report_finished()
        self.profiler.step()
        self.gc.step(self.step)

    def __enter__(self) -> Run:
        self.profiler.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Write what is left to be written; stop workers and writers.

        Raises:
            WorkerDied: a data worker was killed, which torch reports by a RuntimeError in whatever runs at that moment.
        """
        error = exception[1]
        death = self.data.dead_workers() if isinstance(error, RuntimeError) else ""
        try:
            self._write_at_failure(error)
        finally:  # the device may fail at this moment too
            self._close(exception)
        if death:
            raise WorkerDied(death) from error

    def _close(self, exception: tuple[object, ...]) -> None:
        self.stacks.close()
        self.profiler.__exit__(*exception)
        if self.saves is not None:
            self.saves.close(self.config.checkpoint.preempt_timeout_seconds)
        self.data.close()
        self.metrics.close()
        self.gc.close()
        if self.lock is not None:
            self.lock.release()


def token_losses(run: Run, batches: list[Batch]) -> Iterator[torch.Tensor]:
    """The sum of each micro-batch's token losses on this rank; its backward belongs before the next is asked for."""
    for whole in batches:
        batch = run.context.enter(whole, run.dist.device) if run.context else whole.to(run.dist.device)
        yield run.model(batch.input_ids, labels=batch.labels, cu_seqlens=batch.cu_seqlens)
    if run.context:
        run.context.leave()
