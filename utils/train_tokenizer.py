"""Train a byte-level BPE tokenizer on a dataset.

    python utils/train_tokenizer.py --data "my_text/*.jsonl" --output my_tokenizer

The shipped configs/tokenizer was made from ``builtin:stdlib``; another Python version gives another, equally good one.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, flame need not be installed

from flame.errors import UserError
from flame.utils.commands import add_source, run_command, source_spec

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"
SMALLEST = 258


def train_tokenizer(texts: Iterable[str] | Iterable[list[str]], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with ``vocab_size`` entries, special tokens and the 256 bytes among them; any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        clean_up_tokenization_spaces=False,
    )


def text_batches(source, size: int = 1000) -> Iterator[list[str]]:
    """The texts of a source, some rows at a time; rows without text are left out."""
    for start in range(0, len(source), size):
        rows = source.read(list(range(start, min(start + size, len(source)))))
        yield [row for row in rows if isinstance(row, str)]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_source(parser, "--data")
    parser.add_argument("--text_column", default="", help="column that holds the text (default: text, else content)")
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--vocab_size", type=int, default=4096, help="number of entries, special tokens included (default: 4096)"
    )
    return parser


def train(arguments: argparse.Namespace) -> str:
    """Train on the data, write the tokenizer, and say what was written.

    Raises:
        UserError: the vocabulary cannot hold the bytes, the output is there already, or the data holds no text.
    """
    from flame.data.sources import open_source

    if arguments.vocab_size < SMALLEST:
        raise UserError(f"--vocab_size {arguments.vocab_size}: must be at least {SMALLEST}: 256 bytes, special tokens")
    if arguments.output.exists():
        raise UserError(f"--output {arguments.output}: there is something already; delete it or give another folder")
    source = open_source(source_spec(arguments, "data"), arguments.text_column)
    if source.is_tokenized:
        raise UserError(f"--data {arguments.data}: holds token ids, no text")
    batches = text_batches(source)
    first = next((batch for batch in batches if any(batch)), None)
    if first is None:
        raise UserError(f"--data {arguments.data}: holds no text")
    tokenizer = train_tokenizer(itertools.chain([first], batches), arguments.vocab_size)
    tokenizer.save_pretrained(arguments.output)
    return f"{len(tokenizer)} entries written to {arguments.output}"


def main(argv: list[str] | None = None) -> int:
    """Train as the arguments say; the exit code is 0, 2 when the user must change something, or 130 by Ctrl-C."""
    arguments = build_parser().parse_args(argv)
    flags = {"training.dataset": "data", "training.text_column": "text_column"}
    return run_command(lambda: train(arguments), flags, "nothing was written")


if __name__ == "__main__":
    sys.exit(main())
