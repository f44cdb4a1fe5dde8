"""Bytes of weights, gradients and moments, of what is gathered, and of micro-batches in flight."""

from __future__ import annotations

import pytest
import torch

from flame.config import Optimizer
from flame.dry_run.memory import Memory, Unit, activation_peak, estimate
from flame.dry_run.schedule import Action
from flame.dry_run.trial import Trial

UNITS = [Unit(100, 25), Unit(80, 20), Unit(60, 15), Unit(40, 10, is_root=True)]
NUM_KEPT, NUM_ALL = 70, 280


def memory_of(**choices) -> Memory:
    options = {"compute_bytes": 2, "reshards": True, "is_pipeline": False, "has_gradients": False}
    return estimate(UNITS, 1000, optimizer=choices.pop("optimizer", Optimizer()), **options | choices)


def test_the_first_dimension_is_shared_and_padded():
    parameters = [torch.empty(10, 3, device="meta"), torch.empty(4, device="meta")]
    assert Unit.of(parameters, 4) == Unit(34, 3 * 3 + 1)


def test_shards_are_float32_and_two_blocks_are_gathered_beside_the_root():
    memory = memory_of()
    assert (memory.weights, memory.gradients, memory.optimizer) == (4 * NUM_KEPT, 4 * NUM_KEPT, 8 * NUM_KEPT)
    assert memory.gathered == 2 * (40 + 100 + 80)
    assert memory.peak == 12 * NUM_KEPT + memory.gathered + 1000
    assert memory_of(has_gradients=True).peak == memory.peak + 4 * NUM_KEPT


def test_weights_that_are_not_given_back_are_all_there():
    assert memory_of(reshards=False).gathered == memory_of(is_pipeline=True).gathered == 2 * NUM_ALL
    assert memory_of(is_pipeline=True).unreduced == 4 * NUM_ALL


@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [(Optimizer(), 2), (Optimizer(name="SGD"), 1), (Optimizer(name="SGD", beta1=0.0), 0)],
)
def test_the_optimizer_keeps_its_moments(optimizer, moments):
    assert memory_of(optimizer=optimizer).optimizer == moments * 4 * NUM_KEPT


def test_a_step_without_activations_is_bound_by_the_update():
    options = {"compute_bytes": 2, "reshards": True, "is_pipeline": False, "has_gradients": False}
    fused = estimate([Unit(100, 100)], 0, optimizer=Optimizer(), **options)
    foreach = estimate([Unit(100, 100)], 0, optimizer=Optimizer(implementation="foreach"), **options)
    assert (fused.peak, foreach.peak) == (1600, 2000)


def test_what_is_on_the_host_takes_nothing_of_the_device():
    memory = memory_of(on_host=True)
    assert memory.host == 16 * NUM_KEPT
    assert (memory.weights, memory.gradients, memory.optimizer) == (0, 0, 0)
    assert memory.peak == memory.gathered + 1000


def test_microbatches_in_flight_keep_what_their_backward_needs():
    trial = Trial(saved=10, forward_peak=13, backward_peak=15, sent={})
    one_by_one = [Action(kind, 0, number) for number in range(2) for kind in "FB"]
    two_at_once = [Action(kind, 0, number) for kind in "FB" for number in range(2)]
    assert activation_peak(one_by_one, {0: trial}) == 15
    assert activation_peak(two_at_once, {0: trial}) == 25
