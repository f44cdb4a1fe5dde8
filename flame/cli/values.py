"""From what a user wrote to a typed value: flags are text, TOML has types of its own."""

from __future__ import annotations

import json
from typing import Any

EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "auto": "auto, true or false",
    "int or auto": "a whole number or auto",
    "str": "text",
    "list[str]": "a comma-separated list",
    "list[float]": "a comma-separated list of numbers",
}


def from_text(kind: str, texts: list[str]) -> Any:
    """Parse the words after a flag. Only a list takes several; each may itself hold commas.

    Raises ValueError when a word is not of the kind.
    """
    if kind.startswith("list"):
        return [_scalar_from_text(_item(kind), word) for text in texts for word in _split(text)]
    return _scalar_from_text(kind, texts[0])


def from_toml(kind: str, value: Any) -> Any:
    """Check a TOML value against the kind; a list may be an array or a text with commas.

    Raises ValueError when it is of another type: a number in quotes is not a number.
    """
    if not kind.startswith("list"):
        return _scalar_from_toml(kind, value)
    if isinstance(value, str):
        return from_text(kind, [value])
    if not isinstance(value, list):
        raise ValueError(value)
    return [_scalar_from_toml(_item(kind), each) for each in value]


def show(value: Any) -> str:
    """A value on one line, as in TOML, cut when it is long."""
    text = to_toml_value(value) if isinstance(value, str | bool | int | float | list) else str(value)
    return text if len(text) <= 100 else text[:97] + "..."


def to_toml_value(value: Any) -> str:
    """A text, boolean, number or list in TOML syntax."""
    if isinstance(value, list):
        return "[" + ", ".join(to_toml_value(each) for each in value) + "]"
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _item(kind: str) -> str:
    return kind.removeprefix("list[").removesuffix("]")


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")] if text.strip() else []


def _scalar_from_text(kind: str, text: str) -> Any:
    if kind == "bool":
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    if kind == "auto" or (kind == "int or auto" and text.lower() == "auto"):
        return text.lower()
    kind = kind.removesuffix(" or auto")
    return _checked_text(text) if kind == "str" else {"int": int, "float": float}[kind](text)


def _scalar_from_toml(kind: str, value: Any) -> Any:
    if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind == "int or auto":
        kind = "str" if value == "auto" else "int"
    if kind == "auto" and isinstance(value, bool):
        return str(value).lower()
    # bool is a subclass of int, and `steps = true` is not a number.
    if type(value).__name__ != ("str" if kind == "auto" else kind):
        raise ValueError(value)
    return _checked_text(value) if isinstance(value, str) else value


def _checked_text(text: str) -> str:
    """Refuse what neither a file name nor a TOML file can hold: NUL, and bytes of the shell that are not UTF-8."""
    text.encode("utf-8")
    if "\0" in text:
        raise ValueError(text)
    return text
