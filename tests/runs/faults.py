"""Faults put into a run on purpose: a test that cannot tell a broken layout from a right one shows nothing."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from flame import train
from flame.checkpoint import writer
from flame.checkpoint.manifest import write_manifest
from flame.dry_run.capacity import Capacity
from flame.errors import UserError
from flame.models.loss import packing_arguments
from flame.parallel import context_attention, context_border, context_states, stages
from flame.parallel.collectives import anchor
from flame.train import add_gradients
from flame.training import auto, validation
from flame.training.run import Run
from flame.training.validation import sum_losses

next_batches = Run.next_batches
link_pieces = context_states.fla_context


def one_document(model, input_ids: torch.Tensor, _cu_seqlens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Document bounds of a row that is one document, whatever it holds."""
    bounds = torch.tensor([0, input_ids.shape[1]], dtype=torch.int32, device=input_ids.device)
    return packing_arguments(model, input_ids, bounds)


def no_state(context, state: torch.Tensor, transition: torch.Tensor, _through) -> torch.Tensor:
    """States before the documents of a piece when none comes from other ranks."""
    empty = anchor(torch.zeros_like(state), state, transition)
    return torch.cat([empty, empty.new_zeros(len(context.piece.cu_seqlens) - 2, *empty.shape[1:])])


def own_tokens(x: torch.Tensor, group) -> torch.Tensor:
    """What all ranks hold, when each other rank holds nothing."""
    size = dist.get_world_size(group)
    return torch.stack([x if rank == dist.get_rank(group) else torch.zeros_like(x) for rank in range(size)])


def own_part(x: torch.Tensor, group) -> torch.Tensor:
    """What ranks exchange, when each other rank sends nothing."""
    rank = dist.get_rank(group)
    return torch.stack([part if other == rank else torch.zeros_like(part) for other, part in enumerate(x)])


def unlinked(context) -> Any:
    """What FLA's operators are told, as if every document ended with the piece."""
    linked = link_pieces(context)
    alone = {"pre_num_ranks": 0, "post_num_ranks": 0, "is_first_rank": True, "is_last_rank": True}
    return replace(linked, **alone)


def full_at_step_4(folder, manifest) -> None:
    """``write_manifest`` on a disk that is full when step 4 is saved, and has room again later."""
    if manifest.step == 4:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write_manifest(folder, manifest)


def only_behind_its_rows(folder, manifest) -> None:
    """``write_manifest`` that wants the row of the checkpoint's step in the metrics."""
    rows = (folder.parents[1] / "metrics.jsonl").read_text().splitlines()
    assert manifest.step in [json.loads(row)["step"] for row in rows]
    write_manifest(folder, manifest)


def unreadable_at_step_6(run):
    """``Run.next_batches`` with data that end the run at step 6."""
    if run.step == 5:
        raise UserError("a row that cannot be read")
    return next_batches(run)


def jump_at_step_12(run, batches, factor):
    """``add_gradients`` with a loss at step 12 that is twice as high as it is."""
    loss_sum = add_gradients(run, batches, factor)
    return 2 * loss_sum if run.step == 12 else loss_sum


def asked_to_stop_at(step: int):
    """``sum_losses`` of a validation, with a SIGTERM to this process behind that step."""

    def sum_and_signal(run, batches):
        if run.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return sum_losses(run, batches)

    return sum_and_signal


def stuck_at_step_3(run):
    """``Run.next_batches`` of rank 1 takes longer than the others wait, at step 3."""
    if run.step == 2 and run.dist.rank == 1:
        time.sleep(15)
    return next_batches(run)


def less_on_rank_1(limit_gib, device, num_local):
    """``run_capacity`` where rank 1 has a tenth of what the job says, and the others have it."""
    rank = int(os.environ["RANK"])
    return Capacity(int(limit_gib * 2**30 / (10 if rank == 1 else 1)), f"on rank {rank}")


# As on a GPU: the rows of logged steps are written later.
AHEAD = (Run, "is_ahead", True)

FAULTS = {
    "ahead": [AHEAD, (writer, "write_manifest", only_behind_its_rows)],
    "ahead_and_unreadable_at_step_6": [AHEAD, (Run, "next_batches", unreadable_at_step_6)],
    "less_on_rank_1": [(auto, "run_capacity", less_on_rank_1)],
    "stopped_in_validation_6": [(validation, "sum_losses", asked_to_stop_at(6))],
    "stopped_in_validation_7": [(validation, "sum_losses", asked_to_stop_at(7))],
    "stuck_at_step_3": [(Run, "next_batches", stuck_at_step_3)],
    "jump_at_step_12": [(train, "add_gradients", jump_at_step_12)],
    "full_disk_at_step_4": [(writer, "write_manifest", full_at_step_4)],
    "no_boundaries": [(stages, "packing_arguments", one_document)],
    "no_state": [
        (context_states, "entering_states", no_state),
        (context_states, "fla_context", unlinked),
    ],
    "no_exchange": [
        (context_states, "entering_states", no_state),
        (context_states, "fla_context", unlinked),
        (context_border, "gather_stacked", own_tokens),
        (context_attention, "gather_stacked", own_tokens),
        (context_attention, "exchange", own_part),
    ],
}


@contextmanager
def fault(name: str) -> Iterator[None]:
    """Put the fault of that name in; none for an empty name."""
    patches = [mock.patch.object(*target) for target in FAULTS.get(name, [])]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
