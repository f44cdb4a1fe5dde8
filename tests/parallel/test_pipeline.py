"""Models cut into stages: what each stage holds, and models that make none."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from flame.config import Experimental
from flame.errors import UserError
from flame.fqn import clean_fqn
from flame.parallel.pipeline import Stages, check_stages, cut_stage, has_tied_ends
from flame.parallel.pipeline_plan import plan_pipeline
from tests.models.families import build_eagerly, tiny_config


def cut(model: nn.Module, schedule: str) -> list[set[str]]:
    """Names of the parameters of each stage."""
    plan = plan_pipeline(model, Experimental(pipeline_parallel_degree=2, pipeline_parallel_schedule=schedule))
    parts = [Stages({stage: cut_stage(model, plan, stage)}) for stage in range(len(plan.stages))]
    return [{clean_fqn(name) for name, _ in part.named_parameters()} for part in parts]


def make(family: str, **options) -> nn.Module:
    return build_eagerly(tiny_config(family, **options))


def make_llama() -> nn.Module:
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=8)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("is_tied", [True, False])
def test_stages_share_nothing_but_tied_ends(is_tied):
    model = make("GLA", num_hidden_layers=4, tie_word_embeddings=is_tied)
    assert has_tied_ends(model) == is_tied
    stages = cut(model, "1F1B" if is_tied else "ZBVZeroBubble")
    whole = {name for name, _ in model.named_parameters()}
    assert set.union(*stages) == whole
    assert sum(map(len, stages)) == len(whole) + is_tied


def test_tied_ends_on_one_rank_are_refused():
    with pytest.raises(UserError, match="tie_word_embeddings false"):
        cut(make("GLA", num_hidden_layers=4, tie_word_embeddings=True), "ZBVZeroBubble")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: make("RWKV7"), "is given v_first by the blocks before"),
        (lambda: make("Transformer", attnres_block_size=2), "attnres_block_size"),
        (
            make_llama,
            "LlamaForCausalLM is no model of flash-linear-attention",
        ),
    ],
)
def test_models_that_are_more_than_a_chain_of_blocks_are_refused(model, message):
    with pytest.raises(UserError, match=f"pipeline_parallel_degree = 2: .*{message}"):
        check_stages(model(), 2)
