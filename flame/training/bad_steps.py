"""Steps that leave out their update: those whose gradient is not finite, and those whose loss jumps.

Everything is decided on the device. The host reads a verdict two steps later, when it is long there, so that it waits
for nothing; all ranks read the same numbers at the same steps.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flame.config import Training
from flame.errors import UserError
from flame.metrics.sending import Sent, send

logger = logging.getLogger(__name__)

DELAY = 2  # steps that the device may be behind the host when a verdict is read
SMALLEST_DEVIATION = 1e-6  # of the losses in the window, nats


@dataclass
class Verdict:
    """What was decided on a step.

    Attributes:
        step: the training step.
        data: where its data lie, in words, for the message.
        sent: [4]: not finite (0 or 1), jump (0 or 1), loss, its distance from the mean in deviations.
    """

    step: int
    data: str
    sent: Sent


class LossWindow:
    """The losses of the last steps, and whether a new one lies far above them.

    A loss enters the window whether its step is left out or not: one that stays high becomes the rule.

    Args:
        limit: standard deviations above the mean from which a loss is a jump.
        size: steps looked at; before there are as many, nothing is a jump.
        losses: those before, as ``state`` gave them.
    """

    def __init__(self, limit: float, size: int, device: torch.device, losses: Sequence[float] = ()):
        self.limit = limit
        known = list(losses)[-size:]
        self.losses = torch.tensor([0.0] * (size - len(known)) + known, dtype=torch.float64, device=device)  # [size]
        self.num_losses = torch.tensor(len(known), device=device)

    def judge(self, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether a loss is a jump, and its distance from the mean in deviations, two scalars; it enters the window."""
        loss = loss.detach().double()
        deviation = self.losses.std().clamp_min(SMALLEST_DEVIATION)
        score = (loss - self.losses.mean()) / deviation
        is_full = self.num_losses >= len(self.losses)
        is_finite = loss.isfinite()
        self.losses = torch.where(is_finite, torch.cat([self.losses[1:], loss[None]]), self.losses)
        self.num_losses = self.num_losses + is_finite
        return is_full & is_finite & (score > self.limit), score

    def state(self) -> list[float]:
        """The losses, oldest first. Waits for the device."""
        known = min(int(self.num_losses), len(self.losses))
        return self.losses[len(self.losses) - known :].tolist()


class BadSteps:
    """Judges each step before its update, and stops the run after too many in a row.

    Args:
        training: the job's section; ``skip_nan_inf``, ``skip_loss_spike`` and what belongs to them.
        device: where the loss lives.
        losses: what ``state_dict`` held.
    """

    def __init__(self, training: Training, device: torch.device, losses: Sequence[float] = ()):
        self.training = training
        self.device = device
        self.window: LossWindow | None = None
        if training.skip_loss_spike:
            self.window = LossWindow(training.skip_loss_spike, training.loss_spike_window, device, losses)
        self._verdicts: deque[Verdict] = deque()
        self._streak = 0

    def judge(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, data: str) -> torch.Tensor | None:
        """1.0 where the step's update is to be left out, a float32 scalar on the device; None if none ever is.

        Args:
            step: the training step.
            loss: scalar, the step's mean loss, the same on every rank.
            grad_norm: scalar, the same on every rank.
            data: where the step's data lie, in words.
        """
        if not self.training.skip_nan_inf and self.window is None:
            return None
        is_bad = ~grad_norm.isfinite() if self.training.skip_nan_inf else torch.zeros_like(grad_norm, dtype=torch.bool)
        is_jump, score = self.window.judge(loss) if self.window else (torch.zeros_like(is_bad), torch.zeros_like(loss))
        numbers = torch.stack([each.detach().double() for each in (is_bad, is_jump, loss, score)])
        self._verdicts.append(Verdict(step, data, send(numbers)))
        return (is_bad | is_jump).float()

    def check(self, up_to: int = 0) -> None:
        """Log the steps that were left out, on a GPU those of the last two excepted.

        Args:
            up_to: a step that the device is known to be done with: so far there are no exceptions.

        Raises:
            UserError: ``training.max_consecutive_skips`` of them came in a row; the same on every rank.
        """
        behind = 0 if self.device.type == "cpu" else DELAY
        while len(self._verdicts) > behind or (self._verdicts and self._verdicts[0].step <= up_to):
            self._read(self._verdicts.popleft())

    def state_dict(self) -> dict[str, list[float]]:
        """What a checkpoint keeps: arguments of the next process's ``BadSteps``."""
        return {"losses": self.window.state()} if self.window else {}

    def _read(self, verdict: Verdict) -> None:
        is_bad, is_jump, loss, score = verdict.sent.wait().tolist()
        if not is_bad and not is_jump:
            self._streak = 0
            return
        self._streak += 1
        reason = f"loss {loss:.4f}, {score:.1f} standard deviations above the steps before" if is_jump else ""
        logger.warning("step %d left out: %s; %s", verdict.step, reason or "its gradient is not finite", verdict.data)
        limit = self.training.max_consecutive_skips
        if self._streak >= limit:
            raise UserError(
                f"{self._streak} steps in a row were left out, up to step {verdict.step} "
                f"(training.max_consecutive_skips = {limit})"
            )
