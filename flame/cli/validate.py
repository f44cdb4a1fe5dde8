"""Checks on a parsed job: each option by its own limits, then options against each other and the files they name."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flame.cli import names
from flame.cli.values import show
from flame.config import AUTO, JobConfig, auto_options
from flame.custom_sources import find_custom, job_entries
from flame.errors import UserError
from flame.options import default_of, rule_of
from flame.paths import find_resource

INSIDE_RUN_FOLDER = (
    "checkpoint.folder",
    "metrics.save_tb_folder",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
)

SELECTIVE = "activation_checkpoint.selective_ac_option"
NEVER_ON_THE_HUB = ("checkpoint.initial_load_path", "experimental.pipeline_parallel_schedule_csv")

MAX_ROW = 2**31 - 1  # boundaries in a row are int32

Fault = tuple[str, str]
"""The option that a fault is about, and the line that says so."""


def find_faults(config: JobConfig) -> list[Fault]:
    """Every fault of a job as it was parsed, before ``resolve_defaults``; an empty list for a job that can start."""
    checks = (
        _check_limits,
        _check_required,
        _check_files,
        _check_custom_models,
        _check_lengths,
        _check_optimizer,
        _check_float8,
        _check_blocks,
        _check_datasets,
        _check_checkpoints,
        _check_dry_run,
        _check_auto,
    )
    return [fault for check in checks for fault in check(config)]


def _value(config: JobConfig, name: str) -> Any:
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)


def _fault(config: JobConfig, name: str, reason: str) -> Fault:
    """A fault's line: how the option was given, its value, what is wrong."""
    origin = config.given.get(name, f"--{name}")
    return name, f"{origin} = {show(_value(config, name))}: {reason}"


def _check_limits(config: JobConfig) -> Iterator[Fault]:
    for name, option in names.options().items():
        rule, value = rule_of(option), _value(config, name)
        for entry in value if isinstance(value, list) else [value]:
            if entry in rule.refused:
                yield _fault(config, name, rule.refused[entry])
                break
            if not rule.allows(entry):
                hint = names.did_you_mean(names.nearest(str(entry), rule.choices))
                yield _fault(config, name, f"must be {rule.describe()}{hint}")
                break
        else:
            if rule.not_yet and value != default_of(option):
                yield _fault(config, name, f"not available in this version; {rule.not_yet}")


def _check_required(config: JobConfig) -> Iterator[Fault]:
    model, training = config.model, config.training
    if not model.config:
        yield _fault(
            config,
            "model.config",
            "needs a model: a *.json file, a folder or a hub id (the demo is --job.config_file configs/debug.toml)",
        )
    if not model.tokenizer_path and model.config.endswith(".json"):
        yield _fault(config, "model.tokenizer_path", "needs a tokenizer: a folder or a hub id")
    if not any(training.dataset):
        yield _fault(config, "training.dataset", "needs a dataset: a hub name, a folder, a file or builtin:stdlib")
    for name in ("job.dump_folder", "checkpoint.folder"):
        if not _value(config, name):
            yield _fault(config, name, "needs the name of a folder")


def _check_files(config: JobConfig) -> Iterator[Fault]:
    for name in ("model.config", "model.tokenizer_path", *NEVER_ON_THE_HUB):
        path = _value(config, name)
        if path and (name in NEVER_ON_THE_HUB or _is_local(path)) and not find_resource(path).exists():
            yield _fault(config, name, f"no such file or folder{_nearby(Path(path))}")
    for name in ("job.dump_folder", "job.cache_dir"):
        try:
            if Path(os.path.expanduser(_value(config, name))).is_file():
                yield _fault(config, name, "is a file; the run needs a folder")
        except OSError as error:  # a name that is too long, for one
            yield _fault(config, name, f"is no name of a folder: {error.strerror}")
    for name in INSIDE_RUN_FOLDER:
        path = Path(_value(config, name))
        if path.is_absolute() or ".." in path.parts:
            yield _fault(config, name, "is a folder inside job.dump_folder: no absolute path, no ..")


