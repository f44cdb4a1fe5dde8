"""What a validation does to a model, and what ends it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from fla.modules import RMSNorm
from torch import nn

from flame.config import JobConfig
from flame.data.batch import Batch
from flame.data.pack import IGNORE_INDEX
from flame.training.run import Run
from flame.training.validation import evaluating, validate


class Drops(nn.Module):
    """A model whose loss is the number of its targets, if it drops nothing out and knows no gradient."""

    def __init__(self):
        super().__init__()
        self.norm = RMSNorm(4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, input_ids, labels, cu_seqlens):
        assert not torch.is_grad_enabled()
        assert torch.equal(self.dropout(torch.ones(100)), torch.ones(100))
        return 2.0 * (labels != IGNORE_INDEX).sum()


def batch(num_targets: int) -> Batch:
    labels = torch.full((1, 10), IGNORE_INDEX)
    labels[0, :num_targets] = 1
    return Batch(torch.zeros_like(labels), labels)


@pytest.fixture(autouse=True)
def timeouts(monkeypatch) -> list[int]:
    """Those that a validation has set for collectives."""
    seconds: list[int] = []
    monkeypatch.setattr("flame.training.validation.set_timeout", lambda value, _dist: seconds.append(value))
    return seconds


def make_run(held_out, agreed=lambda: False):
    config, rows = JobConfig(), []
    config.training.steps, config.validation.interval = 9, 4
    run = SimpleNamespace(
        config=config,
        dist=SimpleNamespace(device=torch.device("cpu"), sum=lambda value: value, max=None),
        model=Drops(),
        pipeline=None,
        context=None,
        held_out=held_out,
        step=4,
        has_trained=True,
        has_validated=False,
        validated_step=-1,
        write_row=lambda: None,
        meter=SimpleNamespace(paused=nullcontext),
        stacks=SimpleNamespace(arm=lambda seconds: None, disarm=lambda: None),
        stop_request=SimpleNamespace(agreed=lambda any_rank: agreed()),
        metrics=SimpleNamespace(log=rows.append),
        rows=rows,
    )
    run.count_targets = lambda batches: Run.count_targets(run, batches)
    run.log_validation = lambda loss: Run.log_validation(run, loss)
    return run


def test_targets_weigh_alike_whatever_batch_they_are_in():
    run = make_run([[batch(1), batch(9)], [batch(0), batch(3)]])
    assert validate(run) and run.model.training
    (row,) = run.rows
    assert {key: row[key] for key in ("step", "val_loss")} == {"step": 4, "val_loss": 2.0}
    assert row["val_ppl"] == pytest.approx(7.38905609893065)
    assert run.validated_step == 4


def test_a_request_to_stop_ends_it_between_two_steps():
    requests = iter([False, True])
    run = make_run([[batch(1)], [batch(1)], [batch(1)]], agreed=lambda: next(requests))
    assert not validate(run)
    assert run.rows == [] and run.validated_step == -1 and run.model.dropout.training
    assert list(requests) == []


def test_others_are_waited_for_longer_while_the_first_one_compiles(timeouts):
    run = make_run([[batch(1)], [batch(1)]])
    armed = []
    run.stacks.arm = armed.append
    comm = run.config.comm
    assert validate(run) and timeouts == [comm.init_timeout_seconds, comm.train_timeout_seconds]
    run.has_validated = True
    assert validate(run) and len(timeouts) == 2
    assert armed == [comm.init_timeout_seconds] * 2 + [comm.train_timeout_seconds] * 2


def test_only_what_is_not_of_fla_leaves_training_mode():
    model = Drops()
    with evaluating(model):
        assert (model.training, model.dropout.training, model.norm.training) == (False, False, True)
    assert model.training and model.dropout.training and model.norm.training
    model.dropout.eval()  # by the user's hand
    with evaluating(model):
        pass
    assert model.training and not model.dropout.training


@pytest.mark.parametrize(
    ("step", "validated_step", "between", "at_the_end"),
    [(0, -1, False, True), (3, -1, False, True), (4, -1, True, True), (8, 4, True, True), (8, 8, False, False)],
)
def test_when_it_is_due(step, validated_step, between, at_the_end):
    run = make_run([[batch(1)]])
    run.step, run.validated_step = step, validated_step
    run.should_validate_last = lambda: Run.should_validate_last(run)
    assert Run.should_validate(run) is between
    assert Run.should_validate_last(run) is at_the_end
    run.held_out = []
    assert not Run.should_validate(run) and not Run.should_validate_last(run)
