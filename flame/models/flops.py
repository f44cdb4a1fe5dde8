"""Training FLOPs, counted from a model's layers and the real lengths of its documents.

Convention (that of PaLM, Chowdhery et al. 2022, appendix B, which torchtitan follows too): a multiply-add is two FLOPs,
the backward pass costs twice the forward, recomputation is not counted, and neither is anything element-wise (norms,
activations, gates, decays, the optimizer). Unlike there, embedding look-ups are free, attention is causal and stops
at document borders, and each recurrent layer is counted by its own recurrence, linear in the length. What a chunked
kernel computes beyond the recurrence is no useful work, just as masked pairs are not in attention.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from flame.models.blocks import find_blocks
from flame.models.build import no_decay_names
from flame.models.mixers import MixerFlops, find_mixers, first_attribute, num_experts

logger = logging.getLogger(__name__)

TRAINING_FACTOR = 3  # forward, and twice as much backward


@dataclass
class FlopCounter:
    """FLOPs of training a given model.

    Attributes:
        linear: forward FLOPs per token of linear layers and convolutions.
        mixers: one for every token mixer of the model.
        uncounted: classes of the blocks in which no known mixer was found; their recurrence or attention is missing.
    """

    model: nn.Module
    linear: float = field(init=False)
    mixers: list[MixerFlops] = field(init=False)
    uncounted: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.linear = linear_flops(self.model)
        self.mixers = find_mixers(self.model)
        blocks = [block for _, block in find_blocks(self.model)]
        missing = {type(block).__name__ for block in blocks if not find_mixers(block)}
        self._distinct = Counter(self.mixers)  # layers are alike, and this is asked for at every step
        self.uncounted = sorted(missing)
        if missing:
            logger.warning("FLOPs: only the linear layers of %s are counted", ", ".join(self.uncounted))

    def forward(self, lengths: torch.Tensor) -> float:
        """Forward FLOPs of documents with these lengths (tokens), int [N]."""
        lengths = lengths.long()
        total = float(lengths.sum()) * self.linear
        for mixer, count in self._distinct.items():
            total += count * mixer.forward(lengths)
        return total

    def training(self, lengths: torch.Tensor) -> float:
        """Training FLOPs (forward and backward) of documents with these lengths (tokens), int [N]."""
        return TRAINING_FACTOR * self.forward(lengths)

    def step(self, batches: Iterable[Any]) -> float:
        """Training FLOPs of a rank's batches of one step (:class:`flame.data.batch.Batch`, on the CPU)."""
        return sum(self.training(document_lengths(batch.input_ids, batch.cu_seqlens)) for batch in batches)


def flops_per_token(model: nn.Module, seq_len: int) -> float:
    """Training FLOPs per token on documents of ``seq_len`` tokens."""
    return FlopCounter(model).training(torch.tensor([seq_len])) / seq_len


def num_parameters(model: nn.Module, embeddings: bool = True) -> int:
    """Parameters of the whole model, tied and sharded ones counted once and in full.

    Args:
        embeddings: count input embeddings too; an output projection that is tied to them counts as an embedding.
    """
    parameters = {id(parameter): parameter.numel() for parameter in model.parameters()}
    if not embeddings:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                parameters.pop(id(module.weight), None)
    return sum(parameters.values())


def document_lengths(input_ids: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Lengths of the documents in a batch [rows, T]; without ``cu_seqlens`` each row is one document."""
    if cu_seqlens is not None:
        return cu_seqlens.diff()
    num_rows, seq_len = input_ids.shape
    return torch.full((num_rows,), seq_len)


def linear_flops(model: nn.Module) -> float:
    """Forward FLOPs per token of everything that multiplies a token by a weight: 2 per weight.

    Linear layers, convolutions (stride 1) and matrices kept as bare parameters count; an output projection counts
    even when it is tied to the embedding; embeddings, norms, biases and vectors do not. Of routed experts the share
    that a token passes through counts.
    """
    excluded = no_decay_names(model)
    total = 0.0
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{module_name}.{name}" if module_name else name
            if parameter.ndim >= 2 and full_name not in excluded:
                total += 2 * parameter.numel() * _expert_share(model, full_name)
    return total


def _expert_share(model: nn.Module, name: str) -> float:
    """Share of an expert's parameters that one token uses: active experts ÷ routed experts."""
    if "experts" not in name.split("."):
        return 1.0
    config = model.config.get_text_config()
    num_routed, num_active = num_experts(config), first_attribute(config, "num_experts_per_tok", "top_k")
    return num_active / num_routed if num_routed and num_active else 1.0
