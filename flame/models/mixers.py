"""What a token mixer computes and keeps beside its projections: one formula a family, with its source.

A module that no formula here knows, such as one of your own, declares itself with a method ``mixer_flops()`` that
returns a :class:`MixerFlops` or a mapping of its fields; :func:`mixer_flops` asks for that first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from flame.errors import UserError
from flame.models.pairs import causal_pairs, earlier_blocks, ones_in_binary, own_block_pairs


@dataclass(frozen=True)
class MixerFlops:
    """Forward FLOPs of a token mixer apart from its projections and convolutions, and what it keeps when it decodes.

    Attributes:
        per_token: FLOPs for every token, whatever the length.
        per_pair: FLOPs for every (query, key) pair with key ≤ query in one document.
        window: keys that a query sees at most, itself included; None is all.
        by_length: FLOPs that follow neither: from document lengths (tokens, int [N]) to the FLOPs of all documents.
        state: numbers kept for a sequence, whatever its length.
        cache: numbers kept for every token of a sequence (of its last ``window`` tokens).
        formula: the count in words.
        source: where it is from.
    """

    per_token: float = 0.0
    per_pair: float = 0.0
    window: int | None = None
    by_length: Callable[[torch.Tensor], float] | None = None
    state: int = 0
    cache: int = 0
    formula: str = "declared by the module"
    source: str = ""

    def forward(self, lengths: torch.Tensor) -> float:
        """Forward FLOPs of documents with these lengths (tokens), int [N]."""
        total = self.per_token * float(lengths.sum())
        if self.per_pair:
            total += self.per_pair * causal_pairs(lengths, self.window)
        return total if self.by_length is None else total + self.by_length(lengths)

    @property
    def is_attention(self) -> bool:
        """Whether all it computes is between pairs of tokens, and it keeps no state."""
        return self.per_pair > 0 and not self.per_token and self.by_length is None and not self.state

    def kept(self, length: int) -> int:
        """Numbers kept after ``length`` tokens of one sequence."""
        return self.state + self.cache * (length if self.window is None else min(length, self.window))


def mixer_flops(module: nn.Module) -> MixerFlops | None:
    """FLOPs of ``module`` when it declares them, or it or a class that it derives from has a formula; else None.

    Raises:
        UserError: what the module declares is neither a ``MixerFlops`` nor a mapping of its fields.
    """
    if callable(getattr(module, "mixer_flops", None)):
        return _declared(module)
    for cls in type(module).__mro__:
        if cls.__name__ in _FORMULAS:
            formula = _FORMULAS[cls.__name__]
            return replace(formula.count(module), formula=formula.text, source=formula.source)
    if type(module).__name__.endswith("Attention") and hasattr(module, "config"):
        return _transformers_attention(module)
    return None


def named_mixers(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module, MixerFlops]]:
    """The mixers in ``module``, itself included, as (name, mixer, FLOPs); what lies inside a mixer belongs to it."""
    own = mixer_flops(module)
    if own is not None:
        yield name, module, own
        return
    for key, child in module.named_children():
        yield from named_mixers(child, f"{name}.{key}" if name else key)


def find_mixers(module: nn.Module) -> list[MixerFlops]:
    """As :func:`named_mixers`, the FLOPs alone."""
    return [flops for _, _, flops in named_mixers(module)]


def _declared(module: nn.Module) -> MixerFlops:
    declared = module.mixer_flops()
    if isinstance(declared, Mapping):
        try:
            declared = MixerFlops(**declared)
        except TypeError as fault:
            raise UserError(f"{type(module).__name__}.mixer_flops(): {fault}") from fault
    if not isinstance(declared, MixerFlops):
        raise UserError(
            f"{type(module).__name__}.mixer_flops() returns a {type(declared).__name__}; "
            "it must be a flame.models.mixers.MixerFlops or a mapping of its fields"
        )
    return declared if declared.source else replace(declared, source=f"{type(module).__name__}.mixer_flops")


def _softmax_attention(module: nn.Module, products: int = 2) -> MixerFlops:
    """``products`` products of a head's vectors with each key or value that a query sees; keys and values are kept."""
    num_kv_heads = first_attribute(module, "num_kv_heads", "num_heads")
    return MixerFlops(
        per_pair=2 * products * module.num_heads * module.head_dim,
        window=first_attribute(module, "window_size"),
        cache=2 * num_kv_heads * module.head_dim,
    )


