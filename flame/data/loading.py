"""Getting rows through ``datasets``: files, saved folders and the hub, with faults that say what to change."""

from __future__ import annotations

import codecs
import glob
import importlib.util
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

from flame.data import hub
from flame.errors import UserError

logger = logging.getLogger(__name__)

BUILDERS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".arrow": "arrow",
}
TEXT_BUILDERS = ("json", "csv", "text")  # those that take an encoding
COMPRESSIONS = {".gz": "", ".bz2": "", ".xz": "", ".zst": "zstandard", ".lz4": "lz4"}  # and the package it takes
HUB_ATTEMPTS = 5
FIRST_WAIT_SECONDS = 2.0


@contextmanager
def local_leader_first(is_leader: bool, barrier: Callable[[], None]) -> Iterator[None]:
    """Run the body on the node's leading rank while the node's others wait, then on them.

    Args:
        is_leader: whether this rank prepares for its node (local rank 0).
        barrier: blocks until every rank has called it; it needs a time-out as long as a download takes. A leader that
            fails still releases the others, which then meet the same fault.
    """
    if not is_leader:
        barrier()
    try:
        yield
    finally:
        if is_leader:
            barrier()


class StreamedRows(NamedTuple):
    """A ``datasets.IterableDataset`` and the files, paths or addresses, that it reads."""

    dataset: object
    files: list[str]


def load_rows(spec, streaming: bool = False):
    """The ``datasets.Dataset`` that a ``SourceSpec`` names; its ``StreamedRows`` when ``streaming``.

    A folder of ``save_to_disk`` is a ``Dataset`` always: its files are read in place, in any order.

    Raises:
        UserError: nothing is found there, it cannot be read, or the hub stays out of reach.
    """
    path = Path(spec.dataset).expanduser()
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        check_unused(spec, "a folder of save_to_disk")
        return _load_saved(spec, path)
    files = expand_files(spec.dataset)
    if files:
        check_unused(spec, "a file")
        if not any(is_url(file) or Path(file).stat().st_size for file in files):
            raise UserError(f"--training.dataset {spec.dataset}: it is empty")
        builder = _builder_for(spec.dataset, files)
        options = {"sep": "\t"} if builder == "csv" and ".tsv" in Path(files[0]).suffixes else {}
        options |= _encoding(builder, files)
        return _load(spec, builder, streaming, data_files={"train": files}, **options)
    if not path.is_dir() and _looks_local(spec.dataset):
        raise UserError(f"--training.dataset {spec.dataset}: there is no such file or folder")
    options = {"data_dir": spec.data_dir or None, "data_files": list(spec.data_files) or None}
    target = str(path) if path.is_dir() else spec.dataset
    if not path.is_dir():
        logger.info("dataset %s: no such file or folder here, asking the Hugging Face hub", spec.dataset)
    files = [str(file) for file in path.rglob("*") if file.is_file()] if path.is_dir() else []
    _warn_of_kinds(spec, files)
    options |= _encoding_of_folder(spec, files)
    return _load(spec, target, streaming, name=spec.name or None, **options)


def check_unused(spec, kind: str) -> None:
    """Name what a source of this kind has no use for: what chooses files is refused, a config's name is not read.

    Raises:
        UserError: ``data_dir`` or ``data_files`` is given.
    """
    for option, value in (("data_dir", spec.data_dir), ("data_files", ", ".join(spec.data_files))):
        if value:
            raise UserError(f"--training.{option} {value}: {spec.dataset} is {kind}, which has none; leave it out")
    if spec.name and spec.name != "default":
        logger.warning("dataset_name = %s is not used: %s is %s", spec.name, spec.dataset, kind)


def with_retries(action: Callable[[], object], what: str, sleep: Callable[[float], None] = time.sleep):
    """Call ``action``, again after a growing wait when the network fails, ``HUB_ATTEMPTS`` times in all."""
    for attempt in range(1, HUB_ATTEMPTS + 1):
        try:
            return action()
        except Exception as error:
            if attempt == HUB_ATTEMPTS or not is_transient(error):
                raise
            wait = FIRST_WAIT_SECONDS * 2 ** (attempt - 1)
            logger.warning("%s: %s; attempt %d of %d in %.0f s", what, error, attempt + 1, HUB_ATTEMPTS, wait)
            sleep(wait)


def is_url(dataset: str) -> bool:
    """Whether a text names a file on a server, such as https://... or hf://datasets/..."""
    return "://" in dataset


def _load(spec, target: str, streaming: bool, **options):
    import datasets

    def load():
        if not streaming:
            return datasets.load_dataset(target, split=spec.split, **options)
        builder = datasets.load_dataset_builder(target, **options)
        dataset = builder.as_streaming_dataset(split=spec.split)
        return StreamedRows(dataset, list((builder.config.data_files or {}).get(spec.split, [])))

    asks_hub = _asks_hub(spec, target)
    unreachable = hub.why_unreachable() if asks_hub and not datasets.config.HF_HUB_OFFLINE else ""
    try:
        with hub.offline() if unreachable else nullcontext():
            return with_retries(load, spec.dataset)
    except Exception as error:  # datasets raises ValueError, OSError, its own and pyarrow's types for users' faults
        reason = describe(error)
        if unreachable:
            reason = f"the Hugging Face hub cannot be reached ({unreachable}), and its cache here says: {reason}"
        hint = "; there is no such file or folder here either" if asks_hub else ""
        if f'Unknown split "{spec.split}"' in reason:
            hint = "; name a split with --training.dataset_split"
        raise UserError(f"--training.dataset {spec.dataset}: {reason}{hint}") from error


def _asks_hub(spec, target: str) -> bool:
    return target == spec.dataset and not Path(target).exists()


