"""Models cut into stages: what each stage holds, and models that make none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flame.config import Experimental
from flame.errors import UserError
from flame.fqn import clean_fqn
from flame.parallel.pipeline_plan import PipelinePlan, plan_pipeline
from flame.parallel.stage_modules import Entry, Exit
from flame.parallel.stage_outline import outline_of_fla
from flame.parallel.stages import Stages, check_stages, cut_stage, has_tied_ends
from tests.models.families import build_eagerly, tiny_config


def make(family: str, **options) -> nn.Module:
    return build_eagerly(tiny_config(family, **options))


def cut(model: nn.Module, schedule: str) -> list[set[str]]:
    """Names of the parameters of each stage."""
    plan = plan_pipeline(model, Experimental(pipeline_parallel_degree=2, pipeline_parallel_schedule=schedule))
    check_stages(model, plan)
    outline = outline_of_fla(model, 2)
    parts = [Stages({stage: cut_stage(model, plan, stage, outline)}) for stage in range(len(plan.stages))]
    return [{clean_fqn(name) for name, _ in part.named_parameters()} for part in parts]


@pytest.mark.parametrize("is_tied", [True, False])
def test_stages_share_nothing_but_tied_ends(is_tied):
    model = make("GLA", num_hidden_layers=4, tie_word_embeddings=is_tied)
    assert has_tied_ends(model) == is_tied
    stages = cut(model, "1F1B" if is_tied else "ZBVZeroBubble")
    whole = {name for name, _ in model.named_parameters()}
    assert set.union(*stages) == whole
    assert sum(map(len, stages)) == len(whole) + is_tied


def test_a_parameter_of_all_blocks_is_in_every_stage():
    first, last = cut(make("HGRN2", use_lower_bound=True, tie_word_embeddings=False), "1F1B")
    assert first & last == {"model.lower_bounds"}


@pytest.mark.parametrize(
    ("model", "schedule", "message"),
    [
        (lambda: make("GLA", num_hidden_layers=4, tie_word_embeddings=True), "ZBVZeroBubble", "tie_word_embeddings"),
        (lambda: make("HGRN2", num_hidden_layers=4, use_lower_bound=True), "Interleaved1F1B", "one stage on a rank"),
        (lambda: make("Transformer", attnres_block_size=2), "1F1B", "attnres_block_size"),
        (lambda: make("Rodimus"), "1F1B", "is given .* by the blocks before"),
    ],
)
def test_models_that_are_more_than_a_chain_of_blocks_are_refused(model, schedule, message):
    with pytest.raises(UserError, match=f"pipeline_parallel_degree = 2: .*{message}"):
        cut(model(), schedule)


def test_blocks_of_two_stages_cannot_share_weights():
    model = make("GLA", tie_word_embeddings=False)
    one, other = model.model.layers
    other.mlp = one.mlp
    plan = PipelinePlan(2, [range(1), range(1, 2)], [0, 1])
    with pytest.raises(UserError, match=r"layers\.0\.mlp.* and .*layers\.1\.mlp.* are one weight"):
        check_stages(model, plan)


def test_what_is_carried_goes_behind_the_hidden_states():
    states, first_values = torch.randn(1, 3, 4), torch.randn(1, 3, 6)
    returns = ("attentions", "past_key_values", "v_first")
    joined, *others = Exit(returns, "v_first")(states, v_first=first_values, past_key_values="cache")
    assert joined.shape == (1, 3, 10) and others[1] == "cache"
    entry = Entry(returns, "v_first", 4)
    entry.hidden_states = joined
    received, _, _, received_values = entry(torch.zeros(1), v_first=torch.zeros(1), past_key_values=None)
    assert torch.equal(received, states) and torch.equal(received_values, first_values)