def _cross_attention(module: nn.Module) -> MixerFlops:
    return replace(_softmax_attention(module), cache=0)  # the keys and values belong to the module that makes them


def _shared_keys_and_values(module: nn.Module) -> MixerFlops:
    return MixerFlops(cache=2 * module.num_kv_heads * module.head_dim)


def _shared_key_attention(module: nn.Module) -> MixerFlops:
    # One key for all heads.
    cache = (module.num_heads + 1) * module.head_dim
    return MixerFlops(per_pair=4 * module.num_heads * module.head_dim, window=module.window_size, cache=cache)


def _wall_attention(module: nn.Module) -> MixerFlops:
    # Rescaled keys and summed gates of every query head, and the values.
    cache = (2 * module.num_heads + module.num_kv_heads) * module.head_dim
    return replace(_softmax_attention(module), cache=cache)


def _latent_attention(module: nn.Module) -> MixerFlops:
    dims = module.num_heads * (module.qk_head_dim + module.v_head_dim)
    # FLA keeps the keys and values of every head, not the latent vector.
    return MixerFlops(per_pair=2 * dims, window=first_attribute(module, "window_size"), cache=dims)


def _transformers_attention(module: nn.Module) -> MixerFlops | None:
    """Softmax attention of a Hugging Face model, which keeps the number of heads in its config."""
    config = module.config.get_text_config()
    num_heads = getattr(config, "num_attention_heads", None)
    key_dim = first_attribute(module, "qk_head_dim", "head_dim", "head_size")
    value_dim = first_attribute(module, "v_head_dim", "head_dim", "head_size")
    if num_heads is None or key_dim is None or value_dim is None:
        return None
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    return MixerFlops(
        per_pair=2 * num_heads * (key_dim + value_dim),
        window=getattr(module, "sliding_window", None),
        cache=num_kv_heads * (key_dim + value_dim),
        formula=_SOFTMAX.text,
        source=_SOFTMAX.source,
    )


def _mixture_of_blocks(module: nn.Module) -> MixerFlops:
    width, block_size = module.num_heads * module.head_dim, module.moba_chunk_size

    def flops(lengths: torch.Tensor) -> float:
        selected = block_size * earlier_blocks(lengths, block_size, module.moba_topk - 1)
        pairs = own_block_pairs(lengths, block_size) + selected
        return 4 * width * pairs + 2 * width * earlier_blocks(lengths, block_size)

    return MixerFlops(by_length=flops, cache=2 * module.num_kv_heads * module.head_dim)


def _native_sparse_attention(module: nn.Module) -> MixerFlops:
    width, block_size = module.num_heads * module.head_dim, module.block_size

    def flops(lengths: torch.Tensor) -> float:
        compressed = earlier_blocks(lengths + 1, block_size)  # a query sees a block once the block is complete
        earlier = block_size * earlier_blocks(lengths, block_size, module.block_counts - 1)
        selected = own_block_pairs(lengths, block_size) + earlier
        recent = causal_pairs(lengths, module.window_size) if module.window_size else 0.0
        return 4 * width * (compressed + selected + recent)

    return MixerFlops(by_length=flops, cache=2 * module.num_kv_heads * module.head_dim)


def _matrix_state(module: nn.Module, products: int) -> MixerFlops:
    """A d_k × d_v state per head that a token meets in ``products`` products."""
    num_heads = first_attribute(module, "num_v_heads", "num_heads")
    key_dim = first_attribute(module, "head_k_dim", "head_f_dim", "head_dim")
    value_dim = first_attribute(module, "head_v_dim", "head_i_dim", "head_dim")
    state = num_heads * key_dim * value_dim
    return MixerFlops(per_token=2 * products * state, state=state)


