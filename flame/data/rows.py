"""Rows to documents, and what is wrong with a row that cannot become one."""

from __future__ import annotations

import numpy as np

from flame.data.columns import UnreadableRow
from flame.data.documents import Documents
from flame.data.sources import Source
from flame.data.tokenize import DocumentEncoder, Tokenized
from flame.errors import UserError


def read_rows(source: Source, rows: list[int], encoder: DocumentEncoder, skip_bad_rows: bool) -> Documents:
    """Read and tokenise ``rows`` of one source; with ``skip_bad_rows`` a bad one becomes an empty document.

    Raises:
        UserError: a row is bad; the message names source, row and column.
    """
    return encoder.frame(tokenize_values(source, read_values(source, rows), rows, encoder, skip_bad_rows))


def tokenize_values(source, values: list, labels: list, encoder: DocumentEncoder, skip_bad_rows: bool) -> Tokenized:
    """Tokenise the values of rows that ``labels`` name; with ``skip_bad_rows`` a bad one is left out.

    Raises:
        UserError: a row is bad; the message names source, row and column.
    """
    skipped = _bad_places(values, source.is_tokenized, encoder.vocab_size)
    for place in skipped:
        if not skip_bad_rows:
            fault = find_fault(values[place], source.is_tokenized, encoder.vocab_size)
            raise UserError(
                f"{source.name}: row {labels[place]} (counted from 0), column {source.column}: {fault}; "
                "mend the row, or leave such rows out with --training.on_bad_row skip"
            )
        values[place] = np.empty(0, dtype=np.int64) if source.is_tokenized else ""
    tokenized = Tokenized(values, are_ids=True) if source.is_tokenized else encoder.tokenize(values)
    tokenized.skipped = skipped
    return tokenized


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


def _bad_places(values: list, is_tokenized: bool, vocab_size: int) -> list[int]:
    if set(map(type, values)) == {str} and not is_tokenized:
        return []
    return [place for place, value in enumerate(values) if find_fault(value, is_tokenized, vocab_size)]


def read_values(source: Source, rows: list[int]) -> list:
    """The values of ``rows``; when they cannot be read together, each by itself, so that only the bad ones are lost."""
    try:
        return source.read(rows)
    except Exception as error:  # whatever a file system or Arrow raises for damaged files
        if len(rows) == 1:
            return [UnreadableRow(error)]
        return [value for row in rows for value in read_values(source, [row])]


def _kind_of(value) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"
