"""The stick-breaking transformer: pre-norm blocks of attention and a gated MLP, without positions.

Attention knows the order of tokens by itself: a query hands out its stick to the nearest key first (Tan et al. 2024,
"Scaling Stick-Breaking Attention", arXiv:2410.17980). So there is no rotary embedding and no length that it is made
for.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from custom_models.sba.attention import Documents, stick_breaking_attention
from custom_models.sba.configuration_sba import SBAConfig

# What a model calls its cache changed its name within transformers 5.
_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class SBAAttention(nn.Module):
    """Multi-head stick-breaking attention."""

    def __init__(self, config: SBAConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.use_remainder = config.use_remainder
        size = config.num_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.o_proj = nn.Linear(size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, documents: Documents | None, mask: Tensor | None, cache: Any) -> Tensor:
        """x [B, T, hidden_size] to the same; ``mask`` [B, keys] is True where a key may be seen."""
        q, k, v = (
            projection(x).unflatten(-1, (self.num_heads, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )  # [B, T, H, D]
        own = v
        if cache is not None:
            k, v = cache.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        o, rest = stick_breaking_attention(q, k, v, documents, mask)
        if self.use_remainder:
            o = o + rest.unsqueeze(-1).to(o.dtype) * own
        return self.o_proj(o.flatten(-2))

    def mixer_flops(self) -> dict[str, Any]:
        """What flame counts for this layer beside its projections, and what it keeps when it decodes."""
        size = self.num_heads * self.head_dim
        return {
            "per_pair": 2 * 2 * size,
            "cache": 2 * size,
            "formula": "q·k and the weighted values, for each pair: 4 H d",
            "source": "Tan et al. 2024, Stick-Breaking Attention, eq. 2",
        }


class SBAMLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: SBAConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SBABlock(nn.Module):
    """Attention and MLP, each added to the stream that it reads through a norm."""

    def __init__(self, config: SBAConfig, layer_idx: int):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = SBAAttention(config, layer_idx)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = SBAMLP(config)

    def forward(self, x: Tensor, documents: Documents | None, mask: Tensor | None, cache: Any) -> Tensor:
        x = x + self.attn(self.attn_norm(x), documents, mask, cache)
        return x + self.mlp(self.mlp_norm(x))


class SBAPreTrainedModel(PreTrainedModel):
    config_class = SBAConfig
    base_model_prefix = "model"
    _no_split_modules = ("SBABlock",)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)


class SBAModel(SBAPreTrainedModel):
    """Embedding, blocks and the last norm: token ids to hidden states."""

    def __init__(self, config: SBAConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(SBABlock(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states [B, T, hidden_size] of ``input_ids`` [B, T].

        Args:
            attention_mask: [B, cached tokens + T], 0 for padding on the left.
            past_key_values: keys and values of earlier tokens, under its older name.
            cache: the same, under its newer name.
            use_cache: make a cache where none is given.
            cu_seqlens: int32 [N + 1], document bounds of one packed row; attention stays within a document.
        """
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        mask = None if attention_mask is None or attention_mask.all() else attention_mask.bool()
        documents = None if cu_seqlens is None else Documents.of(cu_seqlens)
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, documents, mask, cache)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), **{_CACHE: cache})


class SBAForCausalLM(SBAPreTrainedModel, GenerationMixin):
    """The model with its output projection."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - transformers' own form

    def __init__(self, config: SBAConfig):
        super().__init__(config)
        self.model = SBAModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, logits_to_keep: int = 0, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, vocab_size] of the last ``logits_to_keep`` tokens (0: all), and the mean loss with labels.

        Labels are as transformers has them, one for each input token and not shifted. flame itself computes the loss
        from the hidden states and never calls this in training.
        """
        outputs = self.model(input_ids, **kwargs)
        logits = self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{_CACHE: outputs.get(_CACHE)})
