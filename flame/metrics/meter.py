"""Measure the steps of a log interval without making the host wait for the device in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from flame.metrics.device import peak_flops, peak_memory_gib, reset_peak_memory


class StepMeter:
    """Collect per-step numbers on the device; fetch them with one copy per logged step.

    Args:
        device: where the loss lives.
        world_size: number of devices that share the tokens; ``tps`` is per device.
        tokens: tokens trained before this process started (all ranks), from the loaded checkpoint.
        skipped_steps: likewise the steps skipped so far.
        peak: the device's FLOP/s for ``mfu``; found by the device's name when not given.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        device: torch.device,
        world_size: int = 1,
        *,
        tokens: int = 0,
        skipped_steps: int = 0,
        peak: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.device = device
        self.world_size = world_size
        self.tokens = tokens
        self.skipped_steps = skipped_steps
        self.peak = peak_flops(device) if peak is None else peak
        self._clock = clock
        self._start_interval()

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
        values = (loss, max_loss, grad_norm, skipped)
        self._steps.append(torch.stack([value.detach().to(self.device, torch.float32) for value in values]))  # [4]
        self._num_tokens += num_tokens
        self._data_time += data_time
        self._flops += flops
        self.tokens += num_tokens

    @property
    def num_steps(self) -> int:
        """Steps noted since the last ``collect``."""
        return len(self._steps)

    def collect(self) -> dict:
        """The interval's row without ``step`` and ``lr``, then start the next interval. Waits for the device once.

        ``loss`` and ``grad_norm`` are means over the interval's steps, ``max_loss`` is the maximum; skipped steps stay
        out of all three unless every step was skipped. With ``log_freq = 1`` they are the step's own numbers.

        Raises:
            RuntimeError: no step was added since the last call.
        """
        if not self._steps:
            raise RuntimeError("StepMeter.collect() without a step since the last one")
        losses, max_losses, grad_norms, skipped = torch.stack(self._steps).double().cpu().unbind(1)  # each [steps]
        elapsed = max(self._clock() - self._start - self._paused, 1e-9)  # after the copy: the device is done
        self.skipped_steps += int(skipped.sum())
        counted = slice(None) if skipped.all() else skipped == 0
        tflops = self._flops / elapsed / 1e12
        row = {
            "loss": losses[counted].mean().item(),
            "max_loss": max_losses[counted].max().item(),
            "grad_norm": grad_norms[counted].mean().item(),
            "tokens": self.tokens,
            "tps": self._num_tokens / elapsed / self.world_size,
            "tflops": tflops,
            "mfu": tflops * 1e12 / self.peak if self.peak else None,
            "memory_gib": peak_memory_gib(self.device),
            "data_time_pct": 100 * self._data_time / elapsed,
            "step_time_s": elapsed / len(self._steps),
            "skipped_steps": self.skipped_steps,
            "time": time.time(),
        }
        self._start_interval()
        return row

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps, to be given to the next process's meter: ``tokens`` and ``skipped_steps`` so far.

        Waits for the device when the steps since the last ``collect`` are not fetched yet.
        """
        pending = int(torch.stack(self._steps)[:, 3].sum().item()) if self._steps else 0
        return {"tokens": self.tokens, "skipped_steps": self.skipped_steps + pending}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what happens inside, such as a save or a validation, out of the speed and the step time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # work of the steps before is theirs, not the pause's
        start = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - start

    def _start_interval(self) -> None:
        self._steps: list[torch.Tensor] = []  # each [4]: loss, max_loss, grad_norm, skipped
        self._num_tokens = 0
        self._flops = 0.0
        self._data_time = 0.0
        self._paused = 0.0
        reset_peak_memory(self.device)
        self._start = self._clock()
