"""One option as a user wrote it, and how such settings become a config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flame.cli import names
from flame.cli.values import show
from flame.config import JobConfig
from flame.options import ALIASES


@dataclass(frozen=True)
class Setting:
    """A typed value for a known option or alias."""

    name: str
    """``section.name`` as the user wrote it."""
    value: Any
    origin: str
    """How it was written: a flag, or a TOML file and the key in it."""

    @property
    def target(self) -> str:
        """The option that it sets."""
        return names.target_of(self.name)

    @property
    def target_value(self) -> Any:
        """The value for that option; an alias may turn it round."""
        values = ALIASES[self.name].values if self.name in ALIASES else {}
        return values[self.value] if values else self.value


@dataclass
class Source:
    """What one source, the command line or a TOML file, says: its settings, and its faults."""

    settings: list[Setting] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)
    """Options that a fault is about already, so that a check on their values would only repeat it."""
    unreadable: bool = False
    """The source could not be read: what it sets is unknown."""

    def add_fault(self, name: str, fault: str) -> None:
        """Add a fault in what was given for a known option."""
        self.faults.append(fault)
        self.doubtful.add(names.target_of(name))

    def add_unknown(self, written: str, guess: str | None, hint: str) -> None:
        """Add the fault of an unknown name; the option that was meant, when there is one, is then in doubt."""
        self.faults.append(f"{written}: no such option{hint}")
        if guess:
            self.doubtful.add(names.target_of(guess))


def apply(config: JobConfig, source: Source) -> None:
    """Write a source's settings into the config, over what an earlier source said.

    An option given under two names with different values adds a fault to the source.
    """
    seen: dict[str, Setting] = {}
    for setting in source.settings:
        first = seen.setdefault(setting.target, setting)
        if first is not setting and first.target_value != setting.target_value:
            source.faults.append(
                f"{setting.origin} = {show(setting.value)}: differs from {first.origin} = {show(first.value)}, "
                "another name of the same option; give one of them"
            )
            continue
        section, _, key = setting.target.partition(".")
        value = setting.target_value
        setattr(getattr(config, section), key, list(value) if isinstance(value, list) else value)
        config.given[setting.target] = setting.origin
