"""Where compiled kernels and tuning results are kept. Standard library only: the libraries read it as they start."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from flame.errors import UserError
from flame.paths import user_cache_folder

# The environment variable of each library that keeps something, and its folder inside job.cache_dir.
FLASH_ATTENTION_4 = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
FLASH_ATTENTION_4_SWITCH = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"  # "1": it keeps what it compiles
FOLDERS = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    FLASH_ATTENTION_4: "flash_attention_4",
}
# Have every autotuned kernel keep what it measured, those that FLA brings and those that do not ask for it.
KEEP_RESULTS = {"FLA_CACHE_RESULTS": "1", "TRITON_CACHE_AUTOTUNING": "1"}


def set_up_caches(cache_dir: str, environ: MutableMapping[str, str]) -> list[str]:
    """Have the libraries keep what they compile and tune in ``cache_dir``, or in their own folders when it is empty.

    Variables that the user has set stay as they are.

    Args:
        environ: changed in place.

    Returns:
        One line for each variable that goes before ``cache_dir``.

    Raises:
        UserError: the folder cannot be made or written to.
    """
    for name, value in KEEP_RESULTS.items():
        environ.setdefault(name, value)
    if not cache_dir:
        return []
    notes = []
    for name, folder in FOLDERS.items():
        path = str(Path(cache_dir).absolute() / folder)
        if environ.setdefault(name, path) == path:
            _check_writable(cache_dir, Path(path))
        else:
            notes.append(f"{name} = {environ[name]} from the environment goes before job.cache_dir = {cache_dir}")
    return notes


def triton_cache(environ: Mapping[str, str]) -> Path:
    """Where Triton keeps what it compiles and tunes."""
    # Not Path.home(), which fails for users without a home folder; Triton's own default does not.
    home = environ.get("TRITON_HOME") or os.path.expanduser("~/")
    return Path(environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"))


def inductor_cache(environ: Mapping[str, str]) -> Path:
    """Where torch.compile keeps its graphs."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # an id without a name, as containers have
        user = f"uid_{os.getuid()}"
    default = os.path.join(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))
    return Path(environ.get("TORCHINDUCTOR_CACHE_DIR") or default)


def flash_attention_4_cache(environ: Mapping[str, str]) -> Path:
    """Where FlashAttention-4 keeps what it compiles; flame tells it so (``flame.models.flash_attention_4``)."""
    return Path(environ.get(FLASH_ATTENTION_4) or user_cache_folder() / FOLDERS[FLASH_ATTENTION_4])


def _check_writable(cache_dir: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"job.cache_dir = {cache_dir}: cannot be written to: {error.strerror} ({folder}); give another folder, or "
            "leave it out for the libraries' own"
        ) from error
