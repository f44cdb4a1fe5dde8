"""Job files: a TOML table per section, read strictly and written so that they read back equal."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from flame.cli import names
from flame.cli.settings import Setting, Source
from flame.cli.values import EXPECTED, from_toml, show, to_toml_value
from flame.config import JobConfig
from flame.options import iter_options
from flame.paths import find_resource


def read_job_file(name: str) -> Source:
    """Read a job file; every wrong section, key and type in it becomes a fault of the source."""
    source = Source()
    path = find_resource(name)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        source.unreadable = True
        source.faults.append(f"--job.config_file = {show(name)}: no such file{_files_nearby(path)}")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        source.unreadable = True
        reason = error.strerror if isinstance(error, OSError) else str(error)
        source.faults.append(f"{name}: cannot be read as TOML: {reason}")
    else:
        for section, table in tables.items():
            _read_section(source, name, section, table)
    return source


def to_toml(config: JobConfig) -> str:
    """The whole config as a job file. Unset options are left out; reading it back gives an equal config."""
    lines = []
    for section in names.sections():
        table = getattr(config, section)
        values = {each.name: getattr(table, each.name) for each in iter_options(table)}
        lines.append(f"[{section}]")
        lines += [f"{key} = {to_toml_value(value)}" for key, value in values.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _read_section(source: Source, file: str, section: str, table: Any) -> None:
    if not isinstance(table, dict):
        hint = names.did_you_mean(names.nearest_option(section))
        source.faults.append(f"{file}: {section} = {show(table)}: an option must stand in a section{hint}")
        return
    known_section = section if section in names.sections() else names.nearest_section(section)
    if known_section != section:
        all_sections = "; the sections are " + ", ".join(names.sections())
        hint = names.did_you_mean(known_section and f"[{known_section}]") or all_sections
        source.faults.append(f"{file}: [{section}]: no such section{hint}")
    # The keys of a misspelt section are checked as those of the one it meant, so that no fault waits for the next try.
    for key, value in table.items() if known_section else ():
        _read_key(source, f"{file}: {section}.{key}", f"{known_section}.{key}", value)


def _read_key(source: Source, origin: str, name: str, value: Any) -> None:
    if not names.is_known(name):
        guess = names.nearest_option(name)
        source.add_unknown(f"{origin} = {show(value)}", guess, names.did_you_mean(guess))
        return
    kind = names.kind_of(name)
    try:
        source.settings.append(Setting(name, from_toml(kind, value), origin))
    except ValueError:
        advice = " without quotes" if isinstance(value, str) else ""
        source.add_fault(name, f"{origin} = {show(value)}: must be {EXPECTED[kind]}{advice}")


def _files_nearby(path: Path) -> str:
    """The nearest name among the job files beside a missing one, or what job files there are, shipped ones too."""
    folders = [folder for folder in (path.parent, Path("configs")) if any(find_resource(folder).glob("*.toml"))]
    found = [str(folder / each.name) for folder in folders for each in sorted(find_resource(folder).glob("*.toml"))]
    return (
        names.did_you_mean(names.nearest(str(path), found)) or (found and f"; there are {', '.join(found[:8])}") or ""
    )
