"""Forward passes of FLA's Mamba and Mamba2 mixers on packed documents, without the mamba_ssm package.

FLA 0.6's own layers do not read `cu_seqlens`: the convolution and the scan run on from one packed document into the
next, with mamba_ssm installed or not. Without it, Mamba advances token by token in Python after building every
token's [channels, states] decay, and Mamba2 holds chunks x 256 x 256 x heads x states products; besides, Mamba2 gives
head h the group h % G when it reads a prompt and h // (H / G), which is what its paper says, when it decodes.

The parameters are FLA's; operators come from FLA or, on the reference backend, from flame.models.reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flame.models.columns import split_columns
from flame.models.reference.packing import compute_dtype
from flame.models.reference.selective_scan import selective_scan_step
from flame.models.ssd import ssd_step

Forward = Callable[..., tuple[Tensor, None, Any]]


def make_mamba_forward(operators: Any) -> Forward:
    """`Mamba.forward` (arXiv:2312.00752, section 3.4) on the operators that a namespace holds when it is called.

    Args:
        operators: `selective_scan`, flame.models.reference.selective_scan.selective_scan or a function with its
            arguments, and `causal_conv1d`, FLA's or the reference of that name.
    """

    def forward(
        self: nn.Module,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:
        state = _Cached(self, past_key_values)
        x, gate = self.in_proj(hidden_states).chunk(2, dim=-1)
        x = _convolve(self, x, attention_mask, state, operators.causal_conv1d, cu_seqlens)
        sizes = [self.dt_rank, self.ssm_state_size, self.ssm_state_size]
        dt, B, C = self.x_proj(x).split(sizes, dim=-1)
        fused_gate = self.activation in ("silu", "swish")
        # The bias joins in the scan, in float32: 1 % of dt lies within a bfloat16 rounding of it.
        inputs = dict(
            x=x,
            dt=F.linear(dt, self.dt_proj.weight),
            A=-torch.exp(self.A_log.to(compute_dtype(x))),
            B=B,
            C=C,
            D=self.D,
            z=gate if fused_gate else None,
            dt_bias=self.dt_proj.bias,
            initial_state=state.recurrent,
        )
        if state.decodes(hidden_states, cu_seqlens):
            y, recurrent = selective_scan_step(**inputs)
        else:
            y, recurrent = operators.selective_scan(**inputs, output_final_state=state.wanted, cu_seqlens=cu_seqlens)
        if not fused_gate:
            y = y * self.act(gate)
        state.update(recurrent, num_tokens=hidden_states.shape[1])
        return self.out_proj(y), None, past_key_values

    return forward


def make_mamba2_forward(operators: Any) -> Forward:
    """`Mamba2.forward` (arXiv:2405.21060, section 6.1) on the operators that a namespace holds when it is called.

    Args:
        operators: `ssd`, what `flame.models.ssd.make_ssd` returns or a function with its arguments, and
            `causal_conv1d`, FLA's or the reference of that name.
    """

    def forward(
        self: nn.Module,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:
        state = _Cached(self, past_key_values)
        sizes = [self.intermediate_size, self.conv_dim, self.num_heads]
        gate, x, dt = self.in_proj(hidden_states).split(sizes, dim=-1)
        x = _convolve(self, x, attention_mask, state, operators.causal_conv1d, cu_seqlens)
        x, B, C = split_columns(x, [self.intermediate_size] + [self.n_groups * self.ssm_state_size] * 2)
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        B, C = (tensor.unflatten(-1, (self.n_groups, self.ssm_state_size)) for tensor in (B, C))
        dtype = compute_dtype(x)
        dt = F.softplus(dt.to(dtype) + self.dt_bias.to(dtype))
        if tuple(self.dt_limit) != (0.0, float("inf")):  # which any dt keeps to
            dt = dt.clamp(*self.dt_limit)
        A = -torch.exp(self.A_log.to(dtype))
        D = self.D.view(self.num_heads, -1)
        inputs = dict(x=x, dt=dt, A=A, B=B, C=C, D=D, initial_state=state.recurrent)
        if state.decodes(hidden_states, cu_seqlens):
            y, recurrent = ssd_step(**inputs)
        else:
            y, recurrent = operators.ssd(**inputs, output_final_state=state.wanted, cu_seqlens=cu_seqlens)
        y = y.flatten(2)
        y = y * self.act(gate) if self.norm is None else self.norm(y, gate)
        state.update(recurrent, num_tokens=hidden_states.shape[1])
        return self.out_proj(y), None, past_key_values

    return forward


class _Cached:
    """A layer's part of FLA's cache.

    Attributes:
        wanted: whether states must be kept.
        recurrent: the scan's state after the tokens so far, None at the start.
        conv: the convolution's last inputs [B, D, W], None at the start.
    """

    def __init__(self, layer: nn.Module, cache: Any) -> None:
        self.cache, self.layer_idx = cache, layer.layer_idx
        self.wanted = cache is not None
        last = cache[layer.layer_idx] if self.wanted and len(cache) > layer.layer_idx else None
        self.recurrent, self.conv = (last["recurrent_state"], last["conv_state"]) if last else (None, None)

    def decodes(self, hidden_states: Tensor, cu_seqlens: Tensor | None) -> bool:
        """Whether each row is the next token of a known state."""
        return self.recurrent is not None and hidden_states.shape[1] == 1 and cu_seqlens is None

    def update(self, recurrent: Tensor | None, num_tokens: int) -> None:
        if self.wanted:
            states = dict(recurrent_state=recurrent, conv_state=self.conv)
            self.cache.update(layer_idx=self.layer_idx, offset=num_tokens, **states)


def _convolve(
    layer: nn.Module,
    x: Tensor,
    attention_mask: Tensor | None,
    state: _Cached,
    causal_conv1d: Callable,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Short convolution and activation of x [B, T, D]; padding stays zero, and with it the scan's state."""
    mask = None if attention_mask is None or state.conv is not None else attention_mask[..., None].to(x.dtype)
    fused = layer.activation in ("silu", "swish")
    y, state.conv = causal_conv1d(
        x if mask is None else x * mask,
        layer.conv1d.weight.squeeze(1),
        layer.conv1d.bias,
        initial_state=state.conv,
        output_final_state=state.wanted,
        activation=layer.activation if fused else None,
        backend="triton",
        cu_seqlens=cu_seqlens,
    )
    y = y if fused else layer.act(y)
    return y if mask is None else y * mask
