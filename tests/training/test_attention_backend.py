"""What rules out an attention backend, and that all ranks take the same."""

from __future__ import annotations

import logging
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from transformers import AutoConfig

from flame.cli.parse import parse_args
from flame.errors import UserError
from flame.models import attention_speed
from flame.models.attention import Attention
from flame.models.attention_speed import AttentionShape, Choice
from flame.models.backend import import_fla, setup_backend, uninstall
from flame.parallel.degrees import Degrees
from flame.training import attention_backend as attention

JOB = ("--training.seq_len=8192", "--training.context_len=1024", "--training.varlen=true")
SHAPE = AttentionShape(16, 16, 64, 1, 65536, 4096)


def job(*options):
    values = dict(option.split("=") for option in (*JOB, *options))
    return parse_args([f"{name}={value}" for name, value in values.items()], check=False)


def model(**changes):
    import_fla()
    return AutoConfig.for_model("transformer", num_heads=8, num_kv_heads=4, hidden_size=512, **changes)


def ranks(device="cuda", **degrees):
    return SimpleNamespace(degrees=Degrees(**degrees), device=torch.device(device))


def shape_of(config, dist):
    (shape,) = attention.softmax_layers(config, model(), dist.degrees)
    return shape


def test_a_rank_measures_what_it_computes():
    assert shape_of(job(), ranks()) == AttentionShape(8, 4, 64, 1, 8192, 1024)
    assert shape_of(job("--training.batch_size=2"), ranks(tensor=2)) == AttentionShape(4, 2, 64, 1, 16384, 1024)
    dense = job("--training.varlen=false", "--training.batch_size=2")
    assert shape_of(dense, ranks()) == AttentionShape(8, 4, 64, 2, 8192, None)
    assert shape_of(dense, ranks(context=2)) == AttentionShape(8, 4, 64, 1, 8192, 8192)
    to_all = job("--experimental.context_parallel_rotate_method=alltoall")
    assert shape_of(to_all, ranks(context=2)) == AttentionShape(4, 2, 64, 1, 8192, 1024)
    # Two micro-batches of one sequence each.
    pipeline = job("--training.batch_size=2", "--experimental.pipeline_parallel_degree=2")
    assert shape_of(pipeline, ranks(pipeline=2)) == AttentionShape(8, 4, 64, 1, 8192, 1024)


def test_pieces_with_gathered_keys_need_more_keys_than_queries():
    config, pieces = job("--model.attention_backend=flex"), ranks(context=2)
    with pytest.raises(UserError, match=r"flex' takes as many queries as keys, .*; use alltoall, or auto or varlen"):
        attention.check_attention(config, pieces)
    attention.check_attention(config, ranks())
    config.experimental.context_parallel_rotate_method = "alltoall"
    attention.check_attention(config, pieces)


@pytest.fixture
def measured(monkeypatch):
    """What was asked for; nothing is measured."""
    calls = []
    monkeypatch.setattr(attention, "agree_on_attention", lambda *args, **options: calls.append((args, options)))
    return calls


def test_auto_measures_on_a_gpu_in_half_precision(measured):
    long = ("--training.seq_len=65536", "--training.context_len=4096", "--training.mixed_precision_param=bfloat16")
    dist = ranks()
    attention.settle_attention(job(*long), model(), dist)
    (args, options) = measured.pop()
    assert args == (attention.softmax_layers(job(*long), model(), dist.degrees), dist, torch.bfloat16, None)
    attention.settle_attention(job(*long, "--job.cache_dir=/shared"), model(), dist)
    assert measured.pop()[0][-1] == Path("/shared")
    assert options == {"gathers": False}
    for config, place in (
        (job(*long), ranks("cpu")),
        (job(*long), ranks("meta")),  # a plan
        (job(*long, "--model.attention_backend=varlen"), dist),
        (job(*long, "--training.deterministic=true"), dist),
        (job(*long, "--training.mixed_precision_param=float32"), dist),
        (job("--training.seq_len=512", "--training.context_len=512", *long[2:]), dist),  # over before it is measured
    ):
        attention.settle_attention(config, model(), place)
    attention.settle_attention(job(*long), AutoConfig.for_model("gla"), dist)
    assert not measured


class Ranks(SimpleNamespace):
    """One of two ranks, the main one first; the other gets what that broadcast."""

    said: ClassVar[list] = []

    @property
    def is_main(self):
        return self.rank == 0

    def gather(self, value):
        assert value == self.here[self.rank]
        return self.here

    def on_main(self, action):
        return action() if self.is_main else None

    def broadcast(self, value):
        if self.is_main:
            self.said.append(value)
        return self.said[-1]


