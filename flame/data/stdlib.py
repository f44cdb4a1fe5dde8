"""The embedded corpus ``builtin:stdlib``: the source text of the Python standard library on this machine."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from flame.errors import UserError

# Installed packages are not the standard library, and distributions differ in whether they ship its tests.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def list_stdlib_files() -> list[Path]:
    """Paths of the library's ``.py`` files, sorted by their path below the library's folder."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def read_stdlib_texts() -> list[str]:
    """One text per file that is UTF-8 and not empty; which files there are depends on the Python version.

    Raises:
        UserError: this Python carries its library without source files.
    """
    texts = []
    for path in list_stdlib_files():
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text:
            texts.append(text)
    if not texts:
        raise UserError(
            f"builtin:stdlib: no Python source files under {sysconfig.get_path('stdlib')}; "
            "give --training.dataset another source"
        )
    return texts
