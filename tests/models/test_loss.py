from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from flame.errors import UserError
from flame.models.backend import REFERENCE_FAMILIES, setup_backend, uninstall
from flame.models.loss import attach_training_forward
from flame.models.native_attention import document_indices, document_position_ids
from flame.models.proofs import check_causal, check_varlen_support, no_weight_zero
from flame.paths import find_resource

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 48}
NATIVE = {
    "llama": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "gemma2": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "final_logit_softcapping": 0.5},
    "granite": {"num_attention_heads": 2, "num_key_value_heads": 1, "logits_scaling": 4.0},
    "cohere": {"num_attention_heads": 2, "num_key_value_heads": 1, "logit_scale": 0.25},
}
UNFUSED = {"fuse_cross_entropy": False}
FUSED_LINEAR = {"fuse_cross_entropy": False, "fuse_linear_cross_entropy": True}


@pytest.fixture(autouse=True, scope="module")
def reference_backend():
    setup_backend("reference", "cpu")
    yield
    uninstall()


def fla_model(family="gated_deltanet", **overrides):
    config = json.loads(find_resource(f"configs/debug/{family}.json").read_text())
    config |= SIZES | {"num_heads": 2} | ({"head_dim": 16} if family == "gated_deltanet" else {}) | overrides
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def native_model(model_type, **overrides):
    config = AutoConfig.for_model(model_type, **SIZES | NATIVE.get(model_type, {}) | overrides)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def make_batch(num_tokens=24):
    ids = torch.randint(64, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1).masked_fill(torch.arange(num_tokens) % 5 == 4, -100)
    return ids, labels


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: fla_model(), id="fused cross entropy"),
        pytest.param(lambda: fla_model(**FUSED_LINEAR), id="fused linear cross entropy"),
        pytest.param(lambda: fla_model(**UNFUSED), id="torch cross entropy"),
        *[pytest.param(lambda name=name: native_model(name), id=name) for name in NATIVE],
    ],
)
def test_loss_is_the_sum_over_valid_targets_of_the_models_own_logits(build):
    model, (ids, labels) = build(), make_batch()
    logits = model(ids, use_cache=False).logits.float()
    expected = F.cross_entropy(logits[0], labels[0], ignore_index=-100, reduction="sum")
    expected.backward()
    own = gradients(model)
    model.zero_grad()
    loss = attach_training_forward(model)(ids, labels=labels)
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, own[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("fuse", [{}, FUSED_LINEAR, UNFUSED], ids=["fused", "fused linear", "torch"])
def test_l2warp_penalty_is_a_token_sum_like_the_loss(fuse):
    """Gradient of 1e-4 / 2 * sum over tokens of the largest logit squared; the value stays."""
    ids, labels = make_batch()
    plain, warped = fla_model(**fuse), fla_model(**fuse, use_l2warp=True)
    logits = plain(ids, use_cache=False).logits.float()
    loss = F.cross_entropy(logits[0], labels[0], ignore_index=-100, reduction="sum")
    (loss + 0.5e-4 * logits.max(-1).values.square().sum()).backward()
    warped_loss = attach_training_forward(warped)(ids, labels=labels)
    warped_loss.backward()
    torch.testing.assert_close(warped_loss, loss)
    expected = gradients(plain)
    for name, grad in gradients(warped).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_calls_without_labels_reach_the_models_own_forward():
    model = attach_training_forward(fla_model())
    assert model(make_batch()[0]).logits.shape == (1, 24, 64)
    assert model.generate(make_batch()[0], max_new_tokens=2, do_sample=False).shape == (1, 26)


def test_attaching_works_on_meta_and_renames_nothing():
    names = list(fla_model().state_dict())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gated_deltanet", **SIZES, num_heads=2))
    attach_training_forward(model)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("family", REFERENCE_FAMILIES)
def test_fla_families_keep_documents_apart(family):
    config = json.loads(find_resource(f"configs/debug/{family}.json").read_text())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    with no_weight_zero(model):
        check_varlen_support(attach_training_forward(model), "cpu")


def test_a_native_model_keeps_documents_apart_bit_for_bit():
    model = attach_training_forward(native_model("llama"))
    check_varlen_support(model, "cpu")
    ids, labels = make_batch()
    cu_seqlens = torch.tensor([0, 9, 24], dtype=torch.int32)
    packed = model(ids, labels=labels, cu_seqlens=cu_seqlens)
    alone = model(ids[:, :9], labels=labels[:, :9]) + model(ids[:, 9:], labels=labels[:, 9:])
    torch.testing.assert_close(packed, alone)


def test_a_native_model_packs_without_a_mask(monkeypatch):
    from flame.models import native_attention

    model = attach_training_forward(
        native_model("mistral", sliding_window=4, num_attention_heads=2, num_key_value_heads=1)
    )
    assert native_attention.has_native_attention(model)
    ids, labels = make_batch()
    cu_seqlens = torch.tensor([0, 9, 24], dtype=torch.int32)
    alone = model(ids[:, :9], labels=labels[:, :9]) + model(ids[:, 9:], labels=labels[:, 9:])
    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", None)  # calling it would fail
    torch.testing.assert_close(model(ids, labels=labels, cu_seqlens=cu_seqlens), alone)
    assert "flame" not in model.config.to_json_string()


def test_attention_that_packing_does_not_have_is_refused():
    model = attach_training_forward(native_model("llama", attention_dropout=0.1)).train()
    ids, labels = make_batch()
    with pytest.raises(UserError, match="attention dropout"):
        model(ids, labels=labels, cu_seqlens=torch.tensor([0, 24], dtype=torch.int32))


def test_a_native_model_that_mixes_documents_is_refused():
    model = attach_training_forward(native_model("falcon_mamba", state_size=4))
    model.train()
    with pytest.raises(UserError, match="mixes packed documents"):
        check_varlen_support(model, "cpu")
    assert model.training


def test_a_refusal_names_the_class_as_its_author_does():
    model = attach_training_forward(native_model("falcon_mamba", state_size=4))
    model.__class__ = type("FSDPFalconMambaForCausalLM", (type(model),), {})  # what fully_shard does
    with pytest.raises(UserError, match=r"^FalconMambaForCausalLM mixes"):
        check_varlen_support(model, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_encoder_is_refused_and_decoders_are_not(dtype):
    heads = {"num_attention_heads": 2}
    decoders = {"llama": {}, "gpt2": heads, "mixtral": heads | {"num_key_value_heads": 1, "num_local_experts": 4}}
    for model_type, options in decoders.items():
        check_causal(attach_training_forward(native_model(model_type, **options)).to(dtype), "cpu")
    with pytest.raises(UserError, match="BertLMHeadModel is not causal"):
        check_causal(attach_training_forward(native_model("bert", **heads)).to(dtype), "cpu")


def test_positions_restart_at_each_document():
    positions = document_position_ids(torch.tensor([0, 1, 4, 6], dtype=torch.int32), 6)
    assert positions.tolist() == [[0, 0, 1, 2, 0, 1]]
    assert document_indices(torch.tensor([0, 1, 4, 6]), 6).tolist() == [[0, 1, 1, 1, 2, 2]]


def test_router_losses_and_other_shapes_are_refused():
    with pytest.raises(UserError, match="output_router_logits to false"):
        attach_training_forward(
            native_model(
                "mixtral", num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, output_router_logits=True
            )
        )
    with torch.device("meta"):
        mom = AutoModelForCausalLM.from_config(AutoConfig.for_model("mom", **SIZES, num_heads=2))
        t5 = T5ForConditionalGeneration(T5Config(d_model=32, num_layers=1, vocab_size=64))
    with pytest.raises(UserError, match="aux_loss_scale to 0"):
        attach_training_forward(mom)
    with pytest.raises(UserError, match="encoder-decoder"):
        attach_training_forward(t5)


def test_the_forward_runs_inside_fsdps_hooks(tmp_path):
    from torch.distributed.fsdp import fully_shard

    ids, labels = make_batch()
    expected = attach_training_forward(fla_model(**FUSED_LINEAR))
    expected_loss = expected(ids, labels=labels)
    expected_loss.backward()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        model = attach_training_forward(fla_model(**FUSED_LINEAR))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        loss = model(ids, labels=labels)
        loss.backward()
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    finally:
        dist.destroy_process_group()
    assert torch.equal(loss, expected_loss)
    for name, p in expected.named_parameters():
        assert torch.equal(grads[name], p.grad), name
