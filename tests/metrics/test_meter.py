import math

import pytest
import torch

from flame.metrics.keys import TRAIN_KEYS
from flame.metrics.meter import StepMeter

CPU = torch.device("cpu")


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make_meter(**options):
    clock = Clock()
    return StepMeter(CPU, clock=clock, **options), clock


def add(meter, loss, grad_norm=1.0, skipped=False, **options):
    options.setdefault("num_tokens", 100)
    meter.add(torch.tensor(loss), torch.tensor(grad_norm), skipped=torch.tensor(skipped), **options)


def test_row_has_the_stable_keys():
    meter, clock = make_meter()
    add(meter, 2.0)
    clock.now = 1.0
    assert {"step", "lr", *meter.collect()} == {"step", "time", *TRAIN_KEYS}


def test_single_step_keeps_its_own_loss_bit_for_bit():
    meter, _ = make_meter()
    loss = torch.tensor(0.1) + torch.tensor(0.2)
    meter.add(loss, loss, num_tokens=1)
    row = meter.collect()
    assert row["loss"] == row["max_loss"] == row["grad_norm"] == loss.item()


def test_interval_means_and_maximum():
    meter, _ = make_meter()
    add(meter, 2.0, 1.0)
    add(meter, 4.0, 3.0, max_loss=torch.tensor(7.0))
    row = meter.collect()
    assert (row["loss"], row["max_loss"], row["grad_norm"]) == (3.0, 7.0, 2.0)


def test_tensors_may_be_reused_after_add():
    meter, _ = make_meter()
    loss = torch.tensor(1.0)
    meter.add(loss, loss, num_tokens=1)
    loss.fill_(9.0)
    assert meter.collect()["loss"] == 1.0


def test_speed_counts_tokens_per_device_and_second():
    meter, clock = make_meter(world_size=2, tokens=1000, peak=1e12)
    for _ in range(4):
        add(meter, 1.0, data_time=0.5, flops=2e12)
    clock.now = 8.0
    row = meter.collect()
    assert row["tokens"] == 1400
    assert row["tps"] == 400 / 8 / 2
    assert row["step_time_s"] == 2.0
    assert row["data_time_pct"] == 25.0
    assert row["tflops"] == 1.0
    assert row["mfu"] == 1.0
    assert row["memory_gib"] > 0.01


def test_interval_starts_anew_after_collect():
    meter, clock = make_meter()
    add(meter, 5.0)
    clock.now = 100.0
    meter.collect()
    add(meter, 1.0, num_tokens=10)
    clock.now = 101.0
    row = meter.collect()
    assert (row["loss"], row["tps"], row["tokens"]) == (1.0, 10.0, 110)


def test_pause_is_not_training_time():
    meter, clock = make_meter()
    add(meter, 1.0)
    clock.now = 2.0
    with meter.paused():
        clock.now = 50.0
    assert meter.collect()["step_time_s"] == 2.0


def test_skipped_steps_are_counted_and_stay_out_of_the_means():
    meter, _ = make_meter(skipped_steps=3)
    add(meter, 2.0, 1.0)
    add(meter, math.nan, math.inf, skipped=True)
    row = meter.collect()
    assert (row["loss"], row["grad_norm"], row["skipped_steps"]) == (2.0, 1.0, 4)


def test_interval_of_skipped_steps_only_shows_their_numbers():
    meter, _ = make_meter()
    add(meter, math.nan, skipped=True)
    assert math.isnan(meter.collect()["loss"])


def test_nan_that_was_not_skipped_is_not_hidden():
    meter, _ = make_meter()
    add(meter, 1.0)
    add(meter, math.nan)
    assert math.isnan(meter.collect()["loss"])


def test_state_includes_steps_that_are_not_collected_yet():
    meter, _ = make_meter(tokens=10, skipped_steps=1)
    add(meter, 1.0, skipped=True, num_tokens=5)
    assert meter.state_dict() == {"tokens": 15, "skipped_steps": 2}
    assert meter.collect()["skipped_steps"] == 2


def test_collect_without_a_step_is_refused():
    meter, _ = make_meter()
    with pytest.raises(RuntimeError):
        meter.collect()


@pytest.mark.gpu
def test_adding_never_waits_for_the_device():
    device = torch.device("cuda")
    meter = StepMeter(device)
    loss = torch.ones((), device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            meter.add(loss, loss, num_tokens=1, skipped=loss > 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    row = meter.collect()
    assert row["loss"] == 1.0
    assert meter.peak is None or row["mfu"] == 0.0
