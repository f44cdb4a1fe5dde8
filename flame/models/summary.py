"""What a model consists of and what it costs: parameters by part, FLOPs, states and memory, without building it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from flame.models.blocks import find_blocks
from flame.models.flops import TRAINING_FACTOR, FlopCounter, num_parameters
from flame.models.mixers import MixerFlops, named_mixers

PARTS = ("embedding", "mixers", "mlp", "norms", "head", "other")

# Bytes for each parameter while training with AdamW: float32 master weights, gradients and two moments, divided by the
# number of devices that FSDP shards over, and a bfloat16 copy of the blocks that are gathered at a time.
BYTES_PER_PARAMETER = {"weights": 4, "gradients": 4, "optimizer": 8, "compute_copy": 2}
_STATE_BYTES, _CACHE_BYTES, _ACTIVATION_BYTES = 4, 2, 2  # states are float32, keys, values and activations bfloat16


@dataclass(frozen=True)
class MixerKind:
    """Mixers that are alike.

    Attributes:
        name: their class.
        count: how many the model has.
        parameters: of each one.
        state, cache, window, formula, source: see :class:`flame.models.mixers.MixerFlops`.
    """

    name: str
    count: int
    parameters: int
    state: int
    cache: int
    window: int | None
    formula: str
    source: str


@dataclass(frozen=True)
class AtLength:
    """What depends on the document length.

    Attributes:
        length: tokens.
        linear_flops: training FLOPs per token of linear layers and convolutions.
        mixer_flops: training FLOPs per token of the mixers.
        decode_bytes: states and cached keys and values of one sequence of this length, in bytes.
    """

    length: int
    linear_flops: float
    mixer_flops: float
    decode_bytes: int


@dataclass(frozen=True)
class Summary:
    """A model on paper.

    Attributes:
        model_type, architecture: the family, and the class that is built.
        hidden_size: width of the residual stream.
        blocks: class of block -> how many.
        parts: parameters by part, see ``PARTS``; a head that is tied to the embedding has none of its own.
        total, without_embedding: parameters.
        mixers: kinds of mixers.
        uncounted: classes of blocks whose mixers have no formula: their FLOPs and states are missing below.
        lengths: FLOPs and states at each length.
        state_bytes: of one sequence, whatever its length; convolution states included.
        cache_bytes: of each token (within a layer's window, if it has one).
        block_input_bytes: bytes per token of the inputs of all blocks, which full activation checkpointing keeps.
        linear_input_bytes: bytes per token of the distinct inputs of linear layers, which their backward needs.
        training_bytes: weights, gradients and AdamW's moments of all parameters, before sharding.
    """

    model_type: str
    architecture: str
    hidden_size: int
    blocks: dict[str, int]
    parts: dict[str, int]
    total: int
    without_embedding: int
    mixers: list[MixerKind]
    uncounted: list[str]
    lengths: list[AtLength]
    state_bytes: int
    cache_bytes: int
    block_input_bytes: int
    linear_input_bytes: int
    training_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self) | {"bytes_per_parameter": BYTES_PER_PARAMETER}


def summarise(model: nn.Module, lengths: Iterable[int]) -> Summary:
    """Describe ``model``, which may be on the meta device, at document lengths in tokens."""
    config = model.config.get_text_config()
    blocks = [block for _, block in find_blocks(model)]
    mixers = list(named_mixers(model))
    counter = FlopCounter(model)
    state = _STATE_BYTES * sum(flops.state for _, _, flops in mixers) + _CACHE_BYTES * _convolution_state(mixers)
    total = num_parameters(model)
    return Summary(
        model_type=model.config.model_type,
        architecture=type(model).__name__,
        hidden_size=config.hidden_size,
        blocks=dict(Counter(type(block).__name__ for block in blocks)),
        parts=parameters_by_part(model),
        total=total,
        without_embedding=num_parameters(model, embeddings=False),
        mixers=_kinds(mixers),
        uncounted=counter.uncounted,
        lengths=[_at_length(counter, state, length) for length in lengths],
        state_bytes=state,
        cache_bytes=_CACHE_BYTES * sum(flops.cache for _, _, flops in mixers),
        block_input_bytes=_ACTIVATION_BYTES * config.hidden_size * len(blocks),
        linear_input_bytes=_ACTIVATION_BYTES * sum(_linear_inputs(block) for block in blocks),
        training_bytes=total * sum(BYTES_PER_PARAMETER[key] for key in ("weights", "gradients", "optimizer")),
    )


def parameters_by_part(model: nn.Module) -> dict[str, int]:
    """Parameters of each of ``PARTS``; one that serves as two (a tied head) belongs to the first."""
    parts = dict.fromkeys(PARTS, 0)
    mixers = [name for name, _, _ in named_mixers(model)]
    blocks = [name for name, _ in find_blocks(model)]
    head = model.get_output_embeddings()
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                parts[_part_of(module_name, module, head, mixers, blocks)] += parameter.numel()
    return parts


def _part_of(name: str, module: nn.Module, head: nn.Module | None, mixers: list[str], blocks: list[str]) -> str:
    if isinstance(module, nn.Embedding):
        return "embedding"
    if module is head:
        return "head"
    if "Norm" in type(module).__name__:
        return "norms"
    if _lies_in(name, mixers):
        return "mixers"
    return "mlp" if _lies_in(name, blocks) else "other"


def _lies_in(name: str, parents: list[str]) -> bool:
    return any(f"{name}.".startswith(f"{parent}.") for parent in parents)


def _kinds(mixers: list[tuple[str, nn.Module, MixerFlops]]) -> list[MixerKind]:
    kinds: Counter[MixerKind] = Counter()
    for _, module, flops in mixers:
        parameters = sum(parameter.numel() for parameter in module.parameters())
        shown = (flops.state, flops.cache, flops.window, flops.formula, flops.source)
        kinds[MixerKind(type(module).__name__, 0, parameters, *shown)] += 1
    return [MixerKind(**asdict(kind) | {"count": count}) for kind, count in kinds.items()]


def _at_length(counter: FlopCounter, state_bytes: int, length: int) -> AtLength:
    linear = TRAINING_FACTOR * counter.linear
    total = counter.training(torch.tensor([length])) / length
    cached = sum(flops.kept(length) - flops.state for flops in counter.mixers)
    return AtLength(length, linear, total - linear, state_bytes + _CACHE_BYTES * cached)


def _convolution_state(mixers: list[tuple[str, nn.Module, MixerFlops]]) -> int:
    """Numbers that the short convolutions of all mixers keep: the last inputs of each channel."""
    convolutions = [each for _, mixer, _ in mixers for each in mixer.modules() if isinstance(each, nn.Conv1d)]
    return sum(each.out_channels * each.kernel_size[0] for each in convolutions)


def _linear_inputs(block: nn.Module) -> int:
    """Widths of the inputs of a block's linear layers; layers of one width in one module are taken to share theirs."""
    widths = 0
    for module in block.modules():
        widths += sum({child.in_features for child in module.children() if isinstance(child, nn.Linear)})
    return widths