def _delta_product(module: nn.Module) -> MixerFlops:
    return _matrix_state(module, 2 * module.num_householder + 1)


def _preconditioned_delta_rule(module: nn.Module) -> MixerFlops:
    mixer = _matrix_state(module, 3)
    # The preconditioner is a vector that changes element by element.
    return replace(mixer, state=mixer.state + module.num_v_heads * module.head_k_dim)


def _token_shifted(module: nn.Module, products: int) -> MixerFlops:
    mixer = _matrix_state(module, products)
    # The last token's activations, here and in the feed-forward layer.
    return replace(mixer, state=mixer.state + 2 * module.hidden_size)


def _slots(module: nn.Module) -> MixerFlops:
    state = module.num_heads * module.num_slots * (module.head_k_dim + module.head_v_dim)
    return MixerFlops(per_token=2 * 2 * state, state=state)


def _cyclic_flow(module: nn.Module) -> MixerFlops:
    # The table that reads the slots is used twice; as a parameter it is counted once.
    table = 2 * module.num_heads * module.num_readout_slots**2
    mixer = _slots(module)
    return replace(mixer, per_token=mixer.per_token + table)


def _state_space(module: nn.Module, rank: int = 1) -> MixerFlops:
    state = module.intermediate_size * module.ssm_state_size
    return MixerFlops(per_token=2 * 2 * state * rank, state=state)


def _mamba3(module: nn.Module) -> MixerFlops:
    return _state_space(module, module.mimo_rank)


def _log_linear_mamba2(module: nn.Module) -> MixerFlops:
    state = module.intermediate_size * module.ssm_state_size

    def flops(lengths: torch.Tensor) -> float:
        # Token t writes one state, and reads its own and one for each 1 in the binary digits of t.
        return 2 * state * (2 * float(lengths.sum()) + ones_in_binary(lengths))

    return MixerFlops(by_length=flops, state=state * module.num_lambda_dims)


def _mesa(module: nn.Module) -> MixerFlops:
    # Two writes, a start and the steps of the solver, and the read-out.
    mixer = _matrix_state(module, 2 + 1 + module.max_cg_step_training + 1)
    return replace(mixer, state=2 * mixer.state)


def _rodimus(module: nn.Module) -> MixerFlops:
    state = module.mem_size * module.d_inner
    return MixerFlops(per_token=2 * 2 * state, state=state)


def _mixture_of_memories(module: nn.Module) -> MixerFlops:
    shared = int(bool(module.shared_mem))
    num_visits = module.topk + shared
    memory = module.num_heads * module.head_dim * module.head_v_dim
    # As parameters every projection counts once; a token passes the query's at each visit, and those of topk memories.
    weights = (num_visits - 1) * module.q_proj.weight.numel()
    projections = ("shared_k", "shared_v", "shared_b", "shared_a")
    if module.single_kv_proj:
        weights += (num_visits - 1) * sum(getattr(module, name).weight.numel() for name in projections)
    else:
        lists = (module.k_proj, module.v_proj, module.b_proj, module.a_proj)
        weights -= (module.num_memories - module.topk) * sum(each[0].weight.numel() for each in lists)
    per_token = 2 * 3 * num_visits * memory + 2 * weights
    return MixerFlops(per_token=per_token, state=(module.num_memories + shared) * memory)


def _vector_state(module: nn.Module) -> MixerFlops:
    return MixerFlops(state=module.input_dim)


@dataclass(frozen=True)
class Formula:
    """How a class of mixers is counted, in words, and where that is from."""

    count: Callable[[nn.Module], MixerFlops]
    text: str
    source: str


def _attention_like(products: int) -> Callable[[nn.Module], MixerFlops]:
    return partial(_softmax_attention, products=products)


def _recurrent(products: int) -> Callable[[nn.Module], MixerFlops]:
    return partial(_matrix_state, products=products)


