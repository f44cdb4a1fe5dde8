"""Read a model config from a file, a folder or the hub, and fit it to the tokenizer."""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import os
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from flame.custom_sources import shipped_packages
from flame.errors import UserError
from flame.models.custom import load_shipped, registered_configs
from flame.paths import find_resource
from flame.quiet import quiet_third_party

logger = logging.getLogger(__name__)

# Families whose ``fuse_norm`` chooses between two forms of LayerNorm; in the others it is RMSNorm.
_LAYER_NORM_FAMILIES = frozenset({"rwkv6", "rwkv7"})
# Keys that Hugging Face writes into config files beside the model's own.
_BOOKKEEPING_KEYS = frozenset({"model_type", "architectures", "transformers_version", "auto_map", "torch_dtype"})


def load_model_config(model_section: Any, tokenizer: Any = None) -> PretrainedConfig:
    """The effective model config of a job; this is what the run saves and exports.

    Args:
        model_section: has ``config`` (a JSON file, a folder with ``config.json`` or a hub id), ``norm_type`` and
            ``trust_remote_code``.
        tokenizer: when given, ``vocab_size`` is raised to hold all its ids and the special token ids are its own.

    Raises:
        UserError: the file is missing or no JSON, the model type is unknown, a key looks like a slip of the pen, a
            value is refused by the model's config class, or ``norm_type`` asks for what the family does not have.
    """
    _register_families()
    name = model_section.config
    if not name:
        raise UserError("model.config is empty: give a *.json file, a folder with config.json, or a hub id")
    path = find_resource(name)
    if os.path.isdir(path):
        path = path / "config.json"
        if not path.exists():
            raise UserError(f"model.config = {name}: the folder holds no config.json")
    if os.path.isfile(path):
        config = _from_file(path, model_section.trust_remote_code)
    elif name.endswith(".json") or name.startswith((".", "/", "~")):
        raise UserError(f"model.config = {name}: no such file or folder{_shipped_hint(name)}")
    else:
        config = _from_hub(name, model_section.trust_remote_code)
    apply_norm_type(config, model_section.norm_type)
    if tokenizer is not None:
        fit_to_tokenizer(config, tokenizer)
    return config


def fit_to_tokenizer(config: PretrainedConfig, tokenizer: Any) -> None:
    """Give ``config`` a row for every token id, and the tokenizer's special token ids.

    ``pad_token_id`` is set only when padding has a token of its own: an embedding layer never trains its padding row,
    which must not happen to an EOS that doubles as padding.
    """
    text = config.get_text_config()
    num_rows = max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)
    if text.vocab_size < num_rows:
        logger.warning("vocab_size raised from %d to %d, to hold every token id", text.vocab_size, num_rows)
        text.vocab_size = num_rows
    pad = tokenizer.pad_token_id
    if pad in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id):
        pad = None
    for target in {id(config): config, id(text): text}.values():
        target.bos_token_id = tokenizer.bos_token_id
        target.eos_token_id = tokenizer.eos_token_id
        target.pad_token_id = pad


def apply_norm_type(config: PretrainedConfig, norm_type: str) -> None:
    """Carry out ``model.norm_type``, or refuse it.

    FLA families have one kind of normalisation each, in a fused and an unfused form (``fuse_norm``); ``rmsnorm`` and
    ``fused_rmsnorm`` choose the form. Empty leaves the config as it is.
    """
    if not norm_type:
        return
    family = config.model_type
    if not hasattr(config, "fuse_norm"):
        allowed = ()
    elif family in _LAYER_NORM_FAMILIES:
        allowed = ("layernorm",)
    else:
        allowed = ("rmsnorm", "fused_rmsnorm")
    if norm_type not in allowed:
        choice = " or ".join(allowed) or "only the kind its config names (leave model.norm_type empty)"
        raise UserError(f"model.norm_type = {norm_type}: the {family} family has {choice}")
    if norm_type != "layernorm":
        config.fuse_norm = norm_type == "fused_rmsnorm"


