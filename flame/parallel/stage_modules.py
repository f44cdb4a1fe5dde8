"""What stands in a stage where the whole model has an embedding or a block that another stage holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flame.models.blocks import SkippedBlock


class NoTerm(nn.Module):
    """In place of an embedding of positions in stages that embed nothing: adds nothing."""

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        return torch.zeros(())


class Received(nn.Module):
    """In place of the embedding of tokens: gives what the stage before has handed on."""

    hidden_states: Tensor

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        return self.hidden_states


class Entry(SkippedBlock):
    """In place of the block before a stage: gives what that block has handed on.

    Whatever the decoder has made of its embeddings until then (scaled them, added positions) is dropped.
    """

    hidden_states: Tensor

    def __init__(self, returns: tuple[str, ...] | None, carried: str, hidden_size: int):
        super().__init__(returns)
        self.carried, self.hidden_size = carried, hidden_size

    def forward(self, _dropped: Tensor, *_args: Any, **given: Any) -> Tensor | tuple:
        if not self.carried:
            return super().forward(self.hidden_states, **given)
        hidden_states, other = self.hidden_states.tensor_split([self.hidden_size], -1)
        return super().forward(hidden_states, **given | {self.carried: other})


class Exit(SkippedBlock):
    """In place of the block after a stage: puts what is carried besides hidden states [B, T, D] behind them."""

    def __init__(self, returns: tuple[str, ...] | None, carried: str):
        super().__init__(returns)
        self.carried = carried

    def forward(self, hidden_states: Tensor, *_args: Any, **given: Any) -> Tensor | tuple:
        return super().forward(torch.cat([hidden_states, given[self.carried]], -1), **given)
