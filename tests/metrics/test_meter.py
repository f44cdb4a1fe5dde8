import math
import time

import pytest
import torch

from flame.metrics.clocks import DeviceClock, HostClock
from flame.metrics.keys import TRAIN_KEYS
from flame.metrics.meter import StepMeter

CPU = torch.device("cpu")


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make_meter(**options):
    clock = Clock()
    return StepMeter(CPU, clock=HostClock(clock), **options), clock


def add(meter, loss, grad_norm=1.0, skipped=False, **options):
    options.setdefault("num_tokens", 100)
    meter.add(torch.tensor(loss), torch.tensor(grad_norm), skipped=torch.tensor(skipped), **options)


def collect(meter):
    return meter.row(meter.collect())


class LateClock(DeviceClock):
    """A device's clock by hand: a mark has no time before the device passes it."""

    def __init__(self):
        self.waiting = []

    def mark(self):
        self.waiting.append([])
        return self.waiting[-1]

    def seconds(self, start, end):
        return end[0] - start[0]

    def run(self, now):
        for mark in self.waiting:
            mark.append(now)
        self.waiting.clear()


def test_row_has_the_stable_keys():
    meter, clock = make_meter()
    add(meter, 2.0)
    clock.now = 1.0
    assert {"step", "lr", *collect(meter)} == {"step", "time", *TRAIN_KEYS}


def test_single_step_keeps_its_own_loss_bit_for_bit():
    meter, _ = make_meter()
    loss = torch.tensor(0.1) + torch.tensor(0.2)
    meter.add(loss, loss, num_tokens=1)
    row = collect(meter)
    assert row["loss"] == row["max_loss"] == row["grad_norm"] == loss.item()


def test_interval_means_and_maximum():
    meter, _ = make_meter()
    add(meter, 2.0, 1.0)
    add(meter, 4.0, 3.0, max_loss=torch.tensor(7.0))
    row = collect(meter)
    assert (row["loss"], row["max_loss"], row["grad_norm"]) == (3.0, 7.0, 2.0)


def test_tensors_may_be_reused_after_add():
    meter, _ = make_meter()
    loss = torch.tensor(1.0)
    meter.add(loss, loss, num_tokens=1)
    loss.fill_(9.0)
    assert collect(meter)["loss"] == 1.0


def test_speed_counts_tokens_per_device_and_second():
    meter, clock = make_meter(world_size=2, tokens=1000, peak=1e12)
    for _ in range(4):
        add(meter, 1.0, data_time=0.5, flops=2e12)
    clock.now = 8.0
    row = collect(meter)
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
    row = collect(meter)
    assert (row["loss"], row["tps"], row["tokens"]) == (1.0, 10.0, 110)


def test_pause_is_not_training_time():
    meter, clock = make_meter()
    add(meter, 1.0)
    clock.now = 2.0
    with meter.paused():
        clock.now = 50.0
    assert collect(meter)["step_time_s"] == 2.0


def test_skipped_steps_are_counted_and_stay_out_of_the_means():
    meter, _ = make_meter(skipped_steps=3)
    add(meter, 2.0, 1.0)
    add(meter, math.nan, math.inf, skipped=True)
    row = collect(meter)
    assert (row["loss"], row["grad_norm"], row["skipped_steps"]) == (2.0, 1.0, 4)


def test_interval_of_skipped_steps_only_shows_their_numbers():
    meter, _ = make_meter()
    add(meter, math.nan, skipped=True)
    assert math.isnan(collect(meter)["loss"])


def test_nan_that_was_not_skipped_is_not_hidden():
    meter, _ = make_meter()
    add(meter, 1.0)
    add(meter, math.nan)
    assert math.isnan(collect(meter)["loss"])


def test_state_includes_steps_that_are_not_collected_yet():
    meter, _ = make_meter(tokens=10, skipped_steps=1)
    add(meter, 1.0, skipped=True, num_tokens=5)
    assert meter.state_dict() == {"tokens": 15, "skipped_steps": 2}
    assert collect(meter)["skipped_steps"] == 2


def test_collect_without_a_step_is_refused():
    meter, _ = make_meter()
    with pytest.raises(RuntimeError):
        meter.collect()


def test_a_row_that_is_made_later_is_that_of_its_interval():
    clock = LateClock()
    meter = StepMeter(CPU, clock=clock, tokens=50, skipped_steps=1)
    clock.run(1.0)
    add(meter, 2.0, data_time=0.5)
    add(meter, 3.0, skipped=True)
    first = meter.collect()
    add(meter, 5.0, num_tokens=10, skipped=True)
    second = meter.collect()
    add(meter, 7.0, skipped=True)
    clock.run(3.0)
    early, late = meter.row(first), meter.row(second)
    assert (early["loss"], early["tokens"], early["skipped_steps"]) == (2.0, 250, 2)
    assert (early["step_time_s"], early["tps"], early["data_time_pct"]) == (1.0, 100.0, 25.0)
    assert (late["loss"], late["tokens"], late["skipped_steps"]) == (5.0, 260, 3)
    assert early["time"] <= late["time"]


def test_intervals_and_pauses_are_timed_by_the_devices_clock():
    clock = LateClock()
    meter = StepMeter(CPU, clock=clock)
    clock.run(10.0)
    add(meter, 1.0)
    with meter.paused():
        clock.run(11.0)  # the step's work is done in the pause, and is not the pause's
    clock.run(40.0)
    add(meter, 1.0)
    first = meter.collect()
    clock.run(42.0)
    add(meter, 1.0)
    second = meter.collect()
    clock.run(47.0)
    assert meter.row(first)["step_time_s"] == 1.5
    assert meter.row(second)["step_time_s"] == 5.0


@pytest.mark.gpu
def test_adding_and_collecting_never_wait_for_the_device():
    device = torch.device("cuda")
    meter = StepMeter(device)
    loss = torch.ones((), device=device)

    def train(num_steps):
        intervals = []
        for _ in range(num_steps):
            torch.cuda._sleep(200_000_000)  # cycles, some 0.1 s
            meter.add(loss, loss, num_tokens=1, skipped=loss > 2)
            intervals.append(meter.collect())
        return intervals

    for interval in train(4):  # takes the page-locked memory, which may wait
        meter.row(interval)
    del interval
    torch.cuda.set_sync_debug_mode("error")
    try:
        intervals = train(3)
        assert not intervals[0].sent.ready.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rows = [meter.row(interval) for interval in intervals]
    assert [row["loss"] for row in rows] == [1.0] * 3
    assert [row["tokens"] for row in rows] == [5, 6, 7]
    assert all(0.05 < row["step_time_s"] < 0.5 for row in rows)
    assert meter.peak is None or rows[0]["mfu"] == 0.0


@pytest.mark.gpu
def test_a_pause_of_the_host_is_not_the_devices_time():
    device = torch.device("cuda")
    meter = StepMeter(device)
    loss = torch.ones((), device=device)
    meter.add(loss, loss, num_tokens=1)
    meter.row(meter.collect())
    torch.cuda._sleep(200_000_000)
    meter.add(loss, loss, num_tokens=1)
    with meter.paused():
        torch.cuda.synchronize()
        time.sleep(1.0)
    assert 0.05 < collect(meter)["step_time_s"] < 0.5
