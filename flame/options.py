"""What is known of one option besides its type and default: the values it allows, and what it may not be set to yet."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Rule:
    """The limits of one option. A list is checked entry by entry; ``None`` means unset and is always allowed."""

    choices: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    refused: dict[Any, str] = field(default_factory=dict)
    """Values that look right and are not, each with the reason and what to use."""
    not_yet: str = ""
    """Set for an option whose feature this version lacks: only the default is taken. Says what to do instead."""
    word: str = ""
    """A word that a number may also be; something replaces it by a number before the number is needed."""

    def allows(self, value: Any) -> bool:
        """Whether one value (not a list) keeps within the choices and bounds."""
        if value is None:
            return True
        if self.choices:
            return value in self.choices
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        return not math.isnan(value) and all(
            (
                self.minimum is None or value >= self.minimum,
                self.above is None or value > self.above,
                self.maximum is None or value <= self.maximum,
                self.below is None or value < self.below,
            )
        )

    def describe(self) -> str:
        """The allowed values in words, or an empty string when the type alone says it."""
        if self.choices:
            return "one of " + ", ".join(choice or '""' for choice in self.choices)
        bounds = ((self.minimum, "at least"), (self.above, "above"), (self.maximum, "at most"), (self.below, "below"))
        return " and ".join(f"{word} {bound}" for bound, word in bounds if bound is not None)


def option(default: Any, *, compare: bool = True, **limits: Any) -> Any:
    """A dataclass field with a default and the limits of ``Rule``; a list default is copied for each instance.

    ``compare`` off leaves the option out when two configs are compared.
    """
    metadata = {"rule": Rule(**limits)}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), compare=compare, metadata=metadata)
    return field(default=default, compare=compare, metadata=metadata)


@dataclass(frozen=True)
class Alias:
    """An older published name of an option."""

    target: str
    """The option that it sets, as ``section.name``."""
    values: dict[Any, Any] = field(default_factory=dict)
    """For an alias that is a switch: what true and false set the target to. Empty: the value goes through as it is."""


ALIASES: dict[str, Alias] = {
    "optimizer.fused": Alias("optimizer.implementation", {True: "fused", False: "foreach"}),
    "optimizer.scheduler": Alias("lr_scheduler.decay_type"),
    "optimizer.min_lr_ratio": Alias("lr_scheduler.lr_min"),
    "training.warmup_steps": Alias("lr_scheduler.warmup_steps"),
    "metrics.rank_0_only": Alias("metrics.save_for_all_ranks", {True: False, False: True}),
    "checkpoint.model_weights_only": Alias("checkpoint.last_save_model_weights_only"),
    "float8.enable_float8_linear": Alias("model.converters", {True: ["float8"], False: []}),
}


def rule_of(option_field: Field) -> Rule:
    """The limits of a dataclass field made by ``option``."""
    return option_field.metadata["rule"]


def default_of(option_field: Field) -> Any:
    """The default of a dataclass field, a fresh list where it is one."""
    return option_field.default if option_field.default is not MISSING else option_field.default_factory()


def iter_options(section: Any) -> Iterator[Field]:
    """The options of a section (a dataclass or an instance of one), in the order in which they are written."""
    return (each for each in fields(section) if "rule" in each.metadata)
