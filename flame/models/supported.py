"""What FLA accepts in a config and this machine, the backend or FLA's own layers do not carry out, refused by name."""

from __future__ import annotations

import importlib.util
from typing import Any

from flame.errors import UserError
from flame.models.backend import REFERENCE_FAMILIES

# Built on flash_attn's private functions, which have no counterpart in torch.
_NEED_FLASH_ATTN = ("moba",)
# Values of attn_mode that a family's layer accepts and does not carry out.
_REFUSED_MODES = {
    ("gla", "fused_chunk"): "FLA has withdrawn its kernel, and the layer would not tell documents apart",
    ("hgrn2", "fused_chunk"): "FLA has withdrawn its kernel, and the layer would not tell documents apart",
    ("retnet", "parallel"): "the layer reads and returns no state, so that generation forgets the prompt",
}
# Families whose layers assert that they train in chunks; "fused_recurrent" is what they decode with by themselves.
_TRAINED_IN_CHUNKS = (
    "comba",
    "cyclic_flow_attention",
    "gated_deltanet",
    "gated_deltaproduct",
    "kda",
    "mom",
    "precond_kda",
)
# Families whose blocks take one result more from a mixer than FLA's softmax attention gives.
_WITHOUT_SOFTMAX_LAYERS = ("mom", "rwkv7")


def check_supported(config: Any, backend: str) -> None:
    """Refuse an FLA family whose operators the resolved backend (or, for any backend, this machine) does not have.

    So are values that its config accepts and its layers do not carry out.

    Raises:
        UserError: names the family and what can be used instead.
    """
    if not type(config).__module__.startswith("fla."):
        return
    if config.model_type in _NEED_FLASH_ATTN and importlib.util.find_spec("flash_attn") is None:
        raise UserError(f"model_type {config.model_type!r} needs the flash_attn package; install it")
    _check_mode(config.model_type, getattr(config, "attn_mode", None))
    _check_window(config.model_type, getattr(config, "window_size", None))
    if config.model_type in _WITHOUT_SOFTMAX_LAYERS and any(kind["layers"] for kind in softmax_kinds(config)):
        raise UserError(
            f"attn of model_type {config.model_type!r} is refused: FLA's blocks of this family take no softmax layers; "
            "leave attn out of the config"
        )
    if backend != "reference" or config.model_type in REFERENCE_FAMILIES:
        return
    raise UserError(
        f"the reference backend does not have the operators of model_type {config.model_type!r}; "
        f"it runs {', '.join(REFERENCE_FAMILIES)} and models native to transformers. "
        "Use a GPU and model.backend = 'triton'"
    )


def softmax_kinds(config: Any) -> list[dict[str, Any]]:
    """What ``attn`` in an FLA config says of the layers that are softmax attention: one entry for each kind of them."""
    attn = getattr(config, "attn", None) or []
    return [attn] if isinstance(attn, dict) else list(attn)


def _check_mode(family: str, mode: str | None) -> None:
    reason = _REFUSED_MODES.get((family, mode))
    if mode == "fused_recurrent" and family in _TRAINED_IN_CHUNKS:
        reason = "the layer does not train in it, and decodes in it whatever the config says"
    if reason is not None:
        raise UserError(f"attn_mode {mode!r} of model_type {family!r} is refused: {reason}; use 'chunk'")


def _check_window(family: str, window_size: Any) -> None:
    """FLA checks the windows of hybrid layers; elsewhere 0 would train without a window and decode without a cache."""
    if window_size is not None and (type(window_size) is not int or window_size < 1):
        raise UserError(
            f"window_size {window_size!r} of model_type {family!r} is refused: give the number of keys that a query "
            "sees, itself included, at least 1, or null for all"
        )
