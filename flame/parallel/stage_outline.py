"""What a decoder does with its blocks and around them, as far as cutting it into stages needs to know."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from flame.errors import UserError
from flame.models.blocks import find_blocks
from flame.parallel.degrees import PIPELINE_DEGREE

# What FLA's blocks may be given besides hidden states: a stage makes it itself, from the micro-batch or not at all.
_OWN_ARGUMENTS = {
    "self", "hidden_states", "attention_mask", "past_key_values", "use_cache", "output_attentions", "cu_seqlens",
    "lower_bound", "attnres_states", "kwargs",
}  # fmt: skip
# A parameter of all blocks of HGRN and HGRN-2, from which they compute the lower bound of each one's forget gates.
LOWER_BOUNDS = "lower_bounds"


@dataclass(frozen=True)
class Carried:
    """What a family's blocks hand on besides hidden states.

    Attributes:
        name: the argument, and the last that a block returns.
        width: of its last dimension, by a block.
    """

    name: str
    width: Callable[[nn.Module], int]


_CARRIED = {"rwkv7": Carried("v_first", lambda block: block.attn.value_dim)}


@dataclass(frozen=True)
class Outline:
    """What a decoder does with its blocks, and around them.

    Attributes:
        returns: names of what a block returns in a tuple after the hidden states; None for no tuple.
        before: names of the decoder's own modules that run before its blocks, None for embeddings only.
        has_places: the decoder looks up what belongs to block i, so that left-out blocks need a stand-in.
        carried: what blocks hand on besides hidden states.
    """

    returns: tuple[str, ...] | None = None
    before: frozenset[str] | None = None
    has_places: bool = True
    carried: Carried | None = None

    def width(self, model: nn.Module) -> int:
        """The last dimension of what stages hand on."""
        hidden_size = model.config.get_text_config().hidden_size
        return hidden_size + (self.carried.width(find_blocks(model)[0][1]) if self.carried else 0)


def outline_of_fla(model: nn.Module, degree: int) -> Outline:
    """The outline of a model of flash-linear-attention.

    Raises:
        UserError: names what its blocks hand on that a pipeline does not.
    """
    if getattr(model.config, "attnres_block_size", None) is not None:
        raise UserError(
            f"{PIPELINE_DEGREE} = {degree}: attention residuals (attnres_block_size in the model's config) take the "
            "states of all blocks before; a pipeline hands on those of one"
        )
    carried = _CARRIED.get(model.config.model_type)
    for name, block in find_blocks(model):
        others = set(inspect.signature(type(block).forward).parameters) - _OWN_ARGUMENTS
        others -= {carried.name} if carried else set()
        if others:
            raise UserError(
                f"{PIPELINE_DEGREE} = {degree}: {name} ({type(block).__name__}) is given {', '.join(sorted(others))} "
                "by the blocks before; a pipeline hands on hidden states only"
            )
    if carried:
        return Outline(("attentions", "past_key_values", carried.name), carried=carried)
    if hasattr(model.get_decoder(), LOWER_BOUNDS):
        return Outline(("attentions", "past_key_values", "attnres_states"))
    return Outline(has_places=False)
