"""Which column of a source is trained on, and what its values may be."""

from __future__ import annotations

import numpy as np

from flame.errors import UserError

TEXT_COLUMNS = ("text", "content")
TOKENS_COLUMN = "input_ids"


class UnreadableRow:
    """Stands for a row whose bytes could not be read."""

    def __init__(self, error: Exception):
        self.reason = f"it cannot be read ({type(error).__name__}: {error})"


def choose_column(name: str, schema, text_column: str) -> str:
    """The column of an Arrow ``schema`` to train on.

    Raises:
        UserError: there is none, or it holds neither text nor token ids.
    """
    columns = schema.names
    if text_column:
        if text_column not in columns:
            raise UserError(
                f"--training.text_column {text_column}: {name} has no such column; it has {', '.join(columns)}"
            )
        candidates = [text_column]
    else:
        candidates = [column for column in (*TEXT_COLUMNS, TOKENS_COLUMN) if column in columns]
    if not candidates:
        raise UserError(
            f"--training.dataset {name}: none of its columns ({', '.join(columns)}) is named "
            f"{', '.join(TEXT_COLUMNS)} or {TOKENS_COLUMN}; name the one with the text by --training.text_column"
        )
    column = candidates[0]
    kind = schema.field(column).type
    if not (holds_text(kind) or holds_lists(kind) or holds_mixed(kind)):
        raise UserError(
            f"--training.dataset {name}: column {column} holds {kind}, neither text nor lists of token ids; "
            "name another with --training.text_column"
        )
    return column


def holds_text(kind) -> bool:
    """Whether an Arrow type is one of text."""
    from pyarrow import types

    # A column of type null has only missing values: each of its rows is reported as such.
    return types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind)


def holds_mixed(kind) -> bool:
    """Newer ``datasets`` keep a JSON column of several types; its rows that are not text are reported one by one."""
    return getattr(kind, "extension_name", "") == "arrow.json"


def holds_lists(kind) -> bool:
    """Whether an Arrow type is one of lists of token ids."""
    from pyarrow import types

    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return is_list and types.is_integer(kind.value_type)


def token_ids(value) -> np.ndarray | None:
    """Ids of an Arrow list, int64 [length]; None when it or one of its ids is missing."""
    if not value.is_valid or value.values.null_count:
        return None
    return value.values.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
