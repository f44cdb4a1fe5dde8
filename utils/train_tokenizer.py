"""Train the small byte-level BPE tokenizer that ships in configs/tokenizer.

    python utils/train_tokenizer.py [--output configs/tokenizer] [--vocab-size 4096]

The corpus is ``builtin:stdlib``, so another Python version gives another, equally good tokenizer.
"""

from __future__ import annotations

import argparse

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from flame.data.stdlib import read_stdlib_texts

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="configs/tokenizer", help="folder to write")
    parser.add_argument("--vocab-size", type=int, default=4096, help="number of entries, special tokens included")
    arguments = parser.parse_args()
    tokenizer = train_tokenizer(read_stdlib_texts(), arguments.vocab_size)
    tokenizer.save_pretrained(arguments.output)
    print(f"{len(tokenizer)} entries written to {arguments.output}")


if __name__ == "__main__":
    main()
