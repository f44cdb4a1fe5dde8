"""Training FLOPs, counted from a model's layers and the real lengths of its documents.

Convention (that of PaLM, Chowdhery et al. 2022, appendix B, which torchtitan follows too): a multiply-add is two FLOPs,
the backward pass costs twice the forward, recomputation is not counted, and neither is anything element-wise (norms,
activations, gates, decays, the optimizer). Unlike there, embedding look-ups are free, attention is causal and stops
at document borders, and each recurrent layer is counted by its own recurrence, linear in the length. What a chunked
kernel computes beyond the recurrence is no useful work, just as masked pairs are not in attention.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from flame.models.blocks import find_blocks
from flame.models.build import no_decay_names

logger = logging.getLogger(__name__)

_TRAINING_FACTOR = 3  # forward, and twice as much backward


@dataclass(frozen=True)
class MixerFlops:
    """Forward FLOPs of a token mixer apart from its projections and convolutions.

    Attributes:
        per_token: FLOPs for every token, whatever the length.
        per_pair: FLOPs for every (query, key) pair with key ≤ query in one document.
        window: keys that a query sees at most, itself included; None is all.
    """

    per_token: float = 0.0
    per_pair: float = 0.0
    window: int | None = None


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
        self.mixers, missing = [], set()
        for _, block in find_blocks(self.model):
            found = [flops for flops in map(mixer_flops, block.modules()) if flops is not None]
            self.mixers += found
            if not found:
                missing.add(type(block).__name__)
        self.uncounted = sorted(missing)
        if missing:
            logger.warning("FLOPs: only the linear layers of %s are counted", ", ".join(self.uncounted))

    def forward(self, lengths: torch.Tensor) -> float:
        """Forward FLOPs of documents with these lengths (tokens), int [N]."""
        lengths = lengths.long()
        total = float(lengths.sum()) * (self.linear + sum(mixer.per_token for mixer in self.mixers))
        pairs: dict[int | None, float] = {}
        for mixer in self.mixers:
            if mixer.per_pair:
                if mixer.window not in pairs:
                    pairs[mixer.window] = causal_pairs(lengths, mixer.window)
                total += mixer.per_pair * pairs[mixer.window]
        return total

    def training(self, lengths: torch.Tensor) -> float:
        """Training FLOPs (forward and backward) of documents with these lengths (tokens), int [N]."""
        return _TRAINING_FACTOR * self.forward(lengths)

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


def causal_pairs(lengths: torch.Tensor, window: int | None = None) -> float:
    """Number of (query, key) pairs with key ≤ query inside each document, at most ``window`` keys to a query."""
    head = lengths if window is None else lengths.clamp(max=window)
    pairs = head * (head + 1) // 2
    if window is not None:
        pairs = pairs + (lengths - head) * window
    return float(pairs.sum())


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
    num_experts = _first_attribute(config, "num_local_experts", "num_experts", "n_routed_experts")
    num_active = _first_attribute(config, "num_experts_per_tok", "top_k")
    return num_active / num_experts if num_experts and num_active else 1.0


def mixer_flops(module: nn.Module) -> MixerFlops | None:
    """FLOPs of ``module`` when it, or a class that it derives from, is a known token mixer, else None.

    A mixer may say so itself, by a method ``mixer_flops()`` that returns a :class:`MixerFlops` or a dict with its keys,
    so that a custom model needs nothing from here.
    """
    if callable(declare := getattr(module, "mixer_flops", None)):
        declared = declare()
        return declared if isinstance(declared, MixerFlops) else MixerFlops(**declared)
    for cls in type(module).__mro__:
        if cls.__name__ in _FORMULAS:
            return _FORMULAS[cls.__name__](module)
    if type(module).__name__.endswith("Attention") and hasattr(module, "config"):
        return _transformers_attention(module)
    return None


def _softmax_attention(module: nn.Module) -> MixerFlops:
    """q·k and p·v for each pair: 2 H (d_qk + d_v) (Vaswani et al. 2017, eq. 1)."""
    head_dim = module.head_dim
    return MixerFlops(per_pair=4 * module.num_heads * head_dim, window=getattr(module, "window_size", None))


def _latent_attention(module: nn.Module) -> MixerFlops:
    """As softmax attention, with d_qk ≠ d_v (DeepSeek-AI 2024, DeepSeek-V2, section 2.1)."""
    per_pair = 2 * module.num_heads * (module.qk_head_dim + module.v_head_dim)
    return MixerFlops(per_pair=per_pair, window=getattr(module, "window_size", None))


def _transformers_attention(module: nn.Module) -> MixerFlops | None:
    """Softmax attention of a Hugging Face model, which keeps the number of heads in its config."""
    num_heads = getattr(module.config.get_text_config(), "num_attention_heads", None)
    key_dim = _first_attribute(module, "qk_head_dim", "head_dim", "head_size")
    value_dim = _first_attribute(module, "v_head_dim", "head_dim", "head_size")
    if num_heads is None or key_dim is None or value_dim is None:
        return None
    return MixerFlops(per_pair=2 * num_heads * (key_dim + value_dim), window=getattr(module, "sliding_window", None))


def _matrix_state(num_products: int | Callable[[nn.Module], int]) -> Callable[[nn.Module], MixerFlops]:
    """A recurrence on a d_k × d_v state per head that touches the state in ``num_products`` products a token."""

    def formula(module: nn.Module) -> MixerFlops:
        products = num_products(module) if callable(num_products) else num_products
        num_heads = _first_attribute(module, "num_v_heads", "num_heads")
        key_dim = _first_attribute(module, "head_k_dim", "head_f_dim", "head_dim")
        value_dim = _first_attribute(module, "head_v_dim", "head_i_dim", "head_dim")
        return MixerFlops(per_token=2 * products * num_heads * key_dim * value_dim)

    return formula


def _slot_attention(module: nn.Module) -> MixerFlops:
    """Two linear recurrences, over keys and over values, on m slots (Zhang et al. 2024, Gated Slot Attention)."""
    dims = module.head_k_dim + module.head_v_dim
    return MixerFlops(per_token=2 * 2 * module.num_heads * module.num_slots * dims)


def _state_space(module: nn.Module) -> MixerFlops:
    """Input product and read-out of a d_inner × N state (Gu & Dao 2023, Mamba; Dao & Gu 2024, Mamba-2)."""
    return MixerFlops(per_token=2 * 2 * module.intermediate_size * module.ssm_state_size)


def _elementwise_recurrence(module: nn.Module) -> MixerFlops:
    """A vector state: nothing but element-wise work (Qin et al. 2023, HGRN)."""
    return MixerFlops()


# Mixer classes, FLA's first. Products with the state S in a token's step:
# two, S += k⊗v and q·S (linear attention, Katharopoulos et al. 2020, eq. 18–20; GLA, Yang et al. 2023);
# three with k·S of the delta rule (DeltaNet, Yang et al. 2024; Gated DeltaNet, Yang et al. 2024, eq. 10).
_FORMULAS: dict[str, Callable[[nn.Module], MixerFlops]] = {
    "Attention": _softmax_attention,
    "BitAttention": _softmax_attention,
    "ForgettingAttention": _softmax_attention,
    "StickBreakingAttention": _softmax_attention,
    "MultiheadLatentAttention": _latent_attention,
    "LinearAttention": _matrix_state(2),
    "GatedLinearAttention": _matrix_state(2),
    "MultiScaleRetention": _matrix_state(2),
    "HGRN2Attention": _matrix_state(2),
    "LightNetAttention": _matrix_state(2),
    "RWKV6Attention": _matrix_state(2),
    "DeltaNet": _matrix_state(3),
    "GatedDeltaNet": _matrix_state(3),
    "KimiDeltaAttention": _matrix_state(3),
    "Comba": _matrix_state(3),
    # S·a, (S·a)⊗b, v⊗k and the read-out (Peng et al. 2025, RWKV-7).
    "RWKV7Attention": _matrix_state(4),
    # Each of n Householder steps reads and updates the state (Siems et al. 2025, DeltaProduct).
    "GatedDeltaProduct": _matrix_state(lambda module: 2 * module.num_householder + 1),
    "GatedSlotAttention": _slot_attention,
    "ABCAttention": _slot_attention,
    "Mamba": _state_space,
    "Mamba2": _state_space,
    "HGRNAttention": _elementwise_recurrence,
    # The same in transformers.
    "MambaMixer": _state_space,
    "Mamba2Mixer": _state_space,
    "Qwen3NextGatedDeltaNet": _matrix_state(3),
}


def _first_attribute(holder: Any, *names: str) -> Any:
    """The first of these attributes that is there and not None."""
    return next((value for name in names if (value := getattr(holder, name, None)) is not None), None)
