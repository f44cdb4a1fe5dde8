"""``python -m flame.utils.preprocess --dataset … --tokenizer … --path data``: a dataset tokenised ahead of training.

The folder that it writes holds each row's token ids, as the loader's own encoder gives them, in the order of the
input: training on it gives the batches of training on the text.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from flame.errors import UserError
from flame.utils.commands import add_source, progress_bar, run_command, source_spec

MIN_ROWS_PER_PART = 100
MAX_PARTS = 256  # each is a file that is open while they are joined
ROWS_PER_BATCH = 1_000  # what the tokenizer works best with ...
TOKENS_PER_BATCH = 1 << 20  # ... unless the rows are so long that they would fill the memory


def main(argv: list[str] | None = None) -> int:
    """Tokenise as the arguments say; the exit code is 0, 2 when the user must change something, or 130 by Ctrl-C."""
    arguments = build_parser().parse_args(argv)
    flags = {"training.dataset": "dataset", "model.tokenizer_path": "tokenizer"}
    return run_command(lambda: preprocess(arguments), flags)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flame.utils.preprocess",
        description="Tokenise a dataset into a folder that --training.dataset takes. Run again, it goes on.",
    )
    add_source(parser, "--dataset")
    parser.add_argument("--text_column", default="", help="column that holds the text (default: text, else content)")
    parser.add_argument("--tokenizer", required=True, help="tokenizer folder or hub name")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the tokenizer")
    for side, token in (("add_bos", "BOS"), ("add_eos", "EOS")):
        choices = ("auto", "true", "false")
        parser.add_argument(f"--{side}", choices=choices, default="auto", help=f"{token}, as --training.{side}")
    parser.add_argument(
        "--on_bad_row", choices=("error", "skip"), default="error", help="a row without text: stop, or leave it empty"
    )
    parser.add_argument("--path", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--num_workers", type=int, default=os.cpu_count() or 1, help="processes (default: one for each core)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def preprocess(arguments: argparse.Namespace) -> str:
    """Tokenise the dataset and write the folder; returns what to tell the user.

    Raises:
        UserError: the dataset, the tokenizer, a row or the output folder cannot be used.
    """
    from flame.data.fingerprint import source_fingerprint
    from flame.data.sources import open_source
    from flame.data.tokenize import DocumentEncoder, load_tokenizer
    from flame.utils.input_files import check_apart, describe_input
    from flame.utils.parts import PartialFolder, split_rows, write_parts

    tokenizer = load_tokenizer(arguments.tokenizer, arguments.trust_remote_code)
    encoder = DocumentEncoder(tokenizer, arguments.add_bos, arguments.add_eos)
    spec = source_spec(arguments, "dataset")
    check_apart(spec, arguments.path, "--path")
    source = open_source(spec, arguments.text_column)
    if source.is_tokenized:
        raise UserError(
            f"--dataset {source.name}: column {source.column} holds token ids already; train on it directly"
        )
    settings = {
        "input": describe_input(spec, getattr(source, "dataset", None)),
        "rows": source_fingerprint(source),
        "tokenizer": encoder.fingerprint(),
        "on_bad_row": arguments.on_bad_row,
    }
    folder = PartialFolder(arguments.path, "--path", settings)
    if folder.is_finished:
        return f"{folder.output} is finished already"
    folder.begin()
    num_parts = min(MAX_PARTS, -(-len(source) // MIN_ROWS_PER_PART))
    parts = split_rows(len(source), [folder.parts / f"part-{number:05}.arrow" for number in range(num_parts)])
    writer = PartWriter(source, encoder, arguments.on_bad_row == "skip")
    with progress_bar("tokenising", len(source), arguments.quiet) as on_rows:
        num_skipped = sum(write_parts(writer.write, parts, arguments.num_workers, on_rows))
    num_tokens = join_parts(parts, folder, arguments.quiet)
    skipped = f"; {num_skipped:,} bad rows were left empty by this run" if num_skipped else ""
    return f"{folder.output}: {len(source):,} rows, {num_tokens:,} tokens{skipped}"


class PartWriter:
    """Writes rows of a source as token ids, column ``input_ids``, into Arrow files."""

    def __init__(self, source, encoder, skip_bad_rows: bool):
        self.source = source
        self.encoder = encoder
        self.skip_bad_rows = skip_bad_rows

    def write(self, part) -> int:
        """Write one part; returns how many bad rows it has.

        Raises:
            UserError: a row is bad; the message names it.
        """
        import pyarrow as pa

        from flame.data.columns import TOKENS_COLUMN
        from flame.utils.parts import write_whole

        schema = pa.schema({TOKENS_COLUMN: pa.list_(pa.from_numpy_dtype(self.encoder.dtype))})
        num_skipped = 0
        with write_whole(part.path) as path, pa.ipc.new_stream(str(path), schema) as file:
            for documents in self._read(part):
                num_skipped += len(documents.skipped)
                offsets = pa.array([0, *documents.ends], type=pa.int32())
                column = pa.ListArray.from_arrays(offsets, pa.array(documents.tokens))
                file.write(pa.record_batch([column], schema))
        return num_skipped

    def _read(self, part):
        from flame.data.rows import read_rows

        start, num_tokens, num_rows = part.start, 0, 16  # few at first: how long they are is not known
        while start < part.stop:
            stop = min(start + num_rows, part.stop)
            documents = read_rows(self.source, list(range(start, stop)), self.encoder, self.skip_bad_rows)
            yield documents
            num_tokens += len(documents.tokens)
            start = stop
            mean_tokens = max(1, num_tokens // (start - part.start))
            num_rows = max(1, min(ROWS_PER_BATCH, TOKENS_PER_BATCH // mean_tokens))


def join_parts(parts: list, folder, quiet: bool) -> int:
    """Save the parts as one dataset and make it the output folder; returns its number of tokens."""
    import datasets

    if quiet:
        datasets.disable_progress_bars()
    joined = datasets.concatenate_datasets([datasets.Dataset.from_file(str(part.path)) for part in parts])
    target = folder.parts / "dataset"
    joined.save_to_disk(target)
    num_tokens = sum(len(chunk.flatten()) for chunk in joined.with_format("arrow")[:].column(0).chunks)
    folder.publish(target)
    return num_tokens


if __name__ == "__main__":
    sys.exit(main())
