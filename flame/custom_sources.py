"""Where the custom models that a job names are. Standard library only, and nothing is imported here.

``model.custom_models`` and ``experimental.custom_model_path`` hold entries of three kinds: the name of a package in a
``custom_models`` folder (the working directory's, or the one that ships with flame), a path (the folder of a package
or a Python file), and a module that Python can import.
"""

from __future__ import annotations

import importlib.util
import keyword
import sys
import sysconfig
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from flame.config import JobConfig
from flame.errors import UserError
from flame.paths import PACKAGE_ROOT, find_resource

FOLDER = "custom_models"
# A checkout keeps the folder beside the package, and so does an installation.
SHIPPED = PACKAGE_ROOT.parent / FOLDER
OPTIONS = ("model.custom_models", "experimental.custom_model_path")


@dataclass(frozen=True)
class CustomSource:
    """Code of a custom model.

    Attributes:
        module: name to import it by.
        path: its folder or file, absolute; None for a module that Python finds by itself.
    """

    module: str
    path: Path | None = None

    @property
    def file(self) -> Path | None:
        """The file that is run first."""
        return self.path / "__init__.py" if self.path and self.path.is_dir() else self.path

    @property
    def entry(self) -> str:
        """What names this code from any working directory."""
        return self.module if self.path is None or self.path.parent == SHIPPED else str(self.path)


def find_custom(entry: str) -> CustomSource:
    """The code that one entry of ``model.custom_models`` or ``experimental.custom_model_path`` names.

    Raises:
        UserError: there is no such code; the message says what is wrong with ``entry``, without repeating it.
    """
    if not entry:
        raise UserError("an entry is empty")
    inside = find_resource(Path(FOLDER) / entry.removeprefix(f"{FOLDER}."))
    for path in (inside, Path(entry).expanduser(), Path(f"{entry}.py")):
        if path.is_file() or (path / "__init__.py").is_file():
            return _from_path(path.resolve())
    if Path(entry).expanduser().is_dir():
        packages = sorted(file.parent.name for file in Path(entry).expanduser().glob("*/__init__.py"))
        hint = f"; packages in it: {', '.join(packages)}" if packages else ""
        raise UserError(f"is no package: the folder has no __init__.py{hint}")
    if _is_module_name(entry) and importlib.util.find_spec(entry.partition(".")[0]) is not None:
        return CustomSource(entry)
    if not _is_module_name(entry):
        raise UserError("no such file or folder")
    raise UserError(
        f"neither a package in {FOLDER} (there: {', '.join(shipped_packages()) or 'none'}), nor a path, "
        "nor a module that Python can import"
    )


def find_shipped(model_type: str) -> CustomSource | None:
    """The package of ``custom_models`` beside flame that is named like a model type."""
    path = SHIPPED / model_type
    return _from_path(path) if model_type.isidentifier() and (path / "__init__.py").is_file() else None


def shipped_packages() -> list[str]:
    """Names of the packages in ``custom_models`` beside flame."""
    return sorted(file.parent.name for file in SHIPPED.glob("*/__init__.py"))


def job_entries(config: JobConfig) -> list[tuple[str, str]]:
    """Each entry of a job with the option that gave it."""
    entries = [(OPTIONS[0], entry) for entry in config.model.custom_models]
    if config.experimental.custom_model_path:
        entries.append((OPTIONS[1], config.experimental.custom_model_path))
    return entries


def make_entries_absolute(config: JobConfig) -> None:
    """Rewrite a checked job's entries so that its ``config.toml`` means the same code from any folder."""
    config.model.custom_models = [find_custom(entry).entry for entry in config.model.custom_models]
    if config.experimental.custom_model_path:
        config.experimental.custom_model_path = find_custom(config.experimental.custom_model_path).entry


def _from_path(path: Path) -> CustomSource:
    name = path.stem if path.is_file() else path.name
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UserError(f"{name!r} is no name of a module; use letters, digits and _")
    if name in sys.stdlib_module_names:
        raise UserError(f"{name!r} is the name of a module of Python's own; rename it")
    if path.parent == SHIPPED:
        return CustomSource(f"{FOLDER}.{name}", path)
    source = CustomSource(name, path)
    if _is_installed(name, source.file):
        raise UserError(f"{name!r} is the name of an installed package; rename it")
    return source


def _is_installed(name: str, file: Path) -> bool:
    """Whether an installed module other than ``file`` has this name: importing it later would give the custom one."""
    spec = PathFinder.find_spec(name)
    if spec is None or spec.origin is None or Path(spec.origin).resolve() == file:
        return False
    folders = {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
    return any(Path(spec.origin).is_relative_to(folder) for folder in folders)


def _is_module_name(entry: str) -> bool:
    return all(part.isidentifier() for part in entry.split("."))
