"""Which backend wins, and what leaves one out."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace

import pytest
import torch

from flame.errors import UserError
from flame.models import attention, attention_speed
from flame.models.attention_kernels import grouped_sdpa
from flame.models.attention_speed import AttentionShape, Choice, Timing, measure_all, pick_fastest

SHAPE = AttentionShape(
    num_heads=4, num_kv_heads=2, head_dim=16, num_rows=1, num_tokens=300, document_len=64, window=None
)
WINDOWED = AttentionShape(4, 2, 16, 1, 300, 64, window=8)
CPU = torch.device("cpu")


def pick(figures, backends=("b", "c"), default="a"):
    """``figures``: shape -> backend -> milliseconds, or a reason."""

    def measure(shape, names):
        assert names
        results = {name: figures[shape][name] for name in names}
        timings = {name: Timing(ms / 3, ms * 2 / 3) for name, ms in results.items() if isinstance(ms, float)}
        return results | timings

    numbers = {SHAPE: 3, WINDOWED: 1}
    return pick_fastest({shape: numbers[shape] for shape in figures}, list(backends), default, measure)


def test_the_fastest_over_all_layers_wins():
    choice = pick({SHAPE: {"a": 10.0, "b": 5.0, "c": 6.0}, WINDOWED: {"a": 1.0, "b": 9.0, "c": 1.0}})
    assert choice.backend == "c"
    assert choice.milliseconds == pytest.approx({"a": 31.0, "b": 24.0, "c": 19.0})
    assert choice.describe() == "c (c 19.0 ms, b 24.0 ms, a 31.0 ms)"


def test_one_that_fails_on_any_shape_is_left_out_and_not_tried_again():
    choice = pick({SHAPE: {"a": 10.0, "b": "no window", "c": 9.0}, WINDOWED: {"a": 1.0, "c": 1.0}})
    assert (choice.backend, choice.left_out) == ("c", {"b": "no window"})


def test_gains_within_noise_change_nothing():
    figures = {SHAPE: {"a": 10.0, "b": 9.8, "c": 11.0}, WINDOWED: {"a": 1.0, "b": 1.0, "c": 1.0}}
    assert pick(figures).backend == "a"


def test_without_figures_of_the_default_it_stays():
    figures = {SHAPE: {"a": "broken", "b": 1.0, "c": 1.0}, WINDOWED: {"b": 1.0, "c": 1.0}}
    assert pick(figures).backend == "a"
    nothing = dict.fromkeys("abc", "broken")
    choice = pick({SHAPE: nothing})
    assert choice == Choice("a", {}, nothing)
    assert choice.describe() == "a (not to be measured here: broken)"


def with_kernel(monkeypatch, **kernels):
    """Backends of these names besides the real ones."""
    real = attention._kernels
    monkeypatch.setattr(attention, "_kernels", lambda name: (kernels[name],) * 2 if name in kernels else real(name))
    monkeypatch.setattr(attention, "fits_flash", lambda *_: True)
    monkeypatch.setattr(attention_speed, "REPEATS", 1)


@pytest.mark.parametrize("shape", [SHAPE, WINDOWED])
def test_only_the_same_outputs_and_gradients_count(shape, monkeypatch, caplog):
    def same(*args):
        return grouped_sdpa(*args)

    def leaky(q, k, v, documents, *args):
        """Two documents in one."""
        joined = torch.cat([documents.bounds_q[:1], documents.bounds_q[2:]])
        return grouped_sdpa(q, k, v, replace(documents, bounds_q=joined, bounds_k=joined), *args)

    def wrong_gradient(q, *args):
        o = grouped_sdpa(q, *args)
        return o + (q - q.detach()) * 0.1

    def not_a_number(*args):
        return grouped_sdpa(*args) * torch.nan

    def refuses(*_args):
        raise RuntimeError("no such heads\nand a page of advice")

    kernels = {f.__name__: f for f in (same, leaky, wrong_gradient, not_a_number, refuses)}
    with_kernel(monkeypatch, **kernels)
    with caplog.at_level(logging.DEBUG, "flame.models.attention_speed"):
        results = measure_all(shape, ["sdpa", *kernels], CPU, torch.float32)
    good = [name for name, result in results.items() if isinstance(result, Timing)]
    assert good == ["sdpa", "same"]
    assert all(results[name].total_ms > 0 and results[name].memory_bytes is None for name in good)
    assert results["refuses"] == "RuntimeError: no such heads"
    assert "off by" in results["leaky"] and "off by" in results["wrong_gradient"] and "nan" in results["not_a_number"]
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    assert sum("is left out" in record.getMessage() for record in caplog.records) == 4


def test_measuring_leaves_the_draws_of_the_job_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    measure_all(SHAPE, ["sdpa"], CPU, torch.float32)
    assert torch.equal(torch.rand(1), expected)


def test_a_backend_that_keeps_more_is_left_out():
    def measure(shape, names):
        kept = {"a": 100, "b": 111, "c": 109}
        return {name: Timing(1.0, ms, kept_bytes=kept[name] << 20) for name, ms in zip("abc", (9, 1, 5), strict=True)}

    choice = pick_fastest({SHAPE: 32}, ["b", "c"], "a", measure)
    assert choice.backend == "c"
    assert choice.left_out == {"b": "keeps 3.47 GiB for the backward, a 3.12"}
    assert choice.milliseconds == {"a": 320.0, "c": 192.0}


@pytest.mark.parametrize("window", [None, 8])
def test_flops_count_what_is_seen(window):
    shape = AttentionShape(4, 2, 16, 2, 300, document_len=None, window=window)
    seen = torch.ones(300, 300).tril()
    if window:
        seen = seen.triu(1 - window)
    assert shape.forward_flops() == 2 * 4 * 4 * 16 * seen.sum().item()
    packed = AttentionShape(4, 2, 16, 1, 300, document_len=64, window=window)
    bounds = packed.bounds()
    assert bounds == [0, 64, 96, 160, 176, 240, 243, 300]
    same = torch.zeros(300, 300)
    for start, end in itertools.pairwise(bounds):
        same[start:end, start:end] = 1
    assert packed.forward_flops() == 4 * 4 * 16 * (seen * same).sum().item()


def test_a_shape_in_words():
    assert AttentionShape(16, 16, 64, 1, 65536, 4096).describe() == (
        "65,536 tokens in documents of up to 4,096, 16 heads of 64"
    )
    assert AttentionShape(8, 2, 64, 4, 2048, None, 512).describe() == (
        "4 x 2,048 tokens, 8 heads of 64 (2 of keys), window 512"
    )


def test_a_gpu_without_room_for_the_inputs_leaves_all_out(monkeypatch):
    def no_room(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(attention_speed, "_make_inputs", no_room)
    assert measure_all(SHAPE, ["varlen", "flex"], CPU, torch.float32) == dict.fromkeys(
        ["varlen", "flex"], "OutOfMemoryError: CUDA out of memory"
    )


def test_a_gpu_that_a_backend_has_broken_is_said_to_be(monkeypatch):
    def broken(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class Backends:
        device = torch.device("cuda")
        __call__ = broken

    monkeypatch.setattr(attention_speed, "Measured", lambda *_: Backends())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    reason = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert measure_all(SHAPE, ["fa4"], CPU, torch.float32) == {"fa4": reason}
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(UserError, match=r"tried fa4, after which the GPU can no longer be used .*illegal"):
        measure_all(SHAPE, ["fa4"], CPU, torch.float32)
