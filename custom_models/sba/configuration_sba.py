"""Sizes and options of the stick-breaking transformer."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class SBAConfig(PretrainedConfig):
    """Config of :class:`custom_models.sba.modeling_sba.SBAForCausalLM`.

    Args:
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        num_hidden_layers: number of blocks.
        num_heads: attention heads, each with keys and values of its own.
        head_dim: width of a head; ``hidden_size / num_heads`` when None.
        intermediate_size: width of the MLP; 8/3 of ``hidden_size`` rounded up to a multiple of 256 when None.
        use_remainder: what a query leaves of its stick goes to its own value, so that the weights sum to 1.
        norm_eps: added to the mean square in RMSNorm.
        initializer_range: standard deviation of initial weights.
        use_cache: whether generation keeps keys and values.
        tie_word_embeddings: the output projection is the embedding.
    """

    model_type = "sba"
    keys_to_ignore_at_inference = ("past_key_values", "cache")
    attribute_map = {"num_attention_heads": "num_heads"}  # noqa: RUF012 - transformers' own form

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 1024,
        num_hidden_layers: int = 24,
        num_heads: int = 16,
        head_dim: int | None = None,
        intermediate_size: int | None = None,
        use_remainder: bool = True,
        norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        bos_token_id: int | None = 1,
        eos_token_id: int | None = 2,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ):
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} is not a multiple of num_heads {num_heads}; give head_dim")
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.intermediate_size = _mlp_size(hidden_size) if intermediate_size is None else intermediate_size
        self.use_remainder = use_remainder
        self.norm_eps = norm_eps
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        super().__init__(
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )


def _mlp_size(hidden_size: int) -> int:
    """Of the three matrices of a gated MLP together as many weights as of the usual two that are 4 times as wide."""
    return -(-hidden_size * 8 // 3 // 256) * 256
