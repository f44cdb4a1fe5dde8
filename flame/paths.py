"""Where files are that flame ships, which a checkout keeps beside the package and a wheel inside it, or remembers."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

PACKAGE_ROOT = Path(__file__).resolve().parent


def find_resource(name: str | Path) -> Path:
    """Resolve a path that may name a shipped file, such as ``configs/debug.toml``.

    The working directory wins, so that a user's own file is never shadowed; then the checkout that holds this
    package; then the copy inside an installed wheel. A name found nowhere comes back unchanged, for the caller to
    report as the user wrote it.
    """
    path = Path(name).expanduser()
    if path.is_absolute() or os.path.exists(path):  # which takes a name too long for a file for one that is missing
        return path
    for root in (PACKAGE_ROOT.parent, PACKAGE_ROOT / "shipped"):
        if os.path.exists(root / path):
            return root / path
    return path


def user_cache_folder() -> Path:
    """The user's cache folder for flame."""
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "flame"
    try:
        return Path.home() / ".cache" / "flame"
    except RuntimeError:  # a user without a home folder, as containers have
        return Path(tempfile.gettempdir()) / "flame"