def _check_custom_models(config: JobConfig) -> Iterator[Fault]:
    for name, entry in job_entries(config):
        try:
            find_custom(entry)
        except UserError as error:
            yield _fault(config, name, str(error) if len(config.model.custom_models) < 2 else f"{entry}: {error}")


def _is_local(path: str) -> bool:
    """Whether a text can only be a path: a hub id is ``name`` or ``owner/name``, and no file name.

    The shipped ``configs`` folder goes before a hub user of that name.
    """
    return path.startswith(("/", ".", "~", "configs/")) or path.endswith(".json") or path.count("/") > 1


def _nearby(path: Path) -> str:
    """The name in the same folder that is most like that of a missing file."""
    folder = find_resource(path.parent)
    siblings = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    guess = names.nearest(path.name, siblings)
    return names.did_you_mean(guess and str(path.parent / guess))


def _check_lengths(config: JobConfig) -> Iterator[Fault]:
    training = config.training
    if "training.context_len" in config.given and training.context_len > training.seq_len:
        yield _fault(config, "training.context_len", f"at most training.seq_len, which is {training.seq_len}")

    row = training.seq_len * (1 if training.batch_size == AUTO else max(training.batch_size, 1))
    if row > MAX_ROW:
        yield _fault(
            config, "training.seq_len", f"batch_size * seq_len is {row}, more than the {MAX_ROW} tokens of a row"
        )


def _check_optimizer(config: JobConfig) -> Iterator[Fault]:
    optimizer = config.optimizer
    if optimizer.name == "SGD" and "optimizer.implementation" in config.given and optimizer.implementation == "fused":
        yield _fault(config, "optimizer.implementation", "SGD over sharded parameters has no fused form; use foreach")


def _check_float8(config: JobConfig) -> Iterator[Fault]:
    options, training = config.float8, config.training
    if "float8" not in config.model.converters:
        for name in ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp", "emulate"):
            if getattr(options, name):
                yield _fault(config, f"float8.{name}", "needs model.converters float8")
        if options.recipe_name:
            yield _fault(config, "float8.recipe_name", "needs model.converters float8")
        return
    if options.enable_fsdp_float8_all_gather and options.recipe_name.startswith("rowwise"):
        yield _fault(config, "float8.enable_fsdp_float8_all_gather", "goes with recipe_name tensorwise only")
    if options.precompute_float8_dynamic_scale_for_fsdp and not options.enable_fsdp_float8_all_gather:
        yield _fault(
            config, "float8.precompute_float8_dynamic_scale_for_fsdp", "needs float8.enable_fsdp_float8_all_gather"
        )
    if training.mixed_precision_param == "float32" and not options.emulate:
        yield _fault(config, "training.mixed_precision_param", "float8 products come out in bfloat16; use that")
    if options.enable_fsdp_float8_all_gather and training.enable_cpu_offload:
        yield _fault(config, "float8.enable_fsdp_float8_all_gather", "does not go with training.enable_cpu_offload")
    multiple = 16 * config.experimental.context_parallel_degree
    if training.seq_len % multiple:
        reason = f"must be a multiple of {multiple} with model.converters float8: 16 for each piece of a sequence"
        yield _fault(config, "training.seq_len", reason)


def _check_blocks(config: JobConfig) -> Iterator[Fault]:
    key, choice = SELECTIVE, config.activation_checkpoint.selective_ac_option
    if choice not in ("op", "norm") and not (choice.isdecimal() and int(choice)):
        yield _fault(config, key, "must be op, norm, or n for every n-th block")
    if choice != "norm" or config.activation_checkpoint.mode != "selective":
        return
    if config.training.compile:
        yield _fault(config, key, "does not go with training.compile, which compiles norms into what is around them")
    if config.training.tensor_parallel_degree > 1:
        yield _fault(config, key, "does not go with training.tensor_parallel_degree above 1; op, a number or full do")
    if config.activation_offload.mode != "none":
        yield _fault(config, key, "does not go with activation_offload.mode full; full does")
    if "float8" in config.model.converters:
        yield _fault(config, key, "does not go with model.converters float8; op, a number or full do")


