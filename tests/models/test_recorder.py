"""flame.models.recorder: slices of a tape, and what replaying them gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flame.models.recorder import Constant, RecordError, TensorRef, recording

CPU = torch.device("cpu")
LARGE = (300, 300)  # more elements than tensors that have memory during a recording


def functions(recorder, tensor) -> list[str]:
    """Names of the operations that decide the tensor's content."""
    ref = recorder.name(tensor)
    events = [recorder.tape.events[index] for index in recorder.tape.slice(ref.storage)]
    return [event.func._schema.name.removeprefix("aten::") for event in events]


@pytest.mark.parametrize("shape", [(4, 4), LARGE])
def test_overwritten_draws_are_left_out(shape):
    with recording() as recorder:
        weight = nn.Linear(*shape).weight
        nn.init.normal_(weight)
    assert functions(recorder, weight) == ["empty", "normal_"]


@pytest.mark.parametrize("shape", [(4, 4), LARGE])
def test_partial_writes_build_on_what_was_there(shape):
    with recording() as recorder:
        weight = torch.empty(shape).uniform_()
        weight[0].normal_()
        weight.t()[0].zero_()
    assert functions(recorder, weight) == ["empty", "uniform_", "normal_", "zero_"]


def test_a_slice_leaves_other_tensors_out():
    with recording() as recorder:
        first = torch.empty(LARGE).normal_()
        second = torch.empty(LARGE).uniform_()
        total = first * 2
        first.zero_()
    assert functions(recorder, total) == ["empty", "normal_", "mul"]
    assert functions(recorder, first) == ["empty", "zero_"]
    assert functions(recorder, second) == ["empty", "uniform_"]


def test_large_tensors_take_no_memory():
    with recording() as recorder:
        tensor = torch.empty(2**20, 2**20).normal_()  # 4 TiB
    assert isinstance(recorder.name(tensor), TensorRef)


def test_constants_are_values():
    with recording() as recorder:
        ramp = torch.arange(8) ** 2
        ramp[0] = torch.tensor([5, 6]).max().item()
    name = recorder.name(ramp)
    assert isinstance(name, Constant)
    assert name.value.tolist() == [6, 1, 4, 9, 16, 25, 36, 49]
    assert recorder.tape.events == []


def test_values_follow_from_what_is_recorded():
    with recording() as recorder:
        ones = torch.ones(LARGE)
        total = int(ones.sum().item())
    assert total == 90_000
    assert functions(recorder, ones) == ["ones"]


def test_a_constant_that_is_drawn_over_later():
    with recording() as recorder:
        tensor = torch.zeros(6)
        tensor[:3].normal_()
    tape, name = recorder.tape, recorder.name(tensor)
    torch.manual_seed(0)
    got = tape.replay(tape.slice(name.storage), CPU).tensor(name)
    torch.manual_seed(0)
    expected = torch.zeros(6)
    expected[:3].normal_()
    assert torch.equal(got, expected)


@pytest.mark.parametrize("shape", [(4, 4), LARGE])
def test_replay_equals_the_plain_run(shape):
    def construct():
        weight = torch.empty(shape)
        nn.init.trunc_normal_(weight, std=0.02)
        scaled = (weight.double() / weight.norm()).float()
        scaled.t()[1] += torch.rand(shape[0]) * torch.linspace(0, 1, shape[0])
        return scaled.contiguous()

    with recording() as recorder:
        name = recorder.name(construct())
    torch.manual_seed(1)
    got = recorder.tape.replay(range(len(recorder.tape.events)), CPU).tensor(name)
    torch.manual_seed(1)
    assert torch.equal(got, construct())


@pytest.mark.parametrize("shape", [(4, 4), LARGE])
@pytest.mark.parametrize(
    "read",
    [
        lambda draw: draw.sum().item(),
        lambda draw: draw.nonzero(),
        lambda draw: draw[draw > 0.5],
        lambda draw: torch.equal(draw, draw),
    ],
)
def test_reading_random_values_is_refused(shape, read):
    with pytest.raises(RecordError, match="the constructor"), recording():
        read(torch.rand(shape))


def test_generators_come_back_as_they_were():
    import random

    import numpy as np

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with recording():
        inside = random.random(), np.random.rand()
        torch.rand(1)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    with recording():
        assert (random.random(), np.random.rand()) == inside
