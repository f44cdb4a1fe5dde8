"""Decisions that all ranks of a run take together, so that a fault on one rank is an error on all and never a hang."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from flame.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """What a function gave on one rank: its value, or the text of its error (plain data, so that it can be sent)."""

    value: Any = None
    error: str | None = None
    is_user_error: bool = False


class Ranks:
    """The ranks that share a checkpoint folder; one lone rank when ``torch.distributed`` is not initialised.

    Args:
        group: process group of the ranks; the default group when None.
        alone: act as a single process although ``torch.distributed`` is initialised (a tool run by one rank).
    """

    def __init__(self, group: dist.ProcessGroup | None = None, alone: bool = False):
        self.group = group
        self.distributed = not alone and dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.distributed else 0
        self.size = dist.get_world_size(group) if self.distributed else 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, items: list[T]) -> list[T]:
        """This rank's part of work that is divided among all."""
        return items[self.rank :: self.size]

    def gather(self, value: T) -> list[T]:
        """The value of every rank, on every rank, in rank order. Collective."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def union(self, names: Iterable[str]) -> set[str]:
        """The names of all ranks together; a digest is all that travels where every rank has the same. Collective."""
        own = set(names)
        digest = hashlib.sha256("\n".join(sorted(own)).encode()).hexdigest()
        if len(set(self.gather(digest))) == 1:
            return own
        return set().union(*self.gather(own))

    def on_main(self, function: Callable[[], T]) -> T:
        """Run ``function`` on rank 0 and return its value, or raise its error, on every rank. Collective."""
        if self.size == 1:
            return function()
        outcome, cause = _attempt(function) if self.is_main else (None, None)
        box = [outcome]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        if box[0].error is not None:
            raise _error(box[0].error, box[0].is_user_error) from cause
        return box[0].value

    def together(self, function: Callable[[], T]) -> T:
        """Run ``function`` on every rank and return the rank's own value, or one error naming the ranks. Collective.

        Only errors travel, so the value may be large.
        """
        if self.size == 1:
            return function()
        outcome, cause = _attempt(function)
        failures = self.gather((outcome.error, outcome.is_user_error))
        failed = [(rank, error, is_user_error) for rank, (error, is_user_error) in enumerate(failures) if error]
        if failed:
            message = "; ".join(f"rank {rank}: {error}" for rank, error, _ in failed[:4])
            raise _error(message, all(is_user_error for *_, is_user_error in failed)) from cause
        return outcome.value


def _attempt(function: Callable[[], Any]) -> tuple[Outcome, Exception | None]:
    try:
        return Outcome(value=function()), None
    except Exception as error:
        is_user_error = isinstance(error, UserError)
        text = str(error) if is_user_error else f"{type(error).__name__}: {error}"
        return Outcome(error=text, is_user_error=is_user_error), error


def _error(message: str, is_user_error: bool) -> Exception:
    return UserError(message) if is_user_error else RuntimeError(message)
