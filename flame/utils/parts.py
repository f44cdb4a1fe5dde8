"""Writing a large folder in parts, by several processes, so that an interrupted command goes on where it stopped.

Parts collect in ``OUTPUT.partial``; each appears there by a rename once it is whole, which marks it as done. The
output folder itself appears by one rename at the end.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flame.errors import UserError

# Hidden, so that `datasets` does not take it for data.
SETTINGS_FILE = ".flame.json"
MAX_CHANGES = 3


@dataclass(frozen=True)
class Part:
    """Rows ``start`` to ``stop`` (left out) of the input, and the file that they go to."""

    start: int
    stop: int
    path: Path

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


def split_rows(num_rows: int, paths: list[Path]) -> list[Part]:
    """Deal rows to files in their order, as evenly as can be."""
    bounds = [number * num_rows // len(paths) for number in range(len(paths) + 1)]
    return [Part(start, stop, path) for start, stop, path in zip(bounds, bounds[1:], paths, strict=False)]


class PartialFolder:
    """A folder in the making.

    Args:
        output: the folder to be.
        flag: the option that named it, for messages.
        settings: plain data that decides what the folder will hold, by names that a user understands; what was made
            with other settings is neither mixed in nor taken for the result.

    Raises:
        UserError: ``output`` holds something else, or it or its parts were made with other settings.
    """

    def __init__(self, output: Path, flag: str, settings: dict):
        output = output.absolute()  # "." has no name to add .partial to
        self.output = output
        self.settings = json.loads(json.dumps(settings))
        self.parts = output.with_name(output.name + ".partial")
        self.is_finished = (output / SETTINGS_FILE).is_file()
        if not self.is_finished and output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise UserError(f"{flag} {output}: it exists already; delete it, or give another folder")
        made, how = (output, "made") if self.is_finished else (self.parts, "begun")
        if differences := self._differences(made):
            raise UserError(
                f"{flag} {output}: {made} was {how} with other input or options ({'; '.join(differences)}); "
                "delete it, or give another folder"
            )

    def begin(self) -> None:
        """Make the folder of parts, or go on with the one that an interrupted run left."""
        self.parts.mkdir(parents=True, exist_ok=True)
        with write_whole(self.parts / SETTINGS_FILE) as path:
            path.write_text(json.dumps(self.settings), encoding="utf-8")

    def publish(self, folder: Path) -> None:
        """Make ``folder``, which lies in the folder of parts or is that folder, the output."""
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink()
        if folder != self.parts:
            shutil.copy(self.parts / SETTINGS_FILE, folder / SETTINGS_FILE)
        folder.rename(self.output)
        shutil.rmtree(self.parts, ignore_errors=True)

    def _differences(self, folder: Path) -> list[str]:
        path = folder / SETTINGS_FILE
        if not path.is_file():
            return []
        found = json.loads(path.read_text(encoding="utf-8"))
        changes = list(describe_changes(found, self.settings))
        more = [f"and {len(changes) - MAX_CHANGES} more"] if len(changes) > MAX_CHANGES else []
        return changes[:MAX_CHANGES] + more


def describe_changes(before: dict, now: dict) -> Iterator[str]:
    """What differs between two plain dicts, by the path of keys, in the order of ``now``."""
    for key in [*now, *(key for key in before if key not in now)]:
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from (f"{key} {change}" for change in describe_changes(old, new))
        elif key not in before or key not in now:
            yield f"{key} is {'new' if key not in before else 'gone'}"
        elif old != new:
            yield f"{key} differs" if _is_digest(old) else f"{key}: {old} then, {new} now"


def _is_digest(value) -> bool:
    return isinstance(value, str) and len(value) == 32 and value.isalnum()


@contextmanager
def write_whole(path: Path) -> Iterator[Path]:
    """A file to write in place of ``path``, which gets its name, and reaches the disk, only when all went well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_parts(
    write: Callable[[Part], object], parts: list[Part], num_workers: int, on_rows: Callable[[int], None]
) -> list:
    """Write the parts that are not there yet.

    Args:
        write: writes one part to ``part.path``, by ``write_whole``.
        parts: all parts.
        num_workers: processes; with 0 or 1 this one does the work.
        on_rows: told the number of rows of each part when it is done, whether now or by an earlier run.

    Returns:
        What ``write`` returned for the parts of this run.

    Raises:
        UserError: a row is bad, or a process died.
    """
    missing = [part for part in parts if not part.path.exists()]
    on_rows(sum(part.num_rows for part in parts) - sum(part.num_rows for part in missing))
    num_workers = min(num_workers, len(missing))
    results = []
    for part, result in _in_processes(write, missing, num_workers) if num_workers > 1 else _here(write, missing):
        on_rows(part.num_rows)
        results.append(result)
    return results


def _here(write: Callable[[Part], object], parts: list[Part]) -> Iterator[tuple[Part, object]]:
    for part in parts:
        yield part, write(part)


def _in_processes(write: Callable, parts: list[Part], num_workers: int) -> Iterator[tuple[Part, object]]:
    # Forked processes share the open dataset; elsewhere than on Linux forking is unsafe.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    pool = ProcessPoolExecutor(num_workers, context, initializer=_settle_worker, initargs=(write, os.getpid()))
    try:
        futures = {pool.submit(_write_one, part): part for part in parts}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process died, perhaps for want of memory; run the command again, with fewer --num_workers: "
            "it goes on from here"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_write: Callable[[Part], object] | None = None  # set in worker processes: sending it with every part would be slow


def _settle_worker(write: Callable[[Part], object], parent: int) -> None:
    global _write
    _write = write
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ended by Ctrl-C without a traceback
    # A forked process has lost the tokenizer's thread pool and would wait for it for ever.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process soon after its parent was killed; it would wait for work for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _write_one(part: Part) -> object:
    return _write(part)
