"""The training step: what its loss and its gradients are means over."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flame.data.batch import Batch
from flame.data.pack import IGNORE_INDEX
from flame.parallel.degrees import Degrees
from flame.train import train_step
from flame.training.run import Run


class Sums(nn.Module):
    """A model whose losses over its micro-batches come to given sums, times its one weight."""

    def __init__(self, sums: list[float]):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.sums = iter(sums)

    def forward(self, input_ids, labels, cu_seqlens):
        return self.weight * next(self.sums)


def batch(num_targets: int) -> Batch:
    labels = torch.full((1, 10), IGNORE_INDEX)
    labels[0, :num_targets] = 1
    return Batch(torch.zeros_like(labels), labels)


def test_micro_batches_count_by_their_targets():
    """One target with a loss of 2 and nine that sum to 90 have a mean of 9.2; the mean of their means is 6."""
    model, noted = Sums([2.0, 90.0]), []
    dist = SimpleNamespace(
        device=torch.device("cpu"), degrees=Degrees(), data_size=1, sum=lambda value: value, max=lambda value: value
    )
    run = SimpleNamespace(
        dist=dist,
        model=model,
        pipeline=None,
        context=None,
        step=1,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        clip_gradients=lambda: model.weight.grad.norm(),
        describe_data=lambda batches: "",
        bad_steps=SimpleNamespace(judge=lambda *_: None),
        wait_for_snapshot=lambda: None,
        meter=SimpleNamespace(add=lambda loss, grad_norm, **_: noted.extend([float(loss), float(grad_norm)])),
        data=SimpleNamespace(take_wait_time=lambda: 0.0),
        flops=SimpleNamespace(step=lambda batches: 0.0),
    )
    run.count_targets = lambda batches: Run.count_targets(run, batches)
    train_step(run, [batch(1), batch(9)])
    assert noted == pytest.approx([9.2, 9.2])
    assert float(model.weight.detach()) == pytest.approx(1 - 9.2)
