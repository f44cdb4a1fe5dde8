"""Layouts that are refused before anything is built."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flame.config import JobConfig
from flame.errors import UserError
from flame.parallel.degrees import Degrees
from flame.training.placement import data_config, share_rows


def share(degrees: Degrees, seq_len: int = 64):
    config = JobConfig()
    config.training.seq_len, config.training.batch_size = seq_len, 1
    model_config = SimpleNamespace(model_type="gla", attn_mode="chunk", attn=None)
    return share_rows(config, model_config, SimpleNamespace(degrees=degrees))


def test_a_rank_alone_shares_no_rows():
    assert share(Degrees(pipeline=2, tensor=2)) is None


def test_context_parallelism_in_a_pipeline_is_refused():
    with pytest.raises(UserError, match=r"context_parallel_degree = 2 and .*pipeline_parallel_degree = 4 do not go"):
        share(Degrees(pipeline=4, context=2))


def test_pieces_must_divide_among_tensor_parallel_ranks_too():
    with pytest.raises(UserError, match="a row of 66 tokens"):
        share(Degrees(context=2, tensor=2), seq_len=66)


def test_a_pipeline_takes_its_microbatches_one_by_one():
    config = JobConfig()
    config.training.batch_size, config.training.gradient_accumulation_steps = 2, 4
    assert data_config(config) is config
    config.experimental.pipeline_parallel_degree = 2
    assert (data_config(config).training.batch_size, data_config(config).training.gradient_accumulation_steps) == (1, 8)
    config.experimental.pipeline_parallel_microbatches = 2
    assert (data_config(config).training.batch_size, data_config(config).training.gradient_accumulation_steps) == (4, 2)
