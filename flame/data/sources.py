"""What the rows are, by number: one interface over every map-style source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from flame.data.columns import choose_column, holds_lists, holds_mixed, token_ids
from flame.data.loading import StreamedRows, check_unused, expand_files, is_one_saved, load_rows
from flame.data.shards import ShardedSource
from flame.data.stdlib import read_stdlib_texts
from flame.errors import UserError

BUILTIN_PREFIX = "builtin:"


@dataclass(frozen=True)
class SourceSpec:
    """Where one source comes from, as the user gave it; "" means not given."""

    dataset: str
    name: str = ""
    split: str = "train"
    data_dir: str = ""
    data_files: tuple[str, ...] = ()


def source_specs(training) -> list[SourceSpec]:
    """The sources that the ``[training]`` section names.

    A single value of a sibling list serves every dataset; with one dataset, ``data_files`` lists its files.
    """

    def value_for(values: list[str], number: int, default: str = "") -> str:
        if not values:
            return default
        return values[number] if len(values) > 1 else values[0]

    def files_for(number: int) -> tuple[str, ...]:
        files = training.data_files if len(training.dataset) == 1 else [value_for(training.data_files, number)]
        return tuple(file for file in files if file)

    return [
        SourceSpec(
            dataset,
            value_for(training.dataset_name, number),
            value_for(training.dataset_split, number, "train"),
            value_for(training.data_dir, number),
            files_for(number),
        )
        for number, dataset in enumerate(training.dataset)
    ]


def has_only_train(spec: SourceSpec) -> bool:
    """Whether a source knows no other split: files, however named, and a dataset that was saved by itself."""
    is_builtin = spec.dataset.startswith(BUILTIN_PREFIX)
    return is_builtin or bool(spec.data_files) or is_one_saved(spec.dataset) or bool(expand_files(spec.dataset))


class Source(Protocol):
    """Rows by number. A row is a text, token ids (int64 [length]), or whatever wrong value stands in its place."""

    name: str
    column: str
    is_tokenized: bool

    def __len__(self) -> int: ...

    def read(self, rows: list[int]) -> list: ...


class TextSource:
    """Texts held in memory."""

    is_tokenized = False

    def __init__(self, name: str, texts: list[str]):
        self.name = name
        self.column = "text"
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def read(self, rows: list[int]) -> list[str]:
        return [self.texts[row] for row in rows]


class DatasetSource:
    """One column of a ``datasets.Dataset``, read from its memory-mapped Arrow files.

    Raises:
        UserError: no column holds text or token ids.
    """

    def __init__(self, name: str, dataset, text_column: str = ""):
        self.name = name
        self.column = choose_column(name, dataset.features.arrow_schema, text_column)
        kind = dataset.features.arrow_schema.field(self.column).type
        self.is_tokenized = holds_lists(kind)
        self.is_mixed = holds_mixed(kind)
        self.dataset = dataset.select_columns([self.column]).with_format(None if self.is_mixed else "arrow")
        self.chunks: list | None = None
        self.chunk_starts = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, rows: list[int]) -> list:
        if self.is_mixed:
            return self.dataset[rows][self.column]
        if self.chunks is None:
            self._map_chunks()
        chunks, places = self.chunks, np.searchsorted(self.chunk_starts, rows, side="right") - 1
        where = zip(places.tolist(), (rows - self.chunk_starts[places]).tolist(), strict=True)
        if self.is_tokenized:
            return [token_ids(chunks[place][row]) for place, row in where]
        return [chunks[place][row].as_py() for place, row in where]

    def _map_chunks(self) -> None:
        """List the column's record batches: asking ``datasets`` for scattered rows costs several times as much."""
        self.chunks = [chunk for chunk in self.dataset[:].column(0).chunks if len(chunk)]
        self.chunk_starts = np.cumsum([0, *map(len, self.chunks)])[:-1]

    def __getstate__(self) -> dict:
        return {**self.__dict__, "chunks": None}  # a process that is not forked maps the files anew


def open_sources(training) -> list[Source | ShardedSource]:
    """Open every source that the ``[training]`` section names; sources of one dataset get names of their own.

    Raises:
        UserError: one of them does not exist or cannot be used.
    """
    specs = source_specs(training)
    sources = [open_source(spec, training.text_column, training.streaming) for spec in specs]
    names = [spec.dataset for spec in specs]
    if len(set(names)) < len(names):
        names = [":".join(filter(None, (spec.dataset, spec.name, spec.data_dir, *spec.data_files))) for spec in specs]
    for number, (name, source) in enumerate(zip(names, sources, strict=True), start=1):
        source.name = name if names.count(name) == 1 else f"{name} ({number})"
    return sources


def open_source(spec: SourceSpec, text_column: str = "", streaming: bool = False) -> Source | ShardedSource:
    """Open one source; unless ``streaming``, download or convert it first when that has not been done.

    Raises:
        UserError: it does not exist, has no such config or split, no usable column, or no rows.
    """
    if spec.dataset.startswith(BUILTIN_PREFIX):
        if spec.dataset != "builtin:stdlib":
            raise UserError(f"--training.dataset {spec.dataset}: the one embedded corpus is builtin:stdlib")
        check_unused(spec, "the embedded corpus")
        if spec.split != "train":
            raise UserError(f"--training.dataset_split {spec.split}: {spec.dataset} has train alone")
        return TextSource(spec.dataset, read_stdlib_texts())
    rows = load_rows(spec, streaming)
    if isinstance(rows, StreamedRows):
        return ShardedSource(spec.dataset, rows.dataset, text_column, rows.files)
    source = DatasetSource(spec.dataset, rows, text_column)
    if not len(source):
        raise UserError(f"--training.dataset {spec.dataset}: split {spec.split} has no rows")
    return source
