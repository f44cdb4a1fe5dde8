"""Measure the steps of a log interval without making the host wait for the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from flame.metrics.clocks import DeviceClock, HostClock, Mark, clock_of
from flame.metrics.device import peak_flops, peak_memory_gib, reset_peak_memory
from flame.metrics.sending import Sent, send


@dataclass
class Interval:
    """The steps from one logged step to the next.

    Attributes:
        start: mark of the clock at which it began.
        steps: each [5] float64 on the device: loss, max_loss, grad_norm, skipped (0 or 1), steps skipped so far.
        pauses: marks, each the start and the end of what is no training.
        num_tokens: of its steps, all ranks.
        flops: of its steps, this device.
        data_time: seconds that this rank waited for data.
        end: mark at which it was over; this and what follows is there once it is.
        sent: [steps, 5], ``steps`` on their way to the host.
        tokens: trained so far, all ranks.
        memory_gib: the interval's peak.
        time: when the host gave the device the last of its work, seconds since 1970.
    """

    start: Mark
    steps: list[torch.Tensor] = field(default_factory=list)
    pauses: list[tuple[Mark, Mark]] = field(default_factory=list)
    num_tokens: int = 0
    flops: float = 0.0
    data_time: float = 0.0
    end: Mark | None = None
    sent: Sent | None = None
    tokens: int = 0
    memory_gib: float = 0.0
    time: float = 0.0


class StepMeter:
    """Collect per-step numbers on the device; they are sent to the host once per logged step.

    Args:
        device: where the loss lives.
        world_size: number of devices that share the tokens; ``tps`` is per device.
        tokens: tokens trained before this process started (all ranks), from the loaded checkpoint.
        skipped_steps: likewise the steps skipped so far.
        peak: the device's FLOP/s for ``mfu``; found by the device's name when not given.
        clock: what the steps are timed by; the device's own when not given.
    """

    def __init__(
        self,
        device: torch.device,
        world_size: int = 1,
        *,
        tokens: int = 0,
        skipped_steps: int = 0,
        peak: float | None = None,
        clock: HostClock | DeviceClock | None = None,
    ):
        self.device = device
        self.world_size = world_size
        self.tokens = tokens
        self.peak = peak_flops(device) if peak is None else peak
        self._skipped_steps = torch.full((), skipped_steps, dtype=torch.float64, device=device)
        self._clock = clock or clock_of(device)
        self._interval = Interval(self._clock.mark())
        reset_peak_memory(device)

    def add(
        self,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        *,
        num_tokens: int,
        skipped: torch.Tensor | None = None,
        max_loss: torch.Tensor | None = None,
        data_time: float = 0.0,
        flops: float = 0.0,
    ) -> None:
        """Note one optimizer step. Copies the tensors, so the caller may reuse them; never waits for the device.

        Args:
            loss: scalar, the step's token-weighted mean over all ranks.
            grad_norm: scalar, the global norm before clipping (a plain tensor, not a DTensor).
            num_tokens: tokens of the step over all ranks; a skipped step's count too, its data is used up.
            skipped: scalar, true where the update was left out.
            max_loss: scalar, the largest loss of any rank; ``loss`` when not given.
            data_time: seconds that this rank waited for the batch.
            flops: this device's training FLOPs in the step.
        """
        max_loss = loss if max_loss is None else max_loss
        skipped = torch.zeros_like(loss) if skipped is None else skipped
        self._skipped_steps = self._skipped_steps + skipped.detach()
        values = (loss, max_loss, grad_norm, skipped, self._skipped_steps)
        self._interval.steps.append(torch.stack([value.detach().to(self.device, torch.float64) for value in values]))
        self._interval.num_tokens += num_tokens
        self._interval.data_time += data_time
        self._interval.flops += flops
        self.tokens += num_tokens

    @property
    def num_steps(self) -> int:
        """Steps noted since the last ``collect``."""
        return len(self._interval.steps)

    def collect(self) -> Interval:
        """End the interval and start the next one. Sends the steps' numbers to the host and waits for nothing.

        Raises:
            RuntimeError: no step was added since the last call.
        """
        interval = self._interval
        if not interval.steps:
            raise RuntimeError("StepMeter.collect() without a step since the last one")
        interval.end = self._clock.mark()  # before they are sent: once they are there, the device has passed it
        interval.sent = send(torch.stack(interval.steps))
        interval.tokens, interval.time = self.tokens, time.time()
        interval.memory_gib = peak_memory_gib(self.device)
        self._interval = Interval(interval.end)
        reset_peak_memory(self.device)
        return interval

    def row(self, interval: Interval) -> dict:
        """A collected interval's row without ``step`` and ``lr``. Waits until the device has come to its end.

        ``loss`` and ``grad_norm`` are means over the interval's steps, ``max_loss`` is the maximum; skipped steps stay
        out of all three unless every step was skipped. With ``log_freq = 1`` they are the step's own numbers.
        """
        losses, max_losses, grad_norms, skipped, skipped_steps = interval.sent.wait().unbind(1)  # each [steps]
        paused = sum(self._clock.seconds(*pause) for pause in interval.pauses)
        elapsed = max(self._clock.seconds(interval.start, interval.end) - paused, 1e-9)
        counted = slice(None) if skipped.all() else skipped == 0
        tflops = interval.flops / elapsed / 1e12
        return {
            "loss": losses[counted].mean().item(),
            "max_loss": max_losses[counted].max().item(),
            "grad_norm": grad_norms[counted].mean().item(),
            "tokens": interval.tokens,
            "tps": interval.num_tokens / elapsed / self.world_size,
            "tflops": tflops,
            "mfu": tflops * 1e12 / self.peak if self.peak else None,
            "memory_gib": interval.memory_gib,
            "data_time_pct": 100 * interval.data_time / elapsed,
            "step_time_s": elapsed / len(interval.steps),
            "skipped_steps": int(skipped_steps[-1]),
            "time": interval.time,
        }

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps, to be given to the next process's meter: ``tokens`` and ``skipped_steps`` so far.

        Waits for the device.
        """
        return {"tokens": self.tokens, "skipped_steps": int(self._skipped_steps)}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what happens inside, such as a save or a validation, out of the speed and the step time.

        Work that the device was given before is not the pause's. No interval may end inside.
        """
        start = self._clock.mark()
        try:
            yield
        finally:
            self._interval.pauses.append((start, self._clock.mark()))
