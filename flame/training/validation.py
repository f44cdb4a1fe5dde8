"""The loss on held-out text between training steps, by the model as it stands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from flame.data.batch import Batch
from flame.models.loss import is_of_fla
from flame.parallel.distributed import set_timeout
from flame.parallel.fsdp import reshard
from flame.training.run import Run, token_losses


def validate(run: Run) -> bool:
    """Log the loss on ``run.held_out``; False, with nothing logged, when the run was asked to stop meanwhile.

    It is the sum over all targets divided by their number, as in training, so the layout does not change it.

    Raises:
        UserError: too many training steps in a row were left out.
    """
    run.write_row()
    comm, is_first = run.config.comm, not run.has_validated
    timeout = comm.init_timeout_seconds if is_first else comm.train_timeout_seconds
    sums = torch.zeros(2, dtype=torch.float64, device=run.dist.device)  # of losses, of targets
    with run.meter.paused(), torch.no_grad(), evaluating(run.model):
        if is_first:  # as in the first step, kernels are compiled and tuned
            set_timeout(timeout, run.dist)
        for batches in run.held_out:
            run.stacks.arm(timeout)
            if run.stop_request.agreed(run.dist.max):
                return False
            sums[0] += run.pipeline.evaluate(batches) if run.pipeline else sum_losses(run, batches)
            sums[1] += run.count_targets(batches)
        loss_sum, num_targets = run.dist.sum(sums).cpu()
        if is_first and run.has_trained:  # or the first step is still to come
            set_timeout(comm.train_timeout_seconds, run.dist)
    run.stacks.disarm()
    run.log_validation(loss_sum / num_targets.clamp(min=1))
    return True


def sum_losses(run: Run, batches: list[Batch]) -> torch.Tensor:
    """The sum of the micro-batches' token losses on this rank."""
    return sum(token_losses(run, batches), torch.zeros((), device=run.dist.device))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While inside, nothing is dropped out; behind it, gathered parameters are shards again.

    FLA's own modules stay in training mode: out of it they decode, with caches and kernels that go token by token and
    know nothing of the layout. What they drop out is in modules of torch.
    """
    switched = [module for module in model.modules() if module.training and not is_of_fla(module)]
    for module in switched:
        module.training = False
    try:
        yield
    finally:
        for module in switched:
            module.training = True
        reshard(model)
