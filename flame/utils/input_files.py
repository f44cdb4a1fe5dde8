"""What a command's input consists of, so that a later run notices when it is no longer the same."""

from __future__ import annotations

import hashlib
from datetime import datetime
from pathlib import Path

from flame.errors import UserError


def check_apart(spec, output: Path, flag: str) -> None:
    """Refuse to write into the folder that is read, whose files the next run would take for input.

    Raises:
        UserError: ``output``, which the option ``flag`` names, lies there.
    """
    folder = Path(spec.dataset).expanduser()
    if folder.is_dir() and output.expanduser().resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{flag} {output}: it lies in the input folder {folder}; give one outside of it")


def describe_input(spec, dataset) -> dict[str, str]:
    """Plain data that changes when the input does: of files their sizes and when they were changed.

    Files on this machine are looked at where they lie, so that it does not matter when the cache of ``datasets`` was
    cleared. What comes from the hub or a server is known by its files there, which the names of the converted files
    hold a hash of.

    Args:
        spec: the ``flame.data.sources.SourceSpec`` that names the input.
        dataset: the ``datasets.Dataset`` that was opened; not used for ``builtin:`` ones.
    """
    from flame.data.fingerprint import relative_names
    from flame.data.sources import BUILTIN_PREFIX, open_source

    if spec.dataset.startswith(BUILTIN_PREFIX):
        return {spec.dataset: f"texts {_digest(open_source(spec).texts)}"}
    if files := local_files(spec):
        return dict(zip(relative_names(files), map(_describe_file, files), strict=True))
    return {"/".join(Path(entry["filename"]).parts[-5:]): "converted" for entry in dataset.cache_files}


def local_files(spec) -> list[str]:
    """The files on this machine that a source is made of; of a folder, all that lie there."""
    from flame.data.loading import expand_files, is_url

    path = Path(spec.dataset).expanduser()
    files = expand_files(spec.dataset)
    if not files and path.is_dir():
        files = [str(file) for file in sorted(path.rglob("*")) if file.is_file()]
    elif not files:
        files = [file for pattern in spec.data_files for file in expand_files(pattern)]
    return [file for file in files if not is_url(file)]


def _describe_file(file: str) -> str:
    found = Path(file).stat()
    return f"{found.st_size} bytes of {datetime.fromtimestamp(found.st_mtime).isoformat(' ')}"


def _digest(texts: list[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)} {text}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]
