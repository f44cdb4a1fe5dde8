"""A model cut into the stages of a pipeline: what each holds, and what it computes.

A stage is the whole model less what other stages hold, so that every parameter keeps its name. Hidden states travel
between stages; token ids, labels and document bounds do not: every rank of a pipeline has the same batches and looks up
the micro-batch whose number it is given. (torch would cut a list of document bounds along its only dimension, without
an error.)
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flame.data.batch import Batch
from flame.errors import UserError
from flame.fqn import STAGE
from flame.models.blocks import SkippedBlock, find_blocks, keep_blocks
from flame.models.loss import HeadLoss, check_loss_support, head_options, is_of_fla, packing_arguments
from flame.models.native_attention import has_native_attention, without_mask
from flame.parallel.context import ContextParallel, Row
from flame.parallel.degrees import PIPELINE_DEGREE
from flame.parallel.pipeline_plan import PipelinePlan
from flame.parallel.stage_modules import Entry, Exit, NoTerm, Received
from flame.parallel.stage_outline import LOWER_BOUNDS, Outline


def check_stages(model: nn.Module, plan: PipelinePlan) -> None:
    """Refuse models whose stages would have to share more than the embedding.

    Raises:
        UserError: weights that blocks of several stages share, or that all blocks do, which takes one stage a rank.
    """
    check_loss_support(model)
    degree, blocks = f"{PIPELINE_DEGREE} = {plan.num_ranks}", [name for name, _ in find_blocks(model)]
    if has_tied_ends(model) and plan.owners[0] == plan.owners[-1]:
        raise UserError(
            f"{degree}: this schedule has the first and the last stage on one rank, which needs "
            "untied embeddings (tie_word_embeddings false in the model's config)"
        )
    if hasattr(model.get_decoder(), LOWER_BOUNDS) and len(plan.stages) > plan.num_ranks:
        raise UserError(
            f"{degree}: {LOWER_BOUNDS} belongs to all blocks, which takes a schedule with one stage on a rank "
            "(1F1B, GPipe)"
        )
    stage_of = {blocks[number]: stage for stage, numbers in enumerate(plan.stages) for number in numbers}
    holders: dict[int, dict[str, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = next((each for each in blocks if name.startswith(f"{each}.")), None)
        holders.setdefault(id(parameter), {})[name] = -1 if block is None else stage_of[block]
    for stages in holders.values():
        if len(set(stages.values())) > 1:
            raise UserError(f"{degree}: {' and '.join(stages)} are one weight, which stages cannot share")


def cut_stage(model: nn.Module, plan: PipelinePlan, stage: int, outline: Outline) -> nn.Module:
    """A copy of a model with one stage's blocks; the ends go with the first and the last.

    Tied embeddings stay with both ends.

    Raises:
        UserError: the decoder holds something that is known to run neither before its blocks nor after.
    """
    part, numbers = copy.deepcopy(model), plan.stages[stage]
    lists = {name.rpartition(".")[0] for name, _ in find_blocks(part)}
    is_first, is_last = plan.is_first(stage), plan.is_last(stage)
    keep_blocks(part, numbers, _stand_ins(model, numbers, outline) if outline.has_places else None)
    decoder, embedding, head = part.get_decoder(), part.get_input_embeddings(), part.get_output_embeddings()
    is_tied = has_tied_ends(part)
    names = {id(module): name for name, module in part.named_modules()}
    for name, child in list(decoder.named_children()):
        if child is embedding or names[id(child)] in lists or next(child.parameters(), None) is None:
            continue
        runs_before = name in outline.before if outline.before is not None else False
        if outline.before is None and "Norm" not in type(child).__name__:
            raise UserError(
                f"{PIPELINE_DEGREE} = {plan.num_ranks}: {names[id(child)]} ({type(child).__name__}) has no place in a "
                "stage"
            )
        if not (is_first if runs_before else is_last):
            setattr(decoder, name, NoTerm() if isinstance(child, nn.Embedding) else nn.Identity())
    own = [name for name, _ in decoder.named_parameters(recurse=False) if name != LOWER_BOUNDS]
    if own:
        raise UserError(
            f"{PIPELINE_DEGREE} = {plan.num_ranks}: {', '.join(own)} belongs to all blocks and has no place in a stage"
        )
    if not is_first and not (is_tied and is_last):
        _replace(part, embedding, Received())
    if not is_last:
        _replace(part, head, nn.Identity())
    return part


def _stand_ins(model: nn.Module, numbers: range, outline: Outline) -> Callable[[int], SkippedBlock]:
    """What takes the places of the blocks around a stage: hidden states enter just before it, and leave just after."""
    carried, hidden_size = outline.carried, model.config.get_text_config().hidden_size

    def stand_in(number: int) -> SkippedBlock:
        if number == numbers.start - 1:
            return Entry(outline.returns, carried.name if carried else "", hidden_size)
        if number == numbers.stop and carried:
            return Exit(outline.returns, carried.name)
        return SkippedBlock(outline.returns)

    return stand_in


def _replace(part: nn.Module, module: nn.Module, by: nn.Module) -> None:
    name = next(name for name, each in part.named_modules() if each is module)
    parent_name, _, attribute = name.rpartition(".")
    setattr(part.get_submodule(parent_name), attribute, by)


def has_tied_ends(model: nn.Module) -> bool:
    """Whether embedding and output projection are one parameter."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


