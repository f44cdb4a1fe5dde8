"""Models native to transformers: packed documents are kept apart, or the model is refused; blocks are found."""

from __future__ import annotations

import pytest
import torch

from flame.errors import UserError
from flame.models.backend import setup_backend, uninstall
from flame.models.blocks import find_blocks
from flame.models.loss import attach_training_forward
from flame.models.native_attention import has_native_attention
from flame.models.proofs import check_causal, check_varlen_support, no_weight_zero
from tests.models.native import tiny_native

# Model type -> (where its blocks are, how many), for those that train on packed documents.
PACKED = {
    **{
        name: ("model.layers", 2)
        for name in (
            "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma", "gemma3_text", "phi",
            "phi3", "stablelm", "starcoder2", "olmo2", "olmoe", "cohere2", "granite", "glm4", "nemotron", "persimmon",
            "bamba", "falcon_h1", "qwen3_next", "qwen3_5_text", "olmo_hybrid", "lfm2",
        )
    },
    **{name: ("transformer.h", 2) for name in ("gpt2", "gpt_neo", "gptj", "gpt_bigcode")},
    "gpt_neox": ("gpt_neox.layers", 2),
    "opt": ("model.decoder.layers", 2),
    "biogpt": ("biogpt.layers", 2),
    "mamba2": ("backbone.layers", 2),
    "zamba2": ("model.layers", 4),
}  # fmt: skip
MIXES = "mixes packed documents"
# Kept apart with the newest transformers, refused with some older ones.
BY_RELEASE = {"gemma2": ("model.layers", 2, "softcap"), "falcon": ("transformer.h", 2, MIXES)}
REFUSED = {
    "bloom": ("transformer.h", 2, MIXES),
    "mpt": ("transformer.blocks", 2, MIXES),
    "gpt_oss": ("model.layers", 2, MIXES),
    "minimax": ("model.layers", 2, MIXES),
    "xglm": ("model.layers", 2, MIXES),
    "mamba": ("backbone.layers", 2, MIXES),
    "falcon_mamba": ("backbone.layers", 2, MIXES),
    "jamba": ("model.layers", 2, MIXES),
    "recurrent_gemma": ("model.layers", 3, MIXES),
    "rwkv": ("rwkv.blocks", 2, MIXES),
    "bert": ("bert.encoder.layer", 2, "not causal"),
    "modernbert-decoder": ("model.layers", 2, "no decoder apart from its head"),
    "llama4_text": ("model.layers", 2, "no decoder apart from its head"),
}


@pytest.fixture(autouse=True, scope="module")
def reference_backend():
    setup_backend("reference", "cpu")
    yield
    uninstall()


def prove(model):
    attach_training_forward(model)
    with no_weight_zero(model):
        check_causal(model, "cpu")
        check_varlen_support(model, "cpu")
    return model.train()


def loss_and_gradients(model, *batches):
    model.zero_grad()
    loss = sum(model(ids, labels=labels, **packing) for ids, labels, packing in batches)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_packed_documents_train_as_alone(model):
    ids = torch.randint(3, 64, (1, 24), generator=torch.Generator().manual_seed(0))
    first, second, bounds = ids[:, :9], ids[:, 9:], torch.tensor([0, 9, 24], dtype=torch.int32)
    labels = torch.cat([first.roll(-1), second.roll(-1)], dim=1)
    alone, expected = loss_and_gradients(model, (first, labels[:, :9], {}), (second, labels[:, 9:], {}))
    packed, gradients = loss_and_gradients(model, (ids, labels, {"cu_seqlens": bounds}))
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-5, msg=name)
    assert (model(ids, labels=labels) - packed).abs() > 1e-4, "one document gives the same: nothing is shown"


@pytest.mark.parametrize("model_type", PACKED)
def test_packed_documents_train_as_documents_alone(model_type):
    assert_packed_documents_train_as_alone(prove(tiny_native(model_type)))


@pytest.mark.parametrize("model_type", BY_RELEASE)
def test_packed_or_refused_by_the_release(model_type):
    model = tiny_native(model_type)
    try:
        prove(model)
    except UserError as refusal:
        assert BY_RELEASE[model_type][2] in str(refusal)
    else:
        assert_packed_documents_train_as_alone(model)


@pytest.mark.parametrize("model_type", REFUSED)
def test_models_that_cannot_pack_are_refused(model_type):
    with pytest.raises(UserError, match=REFUSED[model_type][2]):
        prove(tiny_native(model_type))


@pytest.mark.parametrize("model_type", [*PACKED, *REFUSED, *BY_RELEASE])
def test_blocks_are_found(model_type):
    prefix, count = (PACKED | REFUSED | BY_RELEASE)[model_type][:2]
    assert [name for name, _ in find_blocks(tiny_native(model_type))] == [f"{prefix}.{i}" for i in range(count)]


def test_attention_that_gets_no_bounds_goes_through_a_mask():
    model = prove(tiny_native("stablelm"))
    assert not has_native_attention(model)
    assert has_native_attention(prove(tiny_native("llama")))


def test_a_projection_that_starts_at_zero_hides_nothing():
    model = tiny_native("bloom")
    for name, parameter in model.named_parameters():
        if name.endswith(("dense.weight", "dense_4h_to_h.weight")):
            torch.nn.init.zeros_(parameter)
    with pytest.raises(UserError, match=MIXES):
        prove(model)
    assert not model.transformer.h[0].self_attention.dense.weight.any()


def test_what_a_model_says_itself_is_the_reason(monkeypatch):
    model = attach_training_forward(tiny_native("llama"))
    fault = ValueError("this kernel cannot keep packed sequences apart")

    def fail(*args, **kwargs):
        raise fault

    monkeypatch.setattr(model.model.layers[0], "forward", fail)
    with pytest.raises(UserError, match="LlamaForCausalLM cannot keep packed documents apart: this kernel") as raised:
        check_varlen_support(model, "cpu")
    assert raised.value.__cause__ is fault