_SOFTMAX = Formula(
    _softmax_attention, "q·k and p·v for each pair: 4 H d", "Vaswani et al. 2017, Attention Is All You Need, eq. 1"
)
_TWO_PRODUCTS = "k⊗v into and q·S out of a d_k × d_v state: 4 H d_k d_v"
_DELTA = "k·S, k⊗u and q·S with a d_k × d_v state: 6 H d_k d_v"
_SLOTS = "two recurrences over m slots, of keys and of values: 4 H m (d_k + d_v)"
_SCAN = "B⊗x into and C·h out of a d_inner × N state: 4 d_inner N"

# By the name of the class, FLA's first, then those of transformers.
_FORMULAS: dict[str, Formula] = {
    "Attention": _SOFTMAX,
    "BitAttention": Formula(_softmax_attention, _SOFTMAX.text, "Wang et al. 2023, BitNet"),
    "ForgettingAttention": Formula(_softmax_attention, _SOFTMAX.text, "Lin et al. 2025, Forgetting Transformer"),
    "StickBreakingAttention": Formula(_softmax_attention, _SOFTMAX.text, "Tan et al. 2024, Stick-breaking Attention"),
    "MultiheadLatentAttention": Formula(
        _latent_attention, "q·k and p·v for each pair: 2 H (d_qk + d_v)", "DeepSeek-AI 2024, DeepSeek-V2, section 2.1"
    ),
    "WallAttention": Formula(_wall_attention, _SOFTMAX.text, "fla/ops/wall_attn/naive.py"),
    "SlidingWindowSharedKeyAttention": Formula(_shared_key_attention, _SOFTMAX.text, "He et al. 2025, Rodimus*"),
    "Parallax": Formula(
        _attention_like(4),
        "q·k, r·k and two sums over v for each pair: 8 H d",
        "arXiv 2605.29157, algorithm 1; fla/ops/parallax/naive.py",
    ),
    "DeltaFormerAttention": Formula(
        _attention_like(4),
        "k·k and p·u, then q·k and p·u for each pair: 8 H d",
        "Zhong et al. 2025, DeltaFormer; fla/ops/deltaformer/naive.py",
    ),
    "PaTHAttention": Formula(
        _attention_like(4),
        "a Householder step (w·k, then w) and q·k, p·v for each pair: 8 H d",
        "Yang et al. 2025, PaTH Attention",
    ),
    "MoBA": Formula(
        _mixture_of_blocks,
        "4 H d for each pair in the own and topk − 1 earlier blocks, 2 H d for each earlier block's mean key",
        "Lu et al. 2025, MoBA",
    ),
    "NativeSparseAttention": Formula(
        _native_sparse_attention,
        "4 H d for each compressed block, each pair in the selected blocks, and each pair in the window",
        "Yuan et al. 2025, Native Sparse Attention, section 3",
    ),
    "YOCOCrossAttention": Formula(_cross_attention, _SOFTMAX.text, "Sun et al. 2024, You Only Cache Once"),
    "YOCOSharedKVBuilder": Formula(_shared_keys_and_values, "projections only", "Sun et al. 2024, You Only Cache Once"),
    "YOCOGatedRetention": Formula(_recurrent(2), _TWO_PRODUCTS, "Sun et al. 2024, You Only Cache Once"),
    "LinearAttention": Formula(_recurrent(2), _TWO_PRODUCTS, "Katharopoulos et al. 2020, eq. 18–20"),
    "GatedLinearAttention": Formula(_recurrent(2), _TWO_PRODUCTS, "Yang et al. 2023, Gated Linear Attention, eq. 3"),
    "MultiScaleRetention": Formula(_recurrent(2), _TWO_PRODUCTS, "Sun et al. 2023, Retentive Network, eq. 6"),
    "HGRN2Attention": Formula(_recurrent(2), _TWO_PRODUCTS, "Qin et al. 2024, HGRN2"),
    "LightNetAttention": Formula(_recurrent(2), _TWO_PRODUCTS, "Qin et al. 2024, You Only Scan Once (LightNet)"),
    "RWKV6Attention": Formula(partial(_token_shifted, products=2), _TWO_PRODUCTS, "Peng et al. 2024, Eagle and Finch"),
    "DeltaNet": Formula(_recurrent(3), _DELTA, "Yang et al. 2024, DeltaNet"),
    "GatedDeltaNet": Formula(_recurrent(3), _DELTA, "Yang et al. 2024, Gated DeltaNet, eq. 10"),
    "KimiDeltaAttention": Formula(_recurrent(3), _DELTA, "Kimi Team 2025, Kimi Linear, eq. 1"),
    "Comba": Formula(_recurrent(3), _DELTA, "Hu et al. 2025, Comba"),
    "PrecondGatedDeltaNet": Formula(_preconditioned_delta_rule, _DELTA, "fla/ops/precond_gated_delta_rule/naive.py"),
    "PrecondKDA": Formula(_preconditioned_delta_rule, _DELTA, "fla/ops/precond_kda/naive.py"),
    "RWKV7Attention": Formula(
        partial(_token_shifted, products=4),
        "S·a, ⊗b, v⊗k and S·r with a d_k × d_v state: 8 H d_k d_v",
        "Peng et al. 2025, RWKV-7",
    ),
    "GatedDeltaProduct": Formula(
        _delta_product,
        "n Householder steps that read and write a d_k × d_v state, and q·S: (4 n + 2) H d_k d_v",
        "Siems et al. 2025, DeltaProduct",
    ),
    "MesaNet": Formula(
        _mesa,
        "two d × d states: k⊗k and k⊗v in, n + 1 products of the conjugate gradient solver, one out: 2 (n + 4) H d²",
        "von Oswald et al. 2025, MesaNet; fla/ops/mesa_net/naive.py",
    ),
    "MomAttention": Formula(
        _mixture_of_memories,
        "a gated delta rule, 6 H d_k d_v, with topk memories and the shared one; projections as often as a token "
        "passes them",
        "Du et al. 2025, MoM",
    ),
    "GatedSlotAttention": Formula(_slots, _SLOTS, "Zhang et al. 2024, Gated Slot Attention"),
    "ABCAttention": Formula(_slots, _SLOTS, "Peng et al. 2021, ABC"),
    "Raven": Formula(_slots, _SLOTS, "fla/layers/raven.py, on the operator of Zhang et al. 2024, Gated Slot Attention"),
    "CyclicFlowAttention": Formula(
        _cyclic_flow,
        "writes and reads of m slots of keys and of values, 4 H m (d_k + d_v), and a second use of the read-out table",
        "fla/ops/cyfa/naive.py",
    ),
    "RodimusAttention": Formula(
        _rodimus, "k⊗v into and q·S out of an n × d_inner state: 4 n d_inner", "He et al. 2025, Rodimus*"
    ),
    "HGRNAttention": Formula(_vector_state, "element-wise only", "Qin et al. 2023, HGRN"),
    "Mamba": Formula(_state_space, _SCAN, "Gu & Dao 2023, Mamba, eq. 2"),
    "Mamba2": Formula(_state_space, _SCAN, "Dao & Gu 2024, Mamba-2"),
    "Mamba3": Formula(_mamba3, f"{_SCAN}, times the rank of its inputs", "fla/layers/mamba3.py"),
    "LogLinearMamba2": Formula(
        _log_linear_mamba2,
        "one write and 1 + popcount(t) reads of a d_inner × N state: 2 d_inner N each",
        "Guo et al. 2025, Log-Linear Attention",
    ),
    "MambaMixer": Formula(_state_space, _SCAN, "Gu & Dao 2023, Mamba, eq. 2"),
    "Mamba2Mixer": Formula(_state_space, _SCAN, "Dao & Gu 2024, Mamba-2"),
    "Qwen3NextGatedDeltaNet": Formula(_recurrent(3), _DELTA, "Yang et al. 2024, Gated DeltaNet, eq. 10"),
}


def first_attribute(holder: Any, *names: str) -> Any:
    """The first of these attributes that is there and not None."""
    return next((value for name in names if (value := getattr(holder, name, None)) is not None), None)


def num_experts(config: Any) -> int:
    """Routed experts of a mixture-of-experts layer, by whichever name the family's config has; 0 without any."""
    return first_attribute(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") or 0
