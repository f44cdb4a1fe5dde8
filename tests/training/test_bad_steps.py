"""Steps that leave out their update: which they are, when the host learns of them, when the run stops."""

from __future__ import annotations

import math
import random

import pytest
import torch

from flame.config import Training
from flame.errors import UserError
from flame.training.bad_steps import BadSteps, LossWindow

CPU = torch.device("cpu")


def judge(bad_steps, step, loss=1.0, grad_norm=1.0):
    return bad_steps.judge(step, torch.tensor(loss), torch.tensor(grad_norm), f"data of {step}")


def test_nothing_is_judged_without_a_rule():
    assert judge(BadSteps(Training(), CPU), 1, grad_norm=math.nan) is None


@pytest.mark.parametrize("grad_norm", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite(grad_norm, caplog):
    bad_steps = BadSteps(Training(skip_nan_inf=True), CPU)
    assert judge(bad_steps, 1).tolist() == 0.0
    verdict = judge(bad_steps, 2, grad_norm=grad_norm)
    assert (verdict.dtype, verdict.tolist()) == (torch.float32, 1.0)
    bad_steps.check()
    assert [record.message for record in caplog.records] == ["step 2 left out: its gradient is not finite; data of 2"]


def test_too_many_in_a_row_stop_the_run():
    bad_steps = BadSteps(Training(skip_nan_inf=True, max_consecutive_skips=3), CPU)
    for step, grad_norm in enumerate([math.nan, math.nan, 1.0, math.nan, math.nan], 1):
        judge(bad_steps, step, grad_norm=grad_norm)
        bad_steps.check()
    judge(bad_steps, 6, grad_norm=math.nan)
    with pytest.raises(UserError, match=r"3 steps in a row were left out, up to step 6 .*max_consecutive_skips = 3"):
        bad_steps.check()


def test_a_jump_is_judged_against_the_losses_before_it():
    draw = random.Random(0)
    window = LossWindow(limit=6, size=32, device=CPU)
    for _ in range(100):
        is_jump, _ = window.judge(torch.tensor(draw.gauss(3.0, 0.1)))
        assert not is_jump
    is_jump, score = window.judge(torch.tensor(3.9))
    assert is_jump and 6 < score < 14
    assert not window.judge(torch.tensor(1.0))[0], "a loss that falls is no fault"


def test_nothing_is_a_jump_before_the_window_is_full():
    window = LossWindow(limit=3, size=8, device=CPU)
    losses = [5.0, 5.1, math.nan, 4.9, 5.0, 5.1, 4.9, 900.0]
    assert not any(window.judge(torch.tensor(loss))[0] for loss in losses)
    assert window.state() == pytest.approx([loss for loss in losses if loss == loss])


def test_a_loss_that_stays_high_becomes_the_rule():
    window = LossWindow(limit=4, size=16, device=CPU)
    for number in range(16):
        window.judge(torch.tensor(2.0 + 0.01 * (number % 3)))
    jumps = [bool(window.judge(torch.tensor(4.0))[0]) for _ in range(16)]
    assert jumps[0] and not jumps[-1]


def test_the_window_goes_on_after_a_resume():
    training = Training(skip_loss_spike=3.0, loss_spike_window=8)
    draw = random.Random(1)
    losses = [draw.gauss(3.0, 0.1) for _ in range(40)]
    whole, first = BadSteps(training, CPU), BadSteps(training, CPU)
    expected = [judge(whole, step, loss).item() for step, loss in enumerate(losses)]
    found = [judge(first, step, loss).item() for step, loss in enumerate(losses[:20])]
    second = BadSteps(training, CPU, **first.state_dict())
    found += [judge(second, step, loss).item() for step, loss in enumerate(losses[20:], 20)]
    assert found == expected and sum(expected) > 0
    assert BadSteps(Training(), CPU).state_dict() == {}


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_device():
    bad_steps = BadSteps(Training(skip_nan_inf=True, skip_loss_spike=6.0), torch.device("cuda"))
    loss = torch.ones((), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in (1, 2):
            torch.cuda._sleep(100_000_000)
            bad_steps.judge(step, loss, loss * math.nan, "")
            bad_steps.check()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bad_steps._streak == 0
    bad_steps.check(up_to=1)
    assert bad_steps._streak == 1
    bad_steps.check(up_to=2)
    assert bad_steps._streak == 2
