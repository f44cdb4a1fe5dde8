"""Held-out text: the same packed sequences at every validation, whatever the layout and the seed of the training."""

from __future__ import annotations

import logging
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from flame.config import JobConfig, Training, Validation
from flame.data.batch import Batch
from flame.data.loader import join_batches, make_plan
from flame.data.pack import IGNORE_INDEX, Sequence
from flame.data.sources import has_only_train, open_sources, source_specs
from flame.data.state import StreamState
from flame.data.streams import DataPlan, StreamReader
from flame.errors import UserError, translate_flags

logger = logging.getLogger(__name__)

# The same options as in [training], under the same names.
FLAGS = {
    f"training.{name}": f"validation.{name}"
    for name in ("dataset", "dataset_name", "dataset_split", "data_dir", "data_files", "text_column")
}


@dataclass
class _Share:
    """What one rank reads.

    Attributes:
        own: its sequences by their numbers.
        total: sequences of all ranks.
        has_targets: one of those has a target.
        skipped: bad rows left out.
    """

    own: dict[int, Sequence] = field(default_factory=dict)
    total: int = 0
    has_targets: bool = False
    skipped: int = 0


def build_held_out(
    config: JobConfig, tokenizer, dp_rank: int = 0, dp_size: int = 1, prepare: AbstractContextManager | None = None
) -> list[list[Batch]]:
    """Tokenise and pack one data-parallel rank's share of the held-out text.

    The documents, each once, in a shuffled order of their own go into one stream; its sequence i is that of rank
    i mod dp_size. Every rank reads all of them, since which document a sequence begins with depends on those before it.

    Args:
        config: the job's config; its ``validation`` section is read, and what ``training`` says of rows and packing.
        tokenizer: a Hugging Face tokenizer.
        dp_rank, dp_size: this rank's place among the data-parallel ranks.
        prepare: entered while datasets are downloaded and converted, such as ``local_leader_first``.

    Returns:
        Steps of as many micro-batches as one of training has, on the CPU; none without ``validation.dataset``. What
        the last step lacks is padding without targets.

    Raises:
        UserError: the data does not exist, cannot be used or holds no token that follows another.
    """
    if not any(config.validation.dataset):
        return []
    try:
        with prepare or nullcontext():
            sources = open_sources(_with_splits(config.validation))
        training = _settings(config.training)
        plan = make_plan(sources, tokenizer, training)
        num_tokens = config.validation.num_tokens
        wanted = math.ceil(num_tokens / plan.seq_len) if num_tokens else math.inf
        share = _read(plan, wanted, dp_rank, dp_size)
    except UserError as error:
        raise UserError(translate_flags(str(error), FLAGS)) from error
    if not share.has_targets:
        reason = "no row holds two tokens, one to predict from the other" if share.total else "no row holds any text"
        raise UserError(f"--validation.dataset {', '.join(config.validation.dataset)}: {reason}")
    left_out = f"; {share.skipped} bad rows left out" if share.skipped else ""
    logger.info("validation: %d sequences every %d steps%s", share.total, config.validation.interval, left_out)
    return _steps(plan, training, share, dp_rank, dp_size)


def _with_splits(validation: Validation) -> Validation:
    """The section with a split for each dataset."""
    if validation.dataset_split:
        return validation
    splits = ["train" if has_only_train(spec) else "validation" for spec in source_specs(validation)]
    return replace(validation, dataset_split=splits)


def _settings(training: Training) -> Training:
    """How held-out text is read and packed: as in training, but once, in one stream, in an order of its own."""
    return replace(training, seed=0, shuffle="global", num_streams=1, max_epochs=1, data_probs=[], log_data_hash=False)


def _read(plan: DataPlan, wanted: float, dp_rank: int, dp_size: int) -> _Share:
    share = _Share()
    reader = StreamReader(plan, [0], [plan.start_state(0)])
    sequences = iter(reader)  # kept: the reader ends with it, and would not wait for what it tokenises ahead
    for sequence in sequences:
        if sequence.is_empty:
            continue
        if share.total % dp_size == dp_rank:
            share.own[share.total] = sequence
        share.has_targets = share.has_targets or bool((sequence.labels != IGNORE_INDEX).any())
        share.total += 1
        if share.total >= wanted:
            break
    share.skipped = StreamState.from_list(sequence.state).skipped
    reader.close()
    return share


def _steps(plan: DataPlan, training: Training, share: _Share, dp_rank: int, dp_size: int) -> list[list[Batch]]:
    rows, accumulation = training.batch_size, training.gradient_accumulation_steps
    num_steps = math.ceil(share.total / (rows * accumulation * dp_size))
    numbers = range(dp_rank, num_steps * rows * accumulation * dp_size, dp_size)
    batches = join_batches(plan, training, rows, numbers, share.own)
    return [batches[start : start + accumulation] for start in range(0, len(batches), accumulation)]
