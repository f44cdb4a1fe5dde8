"""Rows that ranks cannot share are refused before anything is built."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flame.config import JobConfig
from flame.errors import UserError
from flame.parallel.context_setup import share_rows
from flame.parallel.degrees import Degrees


def share(degrees: Degrees, seq_len: int = 64, schedule: str = "1F1B", **model):
    config = JobConfig()
    config.experimental.pipeline_parallel_schedule = schedule
    config.training.seq_len, config.training.batch_size = seq_len, 1
    config.training.gradient_accumulation_steps = 2 * degrees.pipeline
    config.experimental.pipeline_parallel_degree = degrees.pipeline
    model_config = SimpleNamespace(model_type="gla", attn_mode="chunk", attn=None, **model)
    return share_rows(config, model_config, SimpleNamespace(degrees=degrees))


def test_a_rank_alone_shares_no_rows():
    assert share(Degrees(pipeline=2, tensor=2)) is None


def test_pieces_must_divide_among_tensor_parallel_ranks_too():
    with pytest.raises(UserError, match="a row of 66 tokens"):
        share(Degrees(context=2, tensor=2), seq_len=66)


def test_pieces_in_a_pipeline_that_splits_the_backward_are_refused():
    with pytest.raises(UserError, match=r"context_parallel_degree = 2 and .* = ZBVZeroBubble do not go together"):
        share(Degrees(pipeline=2, context=2), schedule="ZBVZeroBubble")


def test_pieces_are_those_of_a_microbatch():
    with pytest.raises(UserError, match="a row of 24 tokens"):
        share(Degrees(pipeline=2, context=4), seq_len=24)


@pytest.mark.parametrize("name", ["conv_size", "conv_kernel"])
def test_pieces_are_no_shorter_than_a_convolution_looks_back(name):
    with pytest.raises(UserError, match=r"a row of 20 tokens .* pieces of at least 12 tokens"):
        share(Degrees(context=2), seq_len=20, **{name: 12})
    with pytest.raises(UserError, match=r"a row of 14 tokens .* pieces of at least 8 tokens"):
        share(Degrees(context=2), seq_len=14, use_short_conv=False, **{name: 12})
