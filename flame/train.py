"""Train a language model, as one process of those that ``bash train.sh …`` (``flame.launch``) or torchrun starts.

Reads top to bottom: build the run, restore it, loop over steps, finish. One step is ``train_step``.
"""

from __future__ import annotations

import logging
import os
import sys

import torch

from flame.cli.parse import main as print_help_or_check
from flame.cli.parse import parse_args, wants_help
from flame.config import JobConfig
from flame.data.batch import Batch
from flame.dry_run.command import dry_run, is_dry
from flame.launch import exit_codes
from flame.launch.ahead import longest_wait, wait_until_compiled
from flame.launch.caches import set_up_caches
from flame.launch.works import KERNELS
from flame.parallel.distributed import set_timeout, shutdown
from flame.training.build import build_run
from flame.training.endings import explain
from flame.training.finish import finish_run
from flame.training.lr_scheduler import lr_factor
from flame.training.optimizer import set_lr, step_unless
from flame.training.preemption import Stopped, StopRequest
from flame.training.run import Run, token_losses
from flame.training.runtime import seed_step
from flame.training.validation import validate

logger = logging.getLogger("flame.train")  # not __name__, which is __main__ under python -m


def main(argv: list[str] | None = None) -> int:
    """Train as the arguments say.

    Returns:
        Exit code, one of ``flame.launch.exit_codes``.
    """
    argv = sys.argv[1:] if argv is None else argv
    if wants_help(argv):
        return print_help_or_check(argv)
    stop = None
    try:
        config = parse_args(argv)
        set_up_caches(config.job.cache_dir, os.environ)  # under torchrun; the launcher has done it
        if is_dry(config):
            dry_run(config)
            return exit_codes.OK
        with StopRequest(config.checkpoint.preempt_timeout_seconds) as stop:
            return train(config, stop)
    except BaseException as error:
        code = explain(error, stop)
        if code is None:
            raise
        return code
    finally:
        shutdown()


def train(config: JobConfig, stop: StopRequest) -> int:
    """Run a whole job: build, restore, train, export. Returns its exit code."""
    with build_run(config, stop) as run:
        if config.checkpoint.create_seed_checkpoint:
            run.save()
            return exit_codes.OK
        is_finished = run.step >= config.training.steps and not run.should_validate_last()
        if is_finished:
            logger.info("already finished: step %d of %d; nothing left to train", run.step, config.training.steps)
        else:
            longest_s = longest_wait(os.environ, config.comm.init_timeout_seconds)
            if told := wait_until_compiled(KERNELS, os.environ, longest_s):
                logger.info("%s", told)
            with stop.deferred():
                if not train_loop(run):
                    stop_training(run)
                    return exit_codes.PREEMPTED
                if stop.agreed(run.dist.max):
                    return exit_codes.PREEMPTED
        finish_run(run, again=is_finished)
    return exit_codes.OK


def train_loop(run: Run) -> bool:
    """Train from the run's current step to its last; False when the run was asked to stop before."""
    training = run.config.training
    if run.should_validate() and not validate(run):  # one that the end of an earlier process cut off
        return False
    while run.step < training.steps:
        run.start_clock()
        try:
            batches = run.next_batches()
        except Stopped:
            return False
        if batches is None:
            logger.info("training.max_epochs = %d reached after step %d", training.max_epochs, run.step)
            break

        run.step += 1
        run.lr = run.config.optimizer.lr * lr_factor(run.step, training.steps, run.config.lr_scheduler)
        set_lr(run.optimizer, run.lr)
        seed_step(training.seed, run.step, run.dist.rank)
        train_step(run, batches)
        if run.step < training.steps:
            run.prefetch()  # while the device computes

        if run.is_first_step:
            run.prepare_saves()
            run.end_first_step()
            set_timeout(run.config.comm.train_timeout_seconds, run.dist)
        if run.step < training.steps and run.stop_request.agreed(run.dist.max):
            return False
        run.write_row()  # of the step before, which the device has done or is about to
        if run.is_log_step:
            run.log_step()
        run.check_bad_steps()
        if run.should_validate() and not validate(run):
            return False
        if run.should_save():
            run.try_save()
        run.end_step()
    if run.meter.num_steps:
        run.log_step()
    if run.should_validate_last() and not validate(run):
        return False
    run.save(last=True)
    return True


def stop_training(run: Run) -> None:
    """Save what is trained, if anything is, and say where the run stands."""
    if run.meter.num_steps:
        run.log_step()
    if run.has_trained:
        run.save()
    run.dist.long_barrier()  # none ends, and has the others ended, before all are here
    run.stop_request.has_saved = True
    logger.info("stopped after step %d of %d; the same command goes on from here", run.step, run.config.training.steps)


def train_step(run: Run, batches: list[Batch]) -> None:
    """One update: forward and backward over the micro-batches, clip, step.

    The loss is the sum over the global batch's valid targets divided by their number, whatever the layout: each rank's
    share is scaled by the number of ranks that FSDP averages gradients over.
    """
    dist = run.dist
    # torch.full, not torch.tensor: filling on the device does not make the host wait, copying to it does.
    num_local = torch.full((), float(run.count_targets(batches)), device=dist.device)
    num_valid = dist.sum(num_local.clone()).clamp_(min=1.0)

    factor = dist.degrees.replicate * dist.degrees.fsdp / num_valid
    loss_sum = run.pipeline.step(batches, factor) if run.pipeline else add_gradients(run, batches, factor)
    grad_norm = run.clip_gradients()
    max_loss = dist.max(loss_sum / num_local.clamp(min=1.0))
    loss = dist.sum(loss_sum) / num_valid

    bad = run.bad_steps.judge(run.step, loss, grad_norm, run.describe_data(batches))
    run.wait_for_snapshot()
    step_unless(run.optimizer, bad)
    run.optimizer.zero_grad(set_to_none=True)

    run.meter.add(
        loss,
        grad_norm,
        num_tokens=sum(batch.input_ids.numel() for batch in batches) * dist.data_size,
        skipped=bad,
        max_loss=max_loss,
        data_time=run.data.take_wait_time(),
        flops=run.flops.step(batches) / dist.degrees.model,
    )


def add_gradients(run: Run, batches: list[Batch], factor: torch.Tensor) -> torch.Tensor:
    """Forward and backward over the micro-batches; the sum of the token losses, whose gradient is ``factor``."""
    loss_sum = torch.zeros((), device=run.dist.device)
    for loss in token_losses(run, batches):
        (loss * factor).backward()
        loss_sum += loss.detach()
    return loss_sum


if __name__ == "__main__":
    sys.exit(main())
