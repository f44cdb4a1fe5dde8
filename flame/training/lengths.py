"""How many tokens a job's documents and steps have."""

from __future__ import annotations

from flame.config import JobConfig


def document_len(config: JobConfig) -> int:
    """Tokens of the longest stretch that the model sees as one."""
    return config.training.context_len if config.training.varlen else config.training.seq_len


def document_option(config: JobConfig) -> str:
    """The option that ``document_len`` follows."""
    return "training.context_len" if config.training.varlen else "training.seq_len"


def tokens_per_step(config: JobConfig, data_size: int, batch_size: int | None = None) -> int:
    """Tokens that one step trains on, over all ranks; ``batch_size`` stands in for the job's."""
    training = config.training
    batch_size = training.batch_size if batch_size is None else batch_size
    return batch_size * training.gradient_accumulation_steps * data_size * training.seq_len
