"""Import custom models, which register their classes with transformers, and check that they did.

Only code that the job names is imported, and the package in ``custom_models`` that is named like the model type in
hand. docs/custom_models.md says what such a model must offer.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from flame.config import JobConfig
from flame.custom_sources import OPTIONS, CustomSource, find_custom, find_shipped, job_entries
from flame.errors import UserError

logger = logging.getLogger(__name__)


def load_custom_models(config: JobConfig) -> None:
    """Import every custom model that a job names.

    Call :func:`flame.models.backend.setup_backend` first: a model that imports FLA's operators gets those of the
    backend.

    Raises:
        UserError: see :func:`load_entry`.
    """
    for option, entry in job_entries(config):
        load_entry(entry, f"--{option} = {entry}")


def load_recorded(sections: dict, run: Path) -> None:
    """Import the custom models that the ``config.toml`` of a run names (its sections, as read).

    Code that lies inside the run's folder is left out: a run that came from elsewhere must not bring its own. So is
    code that is no longer there, or that is loaded already, as when the caller knows where it is now.

    Raises:
        UserError: see :func:`load_entry`.
    """
    entries = [(OPTIONS[0], entry) for entry in sections.get("model", {}).get("custom_models", [])]
    entries.append((OPTIONS[1], sections.get("experimental", {}).get("custom_model_path", "")))
    for option, entry in entries:
        origin = f"{run / 'config.toml'}: {option} = {entry}"
        if not entry:
            continue
        try:
            source = find_custom(entry)
        except UserError as fault:
            logger.warning("%s: %s; passed over", origin, fault)
            continue
        if source.path is not None and source.path.is_relative_to(run.resolve()):
            logger.warning("%s: code inside the folder is not run by itself; give --custom_models %s", run, entry)
        elif source.module not in sys.modules:
            load_source(source, origin)


def load_entry(entry: str, origin: str) -> None:
    """Import the code that an entry names and check that it registers a causal language model.

    Args:
        entry: as in ``model.custom_models``.
        origin: how the entry was given, the beginning of every message.

    Raises:
        UserError: no such code, an exception while it is imported, another module of its name, nothing registered, a
            config without a causal language model, or a model type that another config has.
    """
    try:
        source = find_custom(entry)
    except UserError as fault:
        raise UserError(f"{origin}: {fault}") from fault
    load_source(source, origin)


def load_source(source: CustomSource, origin: str) -> None:
    """As :func:`load_entry`, for code that has been found."""
    is_new = source.module not in sys.modules
    types_before = set(CONFIG_MAPPING.keys())
    module = _import(source, origin)
    configs = [CONFIG_MAPPING[name] for name in sorted(set(CONFIG_MAPPING.keys()) - types_before)]
    configs += [config for config in registered_configs() if _is_inside(config, module) and config not in configs]
    for config in configs:
        _check_type_is_free(config, module, origin)
    if is_new and not configs:
        raise UserError(
            f"{origin}: registers no model: when imported it must call AutoConfig.register and "
            "AutoModelForCausalLM.register (docs/custom_models.md)"
        )
    if configs and not any(config in MODEL_FOR_CAUSAL_LM_MAPPING for config in configs):
        names = ", ".join(config.model_type for config in configs)
        raise UserError(
            f"{origin}: registers {names} without a causal language model: call AutoModelForCausalLM.register too"
        )


def load_shipped(model_type: str) -> bool:
    """Import the package of ``custom_models`` that is named like ``model_type``; False when there is none."""
    source = find_shipped(model_type)
    if source is not None:
        load_source(source, f"model_type {model_type!r}: {source.path}")
    return source is not None


def registered_configs() -> list[type[PretrainedConfig]]:
    """Config classes that were registered with transformers from outside of it and of FLA, by model type."""
    foreign = {cls for cls in _subclasses(PretrainedConfig) if not cls.__module__.startswith(("transformers.", "fla."))}
    return sorted(
        (cls for cls in foreign if cls.model_type in CONFIG_MAPPING and CONFIG_MAPPING[cls.model_type] is cls),
        key=lambda cls: cls.model_type,
    )


def _check_type_is_free(config: type[PretrainedConfig], module: ModuleType, origin: str) -> None:
    """transformers lets a registration replace one of FLA's; a folder exported so would load as something else."""
    for other in _subclasses(PretrainedConfig):
        if other.model_type == config.model_type and other is not config and not _is_inside(other, module):
            CONFIG_MAPPING.register(config.model_type, other, exist_ok=True)
            raise UserError(
                f"{origin}: registers model_type {config.model_type!r}, which is that of {other.__module__}."
                f"{other.__name__}; give it a name of its own"
            )


def _subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _import(source: CustomSource, origin: str) -> ModuleType:
    loaded = sys.modules.get(source.module)
    if loaded is not None and source.file is not None and Path(loaded.__file__ or "").resolve() != source.file:
        raise UserError(
            f"{origin}: a module named {source.module!r} is loaded already, from {loaded.__file__}; rename this one"
        )
    if loaded is not None:
        return loaded
    try:
        return _run(source) if source.path else importlib.import_module(source.module)
    except (Exception, SystemExit) as fault:  # whatever the user's code raises
        for name in [name for name in sys.modules if name == source.module or name.startswith(f"{source.module}.")]:
            del sys.modules[name]
        frame = traceback.extract_tb(fault.__traceback__)[-1]
        reason = f"{type(fault).__name__}: {fault}".splitlines()[0]
        raise UserError(f"{origin}: importing it fails: {reason} ({frame.filename}, line {frame.lineno})") from fault


def _run(source: CustomSource) -> ModuleType:
    """Import by the file's place, so that neither the working directory nor sys.path matters."""
    folders = [str(source.path)] if source.path.is_dir() else None
    spec = importlib.util.spec_from_file_location(source.module, source.file, submodule_search_locations=folders)
    module = importlib.util.module_from_spec(spec)
    sys.modules[source.module] = module
    spec.loader.exec_module(module)
    return module


def _is_inside(cls: type, module: ModuleType) -> bool:
    return f"{cls.__module__}.".startswith(f"{module.__name__}.")