def _load_saved(spec, path: Path):
    import datasets

    if not any(path.rglob("*.arrow")):  # what save_to_disk leaves of an empty dataset cannot be loaded
        raise UserError(f"--training.dataset {spec.dataset}: it has no rows")
    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:
        raise UserError(f"--training.dataset {spec.dataset}: {describe(error)}") from error
    if isinstance(saved, datasets.DatasetDict):
        if spec.split not in saved:
            raise UserError(f"--training.dataset_split {spec.split}: {spec.dataset} has {', '.join(saved)}")
        return saved[spec.split]
    own_split = str(saved.split) if saved.split else "train"
    if spec.split not in ("train", own_split):
        raise UserError(
            f"--training.dataset_split {spec.split}: the folder {spec.dataset} holds one dataset, {own_split}"
        )
    return saved


def is_one_saved(dataset: str) -> bool:
    """Whether a text names a folder that ``Dataset.save_to_disk`` has written, not that of a ``DatasetDict``."""
    path = Path(dataset).expanduser()
    return (path / "state.json").is_file() and not (path / "dataset_dict.json").is_file()


def expand_files(dataset: str) -> list[str]:
    """The files that a path, a pattern or an address names, sorted; none when it names a folder or a hub's dataset.

    Raises:
        UserError: a pattern matches nothing.
    """
    path = Path(dataset).expanduser()
    if is_url(dataset) or path.is_file():
        return [dataset if is_url(dataset) else str(path)]
    if glob.has_magic(dataset) and not path.exists():
        files = sorted(name for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        if not files:
            raise UserError(f"--training.dataset {dataset}: the pattern matches no file")
        return files
    return []


def _warn_of_kinds(spec, files: list[str]) -> None:
    """``datasets`` reads the files of one format in a folder, and says nothing of the others."""
    kinds = Counter(filter(None, map(_builder_of, files)))
    if len(kinds) > 1 and not spec.data_files:
        folder = spec.dataset.rstrip("/")
        logger.warning(
            "dataset %s mixes files of several formats (%s), and those of one format alone are read: name "
            "them with a pattern, such as %s",
            spec.dataset,
            ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items())),
            " or ".join(f"{folder}/**/*{_ending_of(kind, files)}" for kind in sorted(kinds)),
        )


def _ending_of(builder: str, files: list[str]) -> str:
    """The ending that the first file of a format has, compression included."""
    first = next(file for file in files if _builder_of(file) == builder)
    return "".join(Path(first).suffixes[-2:] if Path(first).suffix.lower() in COMPRESSIONS else [Path(first).suffix])


def _encoding_of_folder(spec, files: list[str]) -> dict[str, str]:
    """As ``_encoding``, for a folder, or a format's name with ``data_files``, whose builder ``datasets`` chooses."""
    if spec.dataset in TEXT_BUILDERS:
        files = [file for pattern in spec.data_files for file in expand_files(pattern)]
        return _encoding(spec.dataset, files)
    builders = {_builder_of(file) for file in files} - {None}
    if not builders or not builders <= set(TEXT_BUILDERS):
        return {}
    return _encoding(builders.pop(), [file for file in files if _builder_of(file)])


def _encoding(builder: str, files: list[str]) -> dict[str, str]:
    """The option that makes ``datasets`` leave out the byte-order mark that some editors put in front of UTF-8."""
    if builder in TEXT_BUILDERS and any(_has_mark(file) for file in files if not is_url(file)):
        return {"encoding": "utf-8-sig"}
    return {}


def _has_mark(file: str) -> bool:
    import fsspec

    try:
        with fsspec.open(file, "rb", compression="infer") as content:
            return content.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
    except Exception:  # damaged in whatever way its decompressor reports: reading its rows names it
        return False


def _builder_for(dataset: str, files: list[str]) -> str:
    builders = {_builder_of(file) for file in files}
    if len(builders) > 1 or None in builders:
        odd = next((file for file in files if _builder_of(file) is None), None)
        reason = f"{odd} has an unknown ending" if odd else f"it mixes {', '.join(sorted(builders))} files"
        raise UserError(
            f"--training.dataset {dataset}: {reason}; known are {', '.join(BUILDERS)}, "
            f"each also with {', '.join(COMPRESSIONS)}"
        )
    for package in {COMPRESSIONS.get(Path(file).suffix.lower(), "") for file in files} - {""}:
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"--training.dataset {dataset}: reading it takes the package {package}; pip install {package}"
            )
    return builders.pop()


def _builder_of(file: str) -> str | None:
    path = Path(file)
    if path.suffix.lower() in COMPRESSIONS:
        path = path.with_suffix("")
    return BUILDERS.get(path.suffix.lower())


def _looks_local(dataset: str) -> bool:
    return dataset.startswith(("/", "./", "../", "~")) or dataset.count("/") > 1 or _builder_of(dataset) is not None


def is_transient(error: BaseException) -> bool:
    """Whether trying again may help: the network or the hub's servers failed, not the request itself."""
    import datasets

    if datasets.config.HF_HUB_OFFLINE or isinstance(error, FileNotFoundError):
        return False
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status == 429 or status >= 500
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    module = type(error).__module__.partition(".")[0]
    if module in ("httpx", "httpcore", "requests", "urllib3", "aiohttp"):
        return True
    return error.__cause__ is not None and is_transient(error.__cause__)


def describe(error: BaseException) -> str:
    """The error's message with that of its innermost cause, where ``datasets`` hides the reason."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, StopIteration):  # no file gave the builder a first row
        return "it has no rows"
    text = " ".join(str(error).split()) or type(error).__name__
    return text if cause is error else f"{text} ({' '.join(str(cause).split()) or type(cause).__name__})"
