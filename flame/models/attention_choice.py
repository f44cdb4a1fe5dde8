"""Which attention backend a job takes when it is left to flame: measured once, then remembered in a file."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from flame.launch.versions import installed_version
from flame.model_file import SOFTMAX_FAMILIES
from flame.models.attention_speed import AttentionShape, Choice, measure_all, pick_fastest
from flame.models.supported import softmax_kinds
from flame.paths import user_cache_folder

FILE = "attention.json"
# FLA's families with softmax attention of other shapes besides, for which none is known to be the fastest.
_OTHER_FAMILIES = ("rodimus", "deltaformer")
_PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-3", "flash-attn-4")


def attention_layers(
    config: PretrainedConfig | dict[str, Any],
    *,
    num_rows: int,
    num_tokens: int,
    document_len: int | None,
    num_shares: int = 1,
) -> Counter[AttentionShape]:
    """The softmax layers of a model by the shape that a rank computes; empty where flame's attention is not used.

    Args:
        config: of the model, or what its file says where that is enough (``flame.model_file.says_heads``).
        num_rows, num_tokens, document_len: as of ``AttentionShape``.
        num_shares: ranks that share the heads.
    """
    layers: Counter[AttentionShape] = Counter()
    for (num_heads, num_kv_heads, head_dim, window), number in _heads(config, document_len is not None).items():
        heads, kv_heads = max(1, num_heads // num_shares), max(1, num_kv_heads // num_shares)
        layers[AttentionShape(heads, kv_heads, head_dim, num_rows, num_tokens, document_len, window)] += number
    return layers


def choose_attention(
    layers: Mapping[AttentionShape, int],
    backends: list[str],
    default: str,
    device: torch.device,
    dtype: torch.dtype,
    folder: Path | None = None,
) -> tuple[Choice, bool]:
    """The fastest backend for a model's layers on this machine, and whether it was remembered.

    Args:
        layers: how many there are of each shape.
        backends: candidates.
        default: taken unless another is faster, and if nothing can be measured.
        device, dtype: to compute on and in.
        folder: where choices are remembered; None for the user's cache folder.
    """
    path = (folder or user_cache_folder()) / FILE
    key = _key(layers, backends, default, device, dtype)
    remembered = _read(path).get(key)
    if remembered is not None and remembered["backend"] in (default, *backends):
        return Choice(**remembered), True
    choice = pick_fastest(layers, backends, default, partial(measure_all, device=device, dtype=dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if default in choice.milliseconds:  # else there was nothing to compare with
        _write(path, key, choice)
    return choice, False


def _heads(config: PretrainedConfig | dict[str, Any], is_packed: bool) -> Counter[tuple[int, int, int, int | None]]:
    """Heads, heads of keys, their size and window, and the number of layers that have them."""
    if isinstance(config, dict):
        return _heads_of([(config, config["num_hidden_layers"])], config["hidden_size"])
    home = type(config).__module__
    if home.startswith("fla."):
        return _fla_heads(config)
    # transformers' models compute packed rows alone with flame's attention.
    if home.startswith("transformers.") and is_packed:
        return _native_heads(config.get_text_config())
    return Counter()


def _fla_heads(config: PretrainedConfig) -> Counter[tuple[int, int, int, int | None]]:
    if config.model_type in _OTHER_FAMILIES:
        return Counter()
    if config.model_type in SOFTMAX_FAMILIES:
        kinds = [(config.to_dict(), config.num_hidden_layers)]
    else:
        kinds = [(kind, len(kind["layers"])) for kind in softmax_kinds(config)]
    return _heads_of(kinds, config.hidden_size)


def _heads_of(kinds: list[tuple[dict[str, Any], int]], hidden_size: int) -> Counter[tuple[int, int, int, int | None]]:
    """Of FLA's softmax layers: what a config says of each kind, and how many there are of it."""
    heads: Counter[tuple[int, int, int, int | None]] = Counter()
    for kind, number in kinds:
        num_heads = kind["num_heads"]
        num_kv_heads = kind.get("num_kv_heads") or num_heads
        heads[num_heads, num_kv_heads, hidden_size // num_heads, kind.get("window_size")] += number
    return +heads


def _native_heads(config: PretrainedConfig) -> Counter[tuple[int, int, int, int | None]]:
    num_heads = getattr(config, "num_attention_heads", None)
    if not isinstance(num_heads, int):
        return Counter()
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    windows = {"full_attention": None, "sliding_attention": window}
    return Counter((num_heads, num_kv_heads, head_dim, windows[kind]) for kind in kinds if kind in windows)


def _key(
    layers: Mapping[AttentionShape, int],
    backends: list[str],
    default: str,
    device: torch.device,
    dtype: torch.dtype,
) -> str:
    """What a choice depends on, in words."""
    versions = {name: found for name in _PACKAGES if (found := installed_version(name))}
    if device.type == "cuda":
        versions |= {"gpu": torch.cuda.get_device_name(device), "cudnn": str(torch.backends.cudnn.version())}
    shapes = "; ".join(f"{number} x {shape.describe()}" for shape, number in layers.items())
    backends = sorted({default, *backends})
    return f"{shapes}; {dtype}; {', '.join(backends)}; {', '.join(f'{k} {v}' for k, v in versions.items())}"


def _read(path: Path) -> dict[str, Any]:
    """The choices of a file; none of one that is not there or damaged, which costs measuring again."""
    try:
        choices = json.loads(path.read_text(encoding="utf-8"))
        return {key: value for key, value in choices.items() if value.keys() == {"backend", "milliseconds", "left_out"}}
    except (OSError, ValueError, AttributeError):
        return {}


def _write(path: Path, key: str, choice: Choice) -> None:
    """Add a choice, by renaming a whole file; a folder that cannot be written to costs measuring again."""
    choices = _read(path) | {key: vars(choice)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(choices, file, indent=1)
        os.replace(file.name, path)
    except OSError:
        return
