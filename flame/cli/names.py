"""Looking options up by ``section.name``, and guessing what a wrong name meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import Field, fields
from functools import cache

from flame.config import JobConfig
from flame.options import ALIASES, iter_options, rule_of


@cache
def sections() -> dict[str, type]:
    """Section names and their dataclasses, in order."""
    return {each.name: each.default_factory for each in fields(JobConfig) if each.name != "given"}


@cache
def options() -> dict[str, Field]:
    """Every option by ``section.name``, in order, without the aliases."""
    return {f"{section}.{each.name}": each for section, kind in sections().items() for each in iter_options(kind)}


def is_known(name: str) -> bool:
    """Whether ``section.name`` is an option or an alias of one."""
    return name in options() or name in ALIASES


def target_of(name: str) -> str:
    """The option that a known name sets: itself, or what it is an alias of."""
    return ALIASES[name].target if name in ALIASES else name


def kind_of(name: str) -> str:
    """Type of a known name's value: int, float, bool, auto (a switch or "auto"), int or auto, str, list[str] or
    list[float]."""
    if name in ALIASES and ALIASES[name].values:
        return "bool"
    option = options()[target_of(name)]
    rule = rule_of(option)
    if rule.choices == ("auto", "true", "false"):
        return "auto"
    kind = str(option.type).removesuffix(" | None")
    return f"{kind} or {rule.word}" if rule.word else kind


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most like the given one, upper or lower case; None when none is alike."""
    by_lower = {each.lower(): each for each in known}
    matches = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[matches[0]] if matches else None


def nearest_section(section: str) -> str | None:
    """The section that a wrong section name meant."""
    return nearest(section, sections())


def nearest_option(name: str) -> str | None:
    """The option or alias that a wrong ``section.name``, or a name without section, meant."""
    known = [*options(), *ALIASES]
    section, _, key = name.replace("-", "_").rpartition(".")
    same_key = [each for each in known if each.rpartition(".")[2] == key]
    if same_key:
        return nearest(name, same_key) or same_key[0]
    in_section = [each for each in known if each.partition(".")[0] == section]
    return nearest(name, in_section or known)


def did_you_mean(guess: str | None) -> str:
    """The end of a fault's line that names the guess; empty without one."""
    return f"; did you mean {guess}?" if guess else ""
