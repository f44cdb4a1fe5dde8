"""Whether a model of unknown make can be cut into stages, by trial on a small copy of it before it is cut.

The copy has the embedding, the output projection and a few blocks, one of each kind at least. On every rank it is
proved to be causal and to keep documents apart, as whole models are, and then cut behind each of its blocks: what the
pieces compute one after the other must be what the whole copy computes. All ranks see the same copy, so that all of
them come to the same verdict.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable

import torch
from torch import nn

from flame.data.batch import Batch
from flame.errors import UserError
from flame.models import BuiltModel, init_weights
from flame.models.blocks import SkippedBlock, find_blocks, keep_blocks
from flame.models.loss import attach_training_forward
from flame.models.native_attention import has_native_attention, use_native_attention
from flame.models.proofs import check_causal, check_varlen_support, differ, no_weight_zero
from flame.parallel.degrees import PIPELINE_DEGREE
from flame.parallel.pipeline_plan import PipelinePlan
from flame.parallel.stage_outline import Outline
from flame.parallel.stages import cut_stage, has_tied_ends, stage_states

_NUM_TOKENS = 16


def try_stages(built: BuiltModel, device: torch.device, dtype: torch.dtype, seed: int, varlen: bool) -> Outline:
    """Prove that a model can be cut, and find out how; switches ``built`` to the attention that keeps documents apart.

    Args:
        device: to run the copy on.
        dtype: to run it in, as training does.
        seed: of its weights.
        varlen: rows hold several documents.

    Raises:
        UserError: the model looks ahead, mixes documents, or computes something else when it is cut.
    """
    small = copy.deepcopy(built.model)
    keep_blocks(small, some_of_each_kind(small), lambda _: SkippedBlock())
    small.to_empty(device=device)
    init_weights(small, built.recipe, seed, built.tied)
    for parameter in small.parameters():  # and no buffer, as FSDP does it
        parameter.data = parameter.data.to(dtype)
    attach_training_forward(small)
    with no_weight_zero(small):
        outline = observe(small, device)
        for module in small.modules():
            if isinstance(module, SkippedBlock):
                module.returns = outline.returns
        check_causal(small, device)
        if varlen:
            check_varlen_support(small, device)
        if has_native_attention(small):
            use_native_attention(built.model)
        _check_chain(small, outline, device, varlen)
    return outline


def some_of_each_kind(model: nn.Module) -> list[int]:
    """Numbers of the first two blocks, and of the first of every other kind (class, parameters' shapes, layer type)."""
    layer_types = getattr(model.config, "layer_types", None) or ()
    kinds: dict[Hashable, int] = {}
    for number, (_, block) in enumerate(find_blocks(model)):
        shapes = tuple((name, parameter.shape) for name, parameter in block.named_parameters())
        kinds.setdefault((type(block), shapes, *layer_types[number : number + 1]), number)
    return sorted({0, 1, *kinds.values()})


class _Seen(Exception):
    """Ends a forward pass that has shown what was to be seen."""


@torch.no_grad()
def observe(model: nn.Module, device: torch.device) -> Outline:
    """See what runs before the first block, and what that returns."""
    (_, block), *_others = find_blocks(model)
    decoder, before, outputs = model.get_decoder(), set(), []

    def leave_block(_module: nn.Module, _args: tuple, output: object) -> None:
        outputs.append(output)
        raise _Seen

    hooks = [
        child.register_forward_pre_hook(lambda *_, name=name: before.add(name))
        for name, child in decoder.named_children()
    ]
    hooks.append(block.register_forward_hook(leave_block))
    try:
        decoder(input_ids=torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device=device), use_cache=False)
    except _Seen:
        others = len(outputs[0]) - 1 if isinstance(outputs[0], tuple) else None
        return Outline(None if others is None else ("",) * others, frozenset(before))
    finally:
        for hook in hooks:
            hook.remove()
    raise UserError(f"{type(model).__name__}: its decoder does not run its first block, so that it cannot be cut")


@torch.no_grad()
def _check_chain(small: nn.Module, outline: Outline, device: torch.device, varlen: bool) -> None:
    """Compare the hidden states of a model and of its blocks as one stage each, [1, _NUM_TOKENS, D]."""
    vocab_size = small.config.get_text_config().vocab_size
    ids = (torch.arange(_NUM_TOKENS, device=device) * 7 % vocab_size)[None]
    bounds = torch.tensor([0, _NUM_TOKENS // 2, _NUM_TOKENS], dtype=torch.int32, device=device) if varlen else None
    batch = Batch(ids, ids, bounds)
    num_stages = len(find_blocks(small))
    plan = PipelinePlan(num_stages, [range(each, each + 1) for each in range(num_stages)], list(range(num_stages)))
    small.eval()  # without dropout
    if has_tied_ends(small):  # or the last stage would have an embedding to make up for what it is not handed
        head = small.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
    whole = stage_states(small, ids, batch, is_first=True)
    states = ids
    try:
        for stage in range(num_stages):
            states = stage_states(cut_stage(small, plan, stage, outline), states, batch, is_first=stage == 0)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{PIPELINE_DEGREE}: {type(small).__name__} does not run in stages: {error}") from error
    if states.shape != whole.shape or differ(states, whole):
        raise UserError(
            f"{PIPELINE_DEGREE}: {type(small).__name__} computes something else in stages than whole: its blocks "
            "hand on more than hidden states, or depend on each other"
        )
