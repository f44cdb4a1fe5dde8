"""A tiny model with its optimizer, for tests of checkpoints."""

from __future__ import annotations

import torch
from torch import nn

from flame.checkpoint.names import create_optimizer_state, model_tensors, optimizer_tensors


class TinyModel(nn.Module):
    """An embedding (by default with rows that 2 does not divide), a block and a head."""

    def __init__(self, vocab_size: int = 7):
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, 6)
        self.block = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))
        self.head = nn.Linear(6, vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embeddings(input_ids)))


def make_model(seed: int = 0, vocab_size: int = 7) -> TinyModel:
    torch.manual_seed(seed)
    return TinyModel(vocab_size)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 2) -> None:
    """A few updates with gradients that depend on the parameters."""
    for _ in range(num_steps):
        sum((parameter**2).sum() for parameter in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()


def make_state(seed: int = 0, trained: bool = True) -> dict[str, torch.Tensor]:
    """Checkpoint tensors of a model and its AdamW; untrained ones have an allocated optimizer state."""
    model = make_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if trained:
        train(model, optimizer)
    else:
        create_optimizer_state(optimizer)
    return model_tensors(model) | optimizer_tensors(model, optimizer)


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """The same names with the same bits."""
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name
