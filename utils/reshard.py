"""Rewrite a dataset into a given number of shards, its rows in the same order.

    python utils/reshard.py --data FILES_OR_FOLDER --output FOLDER --num_shards N [--format parquet|jsonl|arrow]

Streaming deals shards to streams and workers, so a dataset of one big file is worth splitting. Training reads the
folder as --training.dataset FOLDER. An interrupted run goes on with the shards that are missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, flame need not be installed

from flame.errors import UserError
from flame.utils.commands import add_source, progress_bar, run_command, source_spec

FORMATS = ("parquet", "jsonl", "arrow")
ROWS_PER_BATCH = 1_000


def main(argv: list[str] | None = None) -> int:
    """Rewrite as the arguments say; the exit code is 0, 2 when the user must change something, or 130 by Ctrl-C."""
    arguments = build_parser().parse_args(argv)
    return run_command(lambda: reshard(arguments), {"training.dataset": "data"})


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_source(parser, "--data")
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument("--num_shards", required=True, type=int, help="files to write")
    parser.add_argument("--format", choices=FORMATS, help="of the files (default: the input's, else parquet)")
    parser.add_argument("--num_workers", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def reshard(arguments: argparse.Namespace) -> str:
    """Write the shards; returns what to tell the user.

    Raises:
        UserError: the dataset, the number of shards or the output folder cannot be used.
    """
    from flame.utils.input_files import check_apart, describe_input
    from flame.utils.parts import PartialFolder, split_rows, write_parts

    spec = source_spec(arguments, "data")
    check_apart(spec, arguments.output, "--output")
    dataset = open_dataset(spec)
    num_rows, num_shards = len(dataset), arguments.num_shards
    if not 1 <= num_shards <= num_rows:
        raise UserError(f"--num_shards {num_shards}: must be from 1 to the dataset's number of rows, {num_rows}")
    suffix = arguments.format or input_format(arguments.data)
    settings = {
        "input": describe_input(spec, dataset),
        "rows": describe_rows(dataset),
        "num_shards": num_shards,
        "format": suffix,
    }
    folder = PartialFolder(arguments.output, "--output", settings)
    if folder.is_finished:
        return f"{folder.output} is finished already"
    folder.begin()
    names = [f"train-{number:05}-of-{num_shards:05}.{suffix}" for number in range(num_shards)]
    parts = split_rows(num_rows, [folder.parts / name for name in names])
    with progress_bar("writing", num_rows, arguments.quiet) as on_rows:
        write_parts(ShardWriter(dataset, suffix).write, parts, arguments.num_workers, on_rows)
    folder.publish(folder.parts)
    return f"{folder.output}: {num_rows:,} rows in {num_shards} shards"


def open_dataset(spec):
    """All columns of the dataset, as training would read it.

    Raises:
        UserError: it is not there, or cannot be read.
    """
    import datasets

    from flame.data.loading import load_rows
    from flame.data.sources import BUILTIN_PREFIX, open_source

    if not spec.dataset.startswith(BUILTIN_PREFIX):
        return load_rows(spec)
    source = open_source(spec)
    return datasets.Dataset.from_dict({source.column: source.read(range(len(source)))})


def input_format(data: str) -> str:
    """The format that a path's name shows: compressed files are written plain, anything unknown as parquet."""
    if (Path(data).expanduser() / "state.json").is_file():
        return "arrow"
    return next((name for name in ("jsonl", "arrow") if f".{name}" in Path(data).suffixes), "parquet")


def describe_rows(dataset) -> dict:
    """Plain data that tells one dataset from another when an interrupted run goes on."""
    import hashlib

    places = sorted({0, len(dataset) // 2, len(dataset) - 1})
    digest = hashlib.sha256(repr(dataset.with_format(None)[places]).encode("utf-8", "surrogatepass"))
    return {"rows": len(dataset), "columns": dataset.column_names, "sampled_rows": digest.hexdigest()[:32]}


class TableWriter(Protocol):
    """What the writers of the formats have in common."""

    def write_table(self, table) -> None: ...

    def close(self) -> None: ...


class JsonLinesWriter:
    """Writes the rows of Arrow tables as JSON, one a line."""

    def __init__(self, path: str, schema):
        self.file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed by close, as pyarrow's writers are)

    def write_table(self, table) -> None:
        for row in table.to_pylist():
            try:
                self.file.write(json.dumps(row, ensure_ascii=False) + "\n")
            except TypeError as error:
                raise UserError(f"--format jsonl: a value cannot be written ({error}); use parquet or arrow") from error

    def close(self) -> None:
        self.file.close()


class ShardWriter:
    """Writes ranges of a dataset's rows as files of one format."""

    def __init__(self, dataset, suffix: str):
        self.schema = dataset.features.arrow_schema
        self.dataset = dataset.with_format("arrow")
        self.suffix = suffix

    def write(self, part) -> None:
        """Write the rows of one part, a batch at a time."""
        from flame.utils.parts import write_whole

        with write_whole(part.path) as path:
            writer = self._open()(str(path), self.schema)
            try:
                for start in range(part.start, part.stop, ROWS_PER_BATCH):
                    table = self.dataset[start : min(start + ROWS_PER_BATCH, part.stop)]
                    writer.write_table(table.cast(self.schema))
            finally:
                writer.close()

    def _open(self) -> Callable[..., TableWriter]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        return {"parquet": pq.ParquetWriter, "jsonl": JsonLinesWriter, "arrow": pa.ipc.new_stream}[self.suffix]


if __name__ == "__main__":
    sys.exit(main())
