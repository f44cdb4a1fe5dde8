"""What is compiled beside a start is what the run's layers call: a stand-in for the package notes both."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from flame.cli.parse import parse_args
from flame.models import flash_attention_4
from flame.models.attention import Attention
from flame.models.attention_speed import AttentionShape, call_of
from flame.training import attention_ahead
from flame.training.attention_ahead import compile_backward, compile_forward, planned_layers

JOB = {"model.config": "configs/transformer_340M.json", "model.tokenizer_path": "configs/tokenizer"}
JOB |= {"training.dataset": "builtin:stdlib", "training.mixed_precision_param": "bfloat16"}
JOB |= {"model.attention_backend": "fa4", "training.seq_len": 256, "training.context_len": 64}
PACKED = {"training.varlen": "true", "training.batch_size": 1}
ROWS = {"training.varlen": "false", "training.batch_size": 2}


def job(**changes):
    return parse_args([f"--{name}={value}" for name, value in (JOB | changes).items()])


class Package:
    """Notes each call as the package's keys see it, and whether its tensors have memory."""

    def __init__(self):
        self.calls, self.real = [], []

    def _note(self, name, tensors, options):
        look = [(tuple(x.shape), x.stride(), x.dtype) for x in tensors]
        plain = {key: tuple(x.shape) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
        self.calls.append((name, look, plain))
        self.real += [not isinstance(x, FakeTensor) for x in tensors]

    def _flash_attn_fwd(self, q, k, v, return_lse, **options):
        self._note("forward", (q, k, v), options)
        return q.new_zeros(*q.shape[:2], v.shape[-1]), q.new_zeros(q.shape[1], len(q), dtype=torch.float32)

    def _flash_attn_bwd(self, q, k, v, o, o_gradient, logsumexp, **options):
        self._note("backward", (q, k, v, o, o_gradient, logsumexp), options)
        return tuple(torch.zeros_like(x) for x in (q, k, v))


@pytest.fixture
def package(monkeypatch, tmp_path):
    stand_in = Package()
    monkeypatch.setattr(flash_attention_4, "_package", lambda work: stand_in)
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", "sm_90")
    return stand_in


@pytest.mark.parametrize("rows", [PACKED, ROWS], ids=["packed", "rows"])
@pytest.mark.parametrize(
    "shape", [{}, {"num_heads": 8, "num_kv_heads": 2, "head_dim": 36}, {"window": 16}, {"head_dim": 160}], ids=str
)
def test_it_compiles_what_layers_call(shape, rows, package):
    sizes = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "num_rows": 1, "num_tokens": 96, "document_len": 32}
    if rows is ROWS:
        sizes |= {"num_rows": 2, "document_len": None}
    shape = AttentionShape(**(sizes | shape))
    for compile_pass in (flash_attention_4.compile_forward, flash_attention_4.compile_backward):
        assert attention_ahead.compile_layer(shape, torch.bfloat16, compile_pass)
    assert not any(package.real)
    planned, package.calls = package.calls, []
    inputs = [torch.zeros(size, dtype=torch.bfloat16, requires_grad=True) for size in shape.tensor_sizes()[:3]]
    call_of(Attention("fa4", shape.document_len), shape, torch.device("cpu"))(*inputs).sum().backward()
    assert planned == package.calls
    assert [name for name, *_ in planned] == ["forward", "backward"]


@pytest.mark.parametrize(("function", "name"), [(compile_forward, "forward"), (compile_backward, "backward")])
def test_a_jobs_layers_are_compiled(function, name, package):
    assert function(job(**PACKED), 1) == "1 shape of layers"
    ((called, tensors, options),) = package.calls
    assert (called, tensors[0]) == (name, ((256, 16, 64), (1024, 64, 1), torch.bfloat16))
    assert options["causal"] and options["max_seqlen_q"] == 64


@pytest.mark.parametrize(
    "changes",
    [
        {"model.config": "configs/gla_340M.json"},
        {"training.mixed_precision_param": "float32"},
        {"model.attention_backend": "auto"},  # too small to be measured
    ],
    ids=str,
)
def test_jobs_with_nothing_to_compile(changes, package):
    assert compile_forward(job(**PACKED, **changes), 1) == ""
    assert package.calls == []


def test_auto_is_compiled_where_it_is_measured(package):
    long = {"training.seq_len": 65536, "training.context_len": 4096, "model.attention_backend": "auto"}
    assert compile_forward(job(**PACKED, **long), 1) == "1 shape of layers"


def test_nothing_is_compiled_that_is_not_kept(package, monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    assert compile_forward(job(**PACKED), 1) == ""
    assert package.calls == []


def test_heads_that_the_package_does_not_take(package, monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", "sm_100")
    wide = AttentionShape(4, 4, 160, 1, 96, 32)
    assert not attention_ahead.compile_layer(wide, torch.bfloat16, flash_attention_4.compile_forward)


def test_ranks_that_share_heads():
    (shape,) = planned_layers(job(**PACKED, **{"training.tensor_parallel_degree": 2}), 4)
    assert (shape.num_heads, shape.num_tokens, shape.document_len) == (8, 256, 64)


def test_an_open_batch_size_stays_open():
    config = job(**(PACKED | {"training.batch_size": "auto"}))
    (shape,) = planned_layers(config, 1)
    assert shape.num_tokens == 256
    assert config.training.batch_size == "auto"  # the stamp is that of the job


def test_a_file_that_leaves_something_to_the_class(tmp_path):
    path = tmp_path / "model.json"
    path.write_text('{"model_type": "transformer", "hidden_size": 1024}')
    (shape,) = planned_layers(job(**PACKED, **{"model.config": path}), 1)
    assert (shape.num_heads, shape.head_dim) == (32, 32)