@pytest.mark.parametrize(("gathers", "expected"), [(True, ["fa3", "varlen"]), (False, ["fa3", "fa4", "varlen"])])
def test_all_take_the_choice_of_rank_0(gathers, expected, monkeypatch, tmp_path):
    """Of what is on every rank; where keys are gathered, of what takes more keys than queries."""
    here = [
        ["varlen", "sdpa", "flex", "fa4", "fa3"],
        ["varlen", "sdpa", "flex", "fa3", "fa4", "flash"],
    ]
    asked = []

    def choose(layers, backends, default, device, dtype, folder):
        asked.append((dict(layers), backends, default, device, dtype, folder))
        return Choice(backends[-1], {}, {}), False

    monkeypatch.setattr(attention, "resolve_attention_backend", lambda name, device_type: name)
    monkeypatch.setattr(attention, "choose_attention", choose)
    monkeypatch.setattr(attention, "takes_unequal_lengths", lambda name: name != "fa4")
    for rank in (0, 1):
        own = Attention("sdpa")
        monkeypatch.setattr(attention, "attention_in_use", lambda own=own: own)
        monkeypatch.setattr(attention, "available_attention_backends", lambda device_type, rank=rank: here[rank])
        dist = Ranks(rank=rank, here=here, device=torch.device("cpu"))
        name = attention.agree_on_attention(Counter({SHAPE: 24}), dist, torch.bfloat16, tmp_path, gathers=gathers)
        assert name == own.backend == expected[-1]
    assert asked == [({SHAPE: 24}, expected, "sdpa", torch.device("cpu"), torch.bfloat16, tmp_path)]  # rank 0 alone


def test_one_candidate_needs_no_measuring(monkeypatch, tmp_path):
    monkeypatch.setattr(attention, "default_attention_backend", lambda device_type: "varlen")
    monkeypatch.setattr(attention, "available_attention_backends", lambda device_type: ["varlen", "sdpa", "flex"])
    monkeypatch.setattr(attention, "choose_attention", None)
    monkeypatch.setattr(attention, "resolve_attention_backend", lambda name, device_type: name)
    own = Attention("sdpa")
    monkeypatch.setattr(attention, "attention_in_use", lambda: own)
    dist = Ranks(rank=0, here=[["varlen", "sdpa", "flex"]], device=torch.device("cpu"))
    name = attention.agree_on_attention(Counter({SHAPE: 24}), dist, torch.bfloat16, tmp_path, gathers=False)
    assert name == own.backend == "varlen"


def test_the_log_shows_the_figures(monkeypatch, tmp_path, caplog):
    """Measured on the CPU, where a second backend stands for a GPU's; the second time they are remembered."""
    monkeypatch.setattr(attention, "available_attention_backends", lambda device_type: ["sdpa", "varlen"])
    monkeypatch.setattr(attention, "resolve_attention_backend", lambda name, device_type: name)
    monkeypatch.setattr(attention, "ONLY_BY_NAME", set())
    monkeypatch.setattr(attention_speed, "MARGIN", -1e9)  # whichever is faster today
    dist = Ranks(rank=0, here=[["sdpa", "varlen"]], device=torch.device("cpu"))
    layers = Counter({AttentionShape(2, 1, 16, 1, 96, 32): 3})
    own = Attention("sdpa")
    monkeypatch.setattr(attention, "attention_in_use", lambda: own)
    with caplog.at_level(logging.INFO, "flame.training.attention_backend"):
        names = [attention.agree_on_attention(layers, dist, torch.float32, tmp_path, gathers=False) for _ in range(2)]
    first, second = caplog.messages
    assert names[0] == names[1] == own.backend
    assert re.fullmatch(
        r"attention: \w+ \(\w+ [\d.]+ ms, \w+ [\d.]+ ms\), forward and backward of all layers, measured; "
        r"96 tokens in documents of up to 32, 2 heads of 16 \(1 of keys\)",
        first,
    )
    assert second == first.replace("measured", "remembered")


@pytest.mark.gpu
def test_a_gpu_measures_and_remembers(tmp_path, monkeypatch):
    from flame.models.attention import available_attention_backends
    from flame.models.attention_choice import choose_attention

    setup_backend("auto", "cuda")
    names = available_attention_backends("cuda")
    small = AttentionShape(4, 2, 64, 1, 8192, 1024)
    where = (names, "varlen", torch.device("cuda"), torch.bfloat16, tmp_path)
    choice, remembered = choose_attention({small: 2}, *where)
    assert not remembered and choice.backend in choice.milliseconds
    assert {"varlen", "sdpa", "flex"} <= choice.milliseconds.keys(), choice.left_out
    assert choice.milliseconds.keys() | choice.left_out.keys() == {*names}
    assert choose_attention({small: 2}, *where) == (choice, True)
    uninstall()
