"""Reading single rows, and saying what is wrong with one."""

from __future__ import annotations

import numpy as np

from flame.data.sources import Source


class UnreadableRow:
    """Stands for a row whose bytes could not be read."""

    def __init__(self, error: Exception):
        self.reason = f"it cannot be read ({type(error).__name__}: {error})"


def read_rows(source: Source, rows: list[int]) -> list:
    """The values of ``rows``; when they cannot be read together, each by itself, so that only the bad ones are lost."""
    try:
        return source.read(rows)
    except Exception as error:  # whatever a file system or Arrow raises for damaged files
        if len(rows) == 1:
            return [UnreadableRow(error)]
        return [value for row in rows for value in read_rows(source, [row])]


def find_fault(value, is_tokenized: bool, vocab_size: int) -> str | None:
    """Why a row's value cannot be trained on, or None when it can."""
    if isinstance(value, UnreadableRow):
        return value.reason
    if not is_tokenized:
        return None if isinstance(value, str) else f"the value is {_kind_of(value)}, not text"
    if not isinstance(value, np.ndarray):
        return f"the value is {_kind_of(value)}, not a list of token ids"
    if value.size and (value.min() < 0 or value.max() >= vocab_size):
        wrong = value.min() if value.min() < 0 else value.max()
        return f"token id {wrong} is outside the tokenizer's 0 to {vocab_size - 1}"
    return None


def _kind_of(value) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"
