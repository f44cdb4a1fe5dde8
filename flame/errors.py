"""Errors whose message says it all, shown without a traceback: faults that a user can mend, and deaths of workers."""

from __future__ import annotations

from collections.abc import Mapping

EXIT_USER_ERROR = 2


class UserError(Exception):
    """A fault in what the user gave: the message says what was given, what is allowed and what to change.

    Entry points print the message without a traceback and exit with ``EXIT_USER_ERROR``.
    """


class ConfigError(UserError):
    """Every fault found in a job's configuration, one line each."""

    def __init__(self, faults: list[str]):
        self.faults = list(faults)
        super().__init__("\n".join(self.faults))


class WorkerDied(RuntimeError):
    """A data worker was killed, mostly by the system for want of memory; the message says which and what helps."""


def translate_flags(message: str, flags: Mapping[str, str]) -> str:
    """A message with options replaced by those that stand for them in another place, by their names without ``--``."""
    for name in sorted(flags, key=len, reverse=True):  # training.dataset is the beginning of others
        message = message.replace(f"--{name}", f"--{flags[name]}")
    return message