def _check_datasets(config: JobConfig) -> Iterator[Fault]:
    training, validation = config.training, config.validation
    yield from _check_siblings(config, "training", for_each=("data_probs",))
    if any(validation.dataset):
        yield from _check_siblings(config, "validation")
    else:
        for name, option in names.options().items():
            if name.startswith("validation.") and _value(config, name) != default_of(option):
                yield _fault(config, name, "goes with validation.dataset, which is not given")
    if training.data_probs and not math.isclose(sum(training.data_probs), 1, abs_tol=1e-6):
        yield _fault(config, "training.data_probs", f"must sum to 1, not {sum(training.data_probs):g}")


def _check_siblings(config: JobConfig, section: str, for_each: tuple[str, ...] = ()) -> Iterator[Fault]:
    """Each list beside the datasets has one entry for each of them, or one for all but in those of ``for_each``."""
    datasets = getattr(config, section).dataset
    count = len(datasets)
    if count > 1 and not all(datasets):
        yield _fault(config, f"{section}.dataset", "an entry between two commas is empty")
    for key in ("dataset_name", "dataset_split", "data_dir", "data_files", *for_each):
        given = len(getattr(getattr(config, section), key))
        one_for_all = given == 1 and key not in for_each
        files_of_one = count == 1 and key == "data_files"
        if given and given != count and not one_for_all and not files_of_one:
            choice = "give one for each" + ("" if key in for_each else ", or one for all")
            yield _fault(config, f"{section}.{key}", f"{given} for {count} datasets; {choice}")


def _check_checkpoints(config: JobConfig) -> Iterator[Fault]:
    checkpoint = config.checkpoint
    if not checkpoint.enable_checkpoint:
        if checkpoint.load_step >= 0:
            yield _fault(config, "checkpoint.load_step", "nothing is loaded while checkpoint.enable_checkpoint is off")
        if checkpoint.create_seed_checkpoint:
            yield _fault(config, "checkpoint.create_seed_checkpoint", "needs checkpoint.enable_checkpoint")
    if config.job.sample_prompt and not checkpoint.export_hf:
        yield _fault(config, "job.sample_prompt", "samples from the exported model: needs checkpoint.export_hf")


def _check_dry_run(config: JobConfig) -> Iterator[Fault]:
    if config.job.world_size and not (config.job.dry_run or config.memory_estimation.enabled):
        yield _fault(
            config,
            "job.world_size",
            "goes with job.dry_run or memory_estimation.enabled only; NNODE and NGPU say how many processes a run has",
        )


def _check_auto(config: JobConfig) -> Iterator[Fault]:
    names_of_auto = auto_options(config)
    is_dry = config.job.dry_run or config.memory_estimation.enabled
    if config.job.device_memory_gib and not names_of_auto and not is_dry:
        reason = "goes with activation_checkpoint.mode or training.batch_size auto, or with job.dry_run"
        yield _fault(config, "job.device_memory_gib", reason)
    checkpointing = config.activation_checkpoint
    given = checkpointing.selective_ac_option
    if checkpointing.mode == AUTO and given not in ("op", default_of(names.options()[SELECTIVE])):
        yield _fault(config, SELECTIVE, "activation_checkpoint.mode auto takes op where it is selective; leave it out")
    unseen = {"training.compile": config.training.compile, "model.converters float8": config.model.converters}
    for name in names_of_auto:
        for option in (option for option, is_on in unseen.items() if is_on):
            reason = f"memory is not known in advance with {option}; leave that out, or set {name} yourself"
            yield _fault(config, name, reason)
    degree = config.experimental.pipeline_parallel_degree
    if config.training.batch_size == AUTO and degree > 1:
        reason = (
            f"the memory of a pipeline (experimental.pipeline_parallel_degree = {degree}) grows with its "
            "micro-batches, which do not grow with batch_size; give a number"
        )
        yield _fault(config, "training.batch_size", reason)