def _from_file(path: Path, trust_remote_code: bool) -> PretrainedConfig:
    values = _read_json(path)
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(f"{path}: the key model_type is missing; it names the family, such as gated_deltanet")
    if model_type not in CONFIG_MAPPING and not load_shipped(model_type):
        if "auto_map" in values:
            return _from_custom_code(path, model_type, trust_remote_code)
        near = difflib.get_close_matches(model_type, list(CONFIG_MAPPING.keys()), n=3, cutoff=0.5)
        raise UserError(f"{path}: unknown model_type {model_type!r}{_did_you_mean(near)}{_custom_hint()}")
    config_class = CONFIG_MAPPING[model_type]
    _check_keys(path, values, config_class)
    try:
        return config_class.from_dict(values)
    except (TypeError, ValueError, KeyError, AttributeError, StrictDataclassError) as fault:
        raise UserError(f"{path}: {config_class.__name__} refuses the values: {fault}") from fault


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_hook=_decode_float)
    except (ValueError, RecursionError) as fault:
        raise UserError(f"{path}: not valid JSON: {fault}") from fault
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold one JSON object, not a {type(values).__name__}")
    return values


def _decode_float(values: dict[str, Any]) -> dict[str, Any] | float:
    """An infinite or undefined number, which transformers writes as {"__float__": "Infinity"}; others unchanged."""
    return float(values["__float__"]) if values.keys() == {"__float__"} else values


def _from_custom_code(path: Path, model_type: str, trust_remote_code: bool) -> PretrainedConfig:
    if not trust_remote_code:
        raise UserError(
            f"{path}: model_type {model_type!r} brings its own Python code; read it, then set --model.trust_remote_code"
        )
    return AutoConfig.from_pretrained(path.parent, trust_remote_code=True)


def _from_hub(name: str, trust_remote_code: bool) -> PretrainedConfig:
    logger.info("model config %s: no such file or folder here, asking the Hugging Face hub", name)
    try:
        with quiet_third_party():  # the hub's client reports each of its attempts
            return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as fault:
        first_line = str(fault).strip().splitlines()[0]
        raise UserError(f"model.config = {name}: no such file or folder, and the hub says: {first_line}") from fault


def _check_keys(path: Path, values: dict[str, Any], config_class: type[PretrainedConfig]) -> None:
    """Config classes keep any key, so a mistyped one would silently leave the default in place.

    A key that the class does not know is refused when it is close to one that it knows and the file does not set;
    others are named in a warning, since files from other versions carry keys that no longer exist.
    """
    known = _known_keys(config_class)
    unknown = sorted(values.keys() - known)
    slips = []
    for key in unknown:
        near = difflib.get_close_matches(key, sorted(known - values.keys()), n=1, cutoff=0.85)
        slips += [f"{path}: unknown key {key!r}{_did_you_mean(near)}" for _ in near]
    if slips:
        raise UserError("\n".join(slips))
    if unknown:
        logger.warning("%s: %s does not use %s", path, config_class.__name__, ", ".join(unknown))


def _known_keys(config_class: type[PretrainedConfig]) -> set[str]:
    known = set(_BOOKKEEPING_KEYS) | set(GenerationConfig().to_dict()) | set(PretrainedConfig().to_dict())
    for base in config_class.__mro__[:-1]:  # without object
        known |= set(getattr(base, "__dataclass_fields__", ()))
        if "__init__" in vars(base):
            known |= set(inspect.signature(base.__init__).parameters)
    if _has_defaults(config_class):
        # FLA's GSAConfig takes "exapnd_k" and keeps it as expand_k, which is what a saved config holds.
        known |= set(vars(config_class()))
    known |= set(config_class.attribute_map)
    return known - {"self", "args", "kwargs"}


def _has_defaults(config_class: type[PretrainedConfig]) -> bool:
    """Whether the class can be made without arguments."""
    try:
        inspect.signature(config_class).bind()
    except TypeError:
        return False
    return True


def _did_you_mean(near: list[str]) -> str:
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _custom_hint() -> str:
    """What there is besides FLA's and transformers' families, and how to add to it."""
    loaded = {config.model_type for config in registered_configs()}
    return (
        f"; custom models: {', '.join(sorted(loaded | set(shipped_packages()))) or 'none'}; name your own with "
        "--model.custom_models, in conversions with --custom_models (docs/custom_models.md)"
    )


def _shipped_hint(name: str) -> str:
    folder = find_resource("configs")
    shipped = [f"configs/{file.relative_to(folder)}" for file in sorted(folder.rglob("*.json"))]
    return _did_you_mean(difflib.get_close_matches(name, shipped, n=2, cutoff=0.5))


def _register_families() -> None:
    """Make FLA's model types known to transformers."""
    import fla.models  # noqa: F401 - takes seconds, so only when a model is wanted
