"""The versions that flame works with, checked before anything slow is imported.

``python -m flame.launch.versions [module ...]`` exits with 0 when this Python has all of them and the named modules.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from importlib.util import find_spec

from flame.errors import EXIT_USER_ERROR, UserError

Version = tuple[int, ...]

PYTHON: Version = (3, 11)
REQUIRED: dict[str, tuple[Version, Version | None]] = {
    "torch": ((2, 11), None),
    "torchtitan": ((0, 2, 2), (0, 3)),
    "flash-linear-attention": ((0, 6), None),
    "transformers": ((5,), None),
    "datasets": ((4,), None),
    "tokenizers": ((0,), None),
    "safetensors": ((0,), None),
    "torchao": ((0,), None),
    "rich": ((0,), None),
    "numpy": ((0,), None),
}
"""Distributions with the lowest version that works and the first one that does not; pyproject.toml says the same.

TensorBoard and W&B are missed only by a job that turns them on.
"""

INSTALL = f"{sys.executable} -m pip install -c constraints.txt -e ."


def check_versions() -> None:
    """Raise UserError, one line, when this Python or one of its packages is missing or too old or too new."""
    faults = []
    if sys.version_info < PYTHON:
        faults.append(f"Python {sys.version.split()[0]} (needs >={_show(PYTHON)})")
    for name, (lowest, too_new) in REQUIRED.items():
        needs = f"needs >={_show(lowest)}" + (f",<{_show(too_new)}" if too_new else "")
        installed = installed_version(name)
        if installed is None:
            faults.append(f"no {name} ({needs})")
        elif parse(installed) < lowest or (too_new and parse(installed) >= too_new):
            faults.append(f"{name} {installed} ({needs})")
    if faults:
        raise UserError(f"{sys.executable} has {', '.join(faults)}; install with: {INSTALL}")


def parse(version: str) -> Version:
    """The release numbers of a version: ``2.13.0+cpu`` is (2, 13, 0)."""
    return tuple(int(number) for number in re.match(r"\d+(?:\.\d+)*", version).group().split("."))


def installed_version(name: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _show(version: Version) -> str:
    return ".".join(str(number) for number in version)


def main(modules: list[str]) -> int:
    """Check the versions and that the modules can be imported; the exit code is returned, the reason printed."""
    try:
        check_versions()
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        print(f"{sys.executable} has no {', '.join(missing)}", file=sys.stderr)
    return EXIT_USER_ERROR if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
