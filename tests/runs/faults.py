"""Faults put into a run on purpose: a test that cannot tell a broken layout from a right one shows nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist

from flame.parallel import context_operators, pipeline
from flame.parallel.collectives import anchor


def one_document(_model, input_ids: torch.Tensor, _cu_seqlens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Document bounds of a row that is one document, whatever it holds."""
    return {"cu_seqlens": torch.tensor([0, input_ids.shape[1]], dtype=torch.int32, device=input_ids.device)}


def no_state(context, state: torch.Tensor, transition: torch.Tensor, _through) -> torch.Tensor:
    """States before the documents of a piece when none comes from other ranks."""
    empty = anchor(torch.zeros_like(state), state, transition)
    return torch.cat([empty, empty.new_zeros(len(context.piece.cu_seqlens) - 2, *empty.shape[1:])])


def own_tokens(x: torch.Tensor, group) -> torch.Tensor:
    """What all ranks hold, when each other rank holds nothing."""
    size = dist.get_world_size(group)
    return torch.stack([x if rank == dist.get_rank(group) else torch.zeros_like(x) for rank in range(size)])


FAULTS = {
    "no_boundaries": [(pipeline, "packing_arguments", one_document)],
    "no_exchange": [
        (context_operators, "_entering_state", no_state),
        (context_operators, "gather_stacked", own_tokens),
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