class Stages(nn.Module):
    """This rank's stages of a pipeline; ``flame.fqn.clean_fqn`` gives their parameters the names of the whole model."""

    def __init__(self, parts: dict[int, nn.Module]):
        super().__init__()
        for stage, part in parts.items():
            self.add_module(STAGE.format(stage), part)


@dataclass
class Microbatches:
    """The micro-batches of the current step, on the device, and the factor of their losses.

    Where ranks share rows, they are this rank's pieces, and the row of the one that was taken last is in hand.
    """

    context: ContextParallel | None = None
    batches: list[Batch] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    factor: Tensor | float = 1.0

    def fill(self, batches: list[Batch], device: torch.device) -> None:
        """Bring a step's micro-batches to the device."""
        if self.context is None:
            self.batches = [batch.to(device) for batch in batches]
        else:
            pieces = [self.context.cut(batch, device) for batch in batches]
            self.rows, self.batches = map(list, zip(*pieces, strict=True))

    def take(self, number: int) -> Batch:
        """The micro-batch of that number, to be computed forward or backward."""
        if self.context is not None:
            self.context.row = self.rows[number]
        return self.batches[number]


def attach_stage_forward(
    part: nn.Module, is_first: bool, microbatches: Microbatches, dtype: torch.dtype, loss: HeadLoss | None
) -> None:
    """Make ``part(x, number)`` compute a stage for micro-batch ``number``.

    ``x`` is what the stage before gave, [B, T, D] (of the first stage token ids, int64 [B, T]).

    Args:
        microbatches: those of the step; ``number`` counts among them.
        dtype: of the hidden states that a stage hands on: what FSDP would cast the next block's inputs to.
        loss: of the last stage, which gives the sum of the token losses, float32 [1]; None of the others.
    """

    def forward(self: nn.Module, x: Tensor, number: Tensor) -> Tensor:
        batch = microbatches.take(int(number))
        hidden_states = stage_states(self, x, batch, is_first)
        if loss is None:
            return hidden_states.to(dtype)
        total = loss(hidden_states, self.get_output_embeddings(), batch.labels, head_options(self))
        return torch.stack([total])  # no view: FSDP hangs a hook on it

    part.forward = types.MethodType(forward, part)


def stage_states(part: nn.Module, x: Tensor, batch: Batch, is_first: bool) -> Tensor:
    """The hidden states that leave a stage."""
    packing = packing_arguments(part, batch.input_ids, batch.cu_seqlens)
    takes_states = is_of_fla(part) and not is_first
    inputs = {"inputs_embeds": x} if takes_states else {"input_ids": batch.input_ids}
    entrances = [] if is_first else [each for each in part.modules() if isinstance(each, (Received, Entry))]
    for entrance in entrances:
        entrance.hidden_states = x
    with without_mask(not is_of_fla(part) and has_native_attention(part) and batch.cu_seqlens is not None):
        hidden_states = part.get_decoder()(**inputs, use_cache=False, return_dict=False, **packing)[0]
    for entrance in entrances:
        del entrance.hidden_states
    return hidden_states
