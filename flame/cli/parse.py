"""The command line: flags and a job file become a checked config, or every fault at once.

Standard library only, so that help and faults come before anything slow is imported.
``python -m flame.cli -h`` prints the help; ``python -m flame.cli --check <flags>`` checks a job without running it.
"""

from __future__ import annotations

import signal
import sys

from flame.cli import names
from flame.cli.job_file import read_job_file, to_toml
from flame.cli.settings import Setting, Source, apply
from flame.cli.usage import format_help
from flame.cli.validate import find_faults
from flame.cli.values import EXPECTED, from_text, show
from flame.config import JobConfig, resolve_defaults
from flame.custom_sources import make_entries_absolute
from flame.errors import EXIT_USER_ERROR, ConfigError

__all__ = ["main", "parse_args", "to_toml", "wants_help"]

HELP_FLAGS = ("-h", "--help")
SWITCHES = ("bool", "auto")  # kinds that --name turns on and --no-name off


def wants_help(argv: list[str]) -> bool:
    """Whether the arguments ask for help."""
    return any(each in HELP_FLAGS for each in argv)


def parse_args(argv: list[str], check: bool = True) -> JobConfig:
    """The config of a job: the command line goes before the job file, and that before the defaults.

    ``check`` off leaves out the checks on values, and with them what makes a job complete (a model, a dataset): names
    and types only. Raises ConfigError with every fault, one line each.
    """
    flags = read_flags(argv)
    config_file = next((each.value for each in flags.settings if each.name == "job.config_file"), "")
    sources = [read_job_file(config_file), flags] if config_file else [flags]
    config = JobConfig()
    for source in sources:
        apply(config, source)
    faults = [fault for source in sources for fault in source.faults]
    if check:
        doubtful = set().union(*(source.doubtful for source in sources))
        if any(source.unreadable for source in sources):
            doubtful |= names.options().keys()
        faults += [fault for name, fault in find_faults(config) if name in config.given or name not in doubtful]
    if faults:
        raise ConfigError(faults)
    resolve_defaults(config)
    if check:
        make_entries_absolute(config)
    return config


def read_flags(argv: list[str]) -> Source:
    """Read the words of a command line; every wrong name, type and stray word becomes a fault of the source."""
    source = Source()
    given: dict[str, Setting] = {}
    for flag, words in _group(argv, source):
        name, negated = _split_negation(flag)
        if not names.is_known(name):
            guess = names.nearest_option(name)
            source.add_unknown(" ".join([flag, *words[:1]]), guess, names.did_you_mean(guess and f"--{guess}"))
            continue
        setting = _read_flag(source, flag, name, negated, words)
        if setting is None:
            continue
        first = given.setdefault(name, setting)
        if first is setting:
            source.settings.append(setting)
        elif isinstance(setting.value, list):
            first.value.extend(setting.value)
        else:
            source.add_fault(name, f"{flag} = {show(setting.value)}: given twice, first as {show(first.value)}")
    return source


def _group(argv: list[str], source: Source) -> list[tuple[str, list[str]]]:
    """Each flag with the words up to the next one; ``--flag=value`` has just that value."""
    groups: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word.partition("=")
            groups.append((flag, [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            source.faults.append(f"{show(word)}: not a flag; options are written --section.name value")
    return groups


def _split_negation(flag: str) -> tuple[str, bool]:
    """``--no-section.name`` and ``--section.no-name`` both switch ``section.name`` off."""
    name = flag.removeprefix("--")
    positive = name.replace("no-", "", 1)
    return (positive, True) if positive != name and names.is_known(positive) else (name, False)


def _read_flag(source: Source, flag: str, name: str, negated: bool, words: list[str]) -> Setting | None:
    """One flag's setting; None, with a fault added, when its words are not what it takes."""
    kind = names.kind_of(name)
    written = f"{flag} = {show(' '.join(words))}"
    most = None if kind.startswith("list") else 0 if negated else 1
    if negated and kind not in SWITCHES:
        source.add_fault(name, f"{flag}: only a switch can be turned off like this; --{name} takes {EXPECTED[kind]}")
    elif most is not None and len(words) > most:
        advice = "; put a value with blanks in quotes" if kind == "str" else ""
        source.add_fault(name, f"{written}: takes {'one value' if most else 'no value'}{advice}")
    elif not words and kind not in SWITCHES:
        source.add_fault(name, f"{flag}: needs a value: {EXPECTED[kind]}")
    else:
        try:
            # A flag alone reads as the word that it stands for.
            return Setting(name, from_text(kind, words or [str(not negated)]), flag)
        except ValueError:
            source.add_fault(name, f"{written}: must be {EXPECTED[kind]}")
    return None


def main(argv: list[str]) -> int:
    """Print the help, or check a job and print its resolved options, or nothing with ``--check``.

    Returns the exit code: 0, or 2 with the job's faults on stderr.
    """
    # `… | head` closes the pipe early, which is no error.
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if wants_help(argv):
        print(format_help())
        return 0
    quiet = "--check" in argv
    try:
        config = parse_args([each for each in argv if each != "--check"])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    if not quiet:
        print(to_toml(config))
    return 0
