"""Sources that are read while they stream in: shards, each from front to back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial

from flame.data.columns import UnreadableRow, choose_column, holds_lists, token_ids
from flame.data.loading import describe, is_transient, with_retries
from flame.errors import UserError

NUM_FIRST_ROWS = 32


class ShardedSource:
    """One column of a ``datasets.IterableDataset``.

    Attributes:
        num_shards: parts that can be read independently, as ``datasets`` splits it: its files, mostly.
        first_values: of the first rows, which tell one source from another.
        files: paths or addresses of the files that the shards are made of.

    Raises:
        UserError: it cannot be read, has no rows, or no column holds text or token ids.
    """

    def __init__(self, name: str, dataset, text_column: str = "", files: Sequence[str] = ()):
        self.name = name
        self.files = list(files)
        first = self._read_first(dataset)
        self.column = choose_column(name, first.schema, text_column)
        self.is_tokenized = holds_lists(first.schema.field(self.column).type)
        self.dataset = dataset.select_columns([self.column]).with_format("arrow")
        self.num_shards = dataset.num_shards
        window = Window(first.column(self.column), self.is_tokenized)
        self.first_values = [window[row] for row in range(len(window))]

    def file_sizes(self) -> list[int | None]:
        """Bytes of each file, None where a server does not tell.

        Raises:
            UserError: a file is out of reach.
        """
        from fsspec.core import url_to_fs

        def measure() -> list[int | None]:
            found = [url_to_fs(file) for file in self.files]
            sizes: dict[str, int | None] = {}
            for system in {id(system): system for system, _ in found}.values():
                paths = [path for own, path in found if own is system]
                sizes.update(zip(paths, system.sizes(paths), strict=True))  # asked for together where that is possible
            return [sizes[path] for _, path in found]

        try:
            return with_retries(measure, self.name)
        except Exception as error:  # whatever the network or a file system raises
            raise UserError(f"--training.dataset {self.name}: {describe(error)}") from error

    def _read_first(self, dataset):
        """The first rows of the first shard that has any, as an Arrow table."""
        tables = dataset.with_format("arrow")

        def read(shard: int):
            return next(tables.shard(dataset.num_shards, shard).iter(batch_size=NUM_FIRST_ROWS), None)

        for shard in range(dataset.num_shards):
            try:
                first = with_retries(partial(read, shard), self.name)
            except Exception as error:  # whatever the network, a decompressor or a parser raises
                raise UserError(f"--training.dataset {self.name}: {describe(error)}") from error
            if first is not None and len(first):
                return first
        raise UserError(f"--training.dataset {self.name}: it has no rows")


class Window:
    """Consecutive rows of a shard; a value is only made when asked for, since each process needs few of them."""

    def __init__(self, column, is_tokenized: bool):
        self.values = column.combine_chunks()
        self.has_tokens = is_tokenized and holds_lists(self.values.type)
        # Newer ``datasets`` keep a JSON column of several types as encoded text.
        self.is_encoded = getattr(self.values.type, "extension_name", "") == "arrow.json"

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: int):
        value = self.values[row]
        if self.has_tokens:
            return token_ids(value)
        value = value.as_py()
        return json.loads(value) if self.is_encoded and value is not None else value


class ShardReader:
    """Iterates over the windows of one shard, ``window_rows`` each, from row ``num_skipped`` on, a multiple of that.

    When the network fails the shard is opened anew, and read again up to where it broke. Damage that is there to stay
    ends the shard with an ``UnreadableRow``.

    Attributes:
        num_rows: rows read so far, those passed over included; all that the shard has when it has ended.

    Raises:
        UserError: the network stays down.
    """

    def __init__(self, source: ShardedSource, shard: int, num_skipped: int, window_rows: int):
        self.source, self.shard, self.num_skipped, self.window_rows = source, shard, num_skipped, window_rows
        self.num_rows = 0
        self.tables: Iterator | None = None
        self.is_broken = False

    def __iter__(self) -> ShardReader:
        return self

    def __next__(self) -> Window | list[UnreadableRow]:
        if self.is_broken:
            raise StopIteration
        try:
            table = with_retries(self._next_table, f"{self.source.name}, shard {self.shard}")
        except Exception as error:  # whatever the network, a decompressor or a parser raises
            if is_transient(error):
                raise UserError(f"{self.source.name}: shard {self.shard} cannot be read: {describe(error)}") from error
            self.is_broken = True
            self.num_rows += 1
            return [UnreadableRow(error)]
        if table is None:
            raise StopIteration
        self.num_rows += len(table)
        return Window(table.column(self.source.column), self.source.is_tokenized)

    def _next_table(self):
        if self.tables is None:
            self.tables = self._open(max(self.num_rows, self.num_skipped))
        try:
            return next(self.tables, None)
        except Exception:
            self.tables = None  # a generator that raised is at its end
            raise

    def _open(self, num_passed_over: int) -> Iterator:
        num_rows = 0
        dataset = self.source.dataset.shard(self.source.num_shards, self.shard)
        for table in dataset.iter(batch_size=self.window_rows):
            num_rows += len(table)
            if num_rows > num_passed_over:
                yield table
            else:
                self.num_rows = max(self.num_rows, num_rows)
