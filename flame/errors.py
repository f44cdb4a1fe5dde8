"""Errors whose message says it all, shown without a traceback: faults that a user can mend, and deaths of workers."""

from __future__ import annotations

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
