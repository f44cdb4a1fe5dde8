"""A tokenizer whose tokens are words, and a job on rows of the test's making."""

import gzip
import itertools
import json

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flame.config import JobConfig
from flame.data.loader import build_dataloader
from flame.data.order import RowOrder
from flame.data.sources import TextSource
from flame.data.streams import DataPlan
from flame.data.tokenize import DocumentEncoder

NUM_WORDS = 2000
EOS = NUM_WORDS


def word_tokenizer(**special_tokens) -> PreTrainedTokenizerFast:
    """Words "0" to "1999" are their own ids; EOS, when there is one, is 2000."""
    vocab = {str(number): number for number in range(NUM_WORDS)} | {"<eos>": EOS, "<bos>": EOS + 1}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens)


def numbered_texts(lengths: list[int]) -> list[str]:
    """Texts of the given numbers of words; word w of the corpus is w mod 2000, so that tokens tell where they stood."""
    texts, start = [], 0
    for length in lengths:
        texts.append(" ".join(str(number % NUM_WORDS) for number in range(start, start + length)))
        start += length
    return texts


def write_shards(folder, sizes: list[int], lengths: list[int]) -> str:
    """Files of so many rows each, every other one compressed; returns the glob that finds them."""
    texts = iter(numbered_texts(list(itertools.islice(itertools.cycle(lengths), sum(sizes)))))
    folder.mkdir()
    for number, size in enumerate(sizes):
        lines = "".join(json.dumps({"id": row, "text": next(texts)}) + "\n" for row in range(size)).encode()
        path = folder / f"{number}.jsonl{'.gz' if number % 2 else ''}"
        path.write_bytes(gzip.compress(lines) if number % 2 else lines)
    return f"{folder}/*.jsonl*"


def make_plan(texts, seq_len, num_streams=1, context_len=None, shuffle="global", tokenizer=None, **options) -> DataPlan:
    source = TextSource("texts", texts)
    encoder = DocumentEncoder(tokenizer or word_tokenizer())
    orders = [RowOrder(len(texts), 42, 0, shuffle, num_streams)]
    return DataPlan([source], orders, encoder, num_streams, seq_len, context_len or seq_len, **options)


def make_config(dataset: str, **training) -> JobConfig:
    """A job on ``dataset`` with small sequences, in this process, and the given ``[training]`` values."""
    config = JobConfig()
    values = {"dataset": dataset.split(","), "seq_len": 8, "batch_size": 2, "num_workers": 0, "num_streams": 60}
    for name, value in {**values, "log_data_hash": True, **training}.items():
        setattr(config.training, name, value)
    return config


def make_loader(dataset: str, dp_rank: int = 0, dp_size: int = 1, tokenizer=None, gather=None, **training):
    config = make_config(dataset, **training)
    return build_dataloader(config, tokenizer or word_tokenizer(), dp_rank, dp_size, gather=gather)
