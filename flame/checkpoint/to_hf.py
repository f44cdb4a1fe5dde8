"""From a checkpoint to a Hugging Face model folder, tensor by tensor; the model is never built in memory."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from flame.checkpoint.dcp import read_tensors, tensor_metadata
from flame.checkpoint.hf_model import ModelOutline, load_config, outline
from flame.checkpoint.hf_writer import (
    SafetensorsFile,
    TensorSpec,
    free_tag,
    move_in,
    parse_size,
    plan_shards,
    write_index,
)
from flame.checkpoint.manager import EXPORT_DTYPES
from flame.checkpoint.manifest import reading
from flame.checkpoint.matching import match_names
from flame.checkpoint.names import MODEL
from flame.checkpoint.sources import MODEL_CONFIG, TOKENIZER, StepSource, check_source, find_step, read_job_config
from flame.errors import UserError
from flame.models.custom import load_recorded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ASIDE = ".hf-export.tmp"

# Reading a tensor opens its file and plans the read, so small ones are read together, up to this many bytes.
BATCH_BYTES = 64 << 20


def convert_dcp_to_hf(
    path: str | Path,
    step: int = -1,
    config: str | Path | None = None,
    tokenizer: str | Path | None = None,
    output: str | Path | None = None,
    export_dtype: str | None = None,
    max_shard_size: str | int = "5GB",
    on_bytes: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a checkpoint's weights as a Hugging Face model. Runs on one process; needs no GPU.

    The backend must be set up (``flame.models.backend.setup_backend``), so that the model's class can be built on the
    meta device to check names and shapes; custom models that the run's config.toml names are imported. Memory in use
    is the larger of 64 MB and the largest tensor, a few times. The folder changes over at the end: an interrupted
    conversion leaves what was there.

    Args:
        path: a run folder, its checkpoint folder, or one step folder.
        step: the step, -1 for the newest.
        config: model config file or folder; the run's ``model_config.json`` when None.
        tokenizer: tokenizer folder or hub name; the run's ``tokenizer/`` when None, and none if there is none.
        output: folder to write to; the run folder when None. Other files in it stay. Config and tokenizer are looked
            for here when the checkpoint lies in no run folder.
        export_dtype: "float32", "float16" or "bfloat16"; the run's ``checkpoint.export_dtype`` when None, else the
            dtype that the weights have.
        max_shard_size: size of a weight file at most, unless one tensor is larger.
        on_bytes: called with (bytes written, bytes in all) as the conversion goes on.

    Returns:
        The folder written to.

    Raises:
        UserError: no such or no complete checkpoint, no model config, or one that the weights do not fit; or the folder
            cannot be written to.
    """
    source = find_step(path, step)
    check_source(source)
    target = Path(output).expanduser() if output else source.run
    run = source.run if (source.run / MODEL_CONFIG).is_file() else target
    load_recorded(read_job_config(run), run)
    max_bytes = parse_size(max_shard_size)
    dtype = _choose_dtype(export_dtype, run)
    loaded_tokenizer = _find_tokenizer(tokenizer, run)
    entries = {name: e for name, e in tensor_metadata(source.metadata).items() if name.startswith(MODEL)}
    stored = {name: entry.size for name, entry in entries.items()}
    model = outline(load_config(config or _run_config(run)), stored)
    names = match_names(model.sizes, stored, str(source.folder), ignore=model.tied)
    specs = {name.removeprefix(MODEL): _spec(entries[name], dtype) for name in names}

    with _written_aside(target) as aside:
        shards = plan_shards(specs, max_bytes, free_tag(target, specs, max_bytes))
        with reading(source.folder) if source.manifest else nullcontext():
            _write_weights(source, shards, aside, on_bytes)
        _write_configs(aside, model, _main_dtype(specs), loaded_tokenizer)
        move_in(aside, target)
    logger.info("%s written to %s in Hugging Face format", source.folder.name, target)
    return target


@contextmanager
def _written_aside(target: Path) -> Iterator[Path]:
    """A folder inside ``target`` to write into; when that fails its space is given back.

    Raises:
        UserError: the system does not let it, as on a full disk.
    """
    aside = target / ASIDE
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(f"{target}: no model in Hugging Face format was written there: {error}") from error


def _write_weights(
    source: StepSource,
    shards: Mapping[str, Mapping[str, TensorSpec]],
    aside: Path,
    on_bytes: Callable[[int, int], None] | None,
) -> None:
    total = sum(spec.num_bytes for part in shards.values() for spec in part.values())
    done = 0
    # One buffer for all batches: what DCP read into lives on in its reference cycles until Python collects them.
    buffer = torch.empty(0, dtype=torch.uint8)
    for file_name, specs in shards.items():
        with SafetensorsFile(aside / file_name, specs) as file:
            for names in _batches(file.names, specs):
                num_bytes = sum(specs[name].num_bytes for name in names)
                if num_bytes > buffer.numel():
                    buffer = torch.empty(num_bytes, dtype=torch.uint8)
                views = _views(buffer, [specs[name] for name in names])
                tensors = dict(zip([MODEL + name for name in names], views, strict=True))
                read_tensors(source.folder, tensors, source.metadata, alone=True)
                for name in names:
                    file.write(name, tensors[MODEL + name])
                    done += specs[name].num_bytes
                if on_bytes:
                    on_bytes(done, total)
    if len(shards) > 1:
        write_index(aside, shards)


def _views(buffer: torch.Tensor, specs: Iterable[TensorSpec]) -> Iterator[torch.Tensor]:
    """Tensors that lie in the buffer one after the other; aligned where wider dtypes come first."""
    start = 0
    for spec in specs:
        end = start + spec.num_bytes
        yield buffer[start:end].view(spec.dtype).view(spec.size)
        start = end


def _batches(names: list[str], specs: Mapping[str, TensorSpec]) -> Iterator[list[str]]:
    batch: list[str] = []
    used = 0
    for name in names:
        if batch and used + specs[name].num_bytes > BATCH_BYTES:
            yield batch
            batch, used = [], 0
        batch.append(name)
        used += specs[name].num_bytes
    if batch:
        yield batch


def _write_configs(
    aside: Path, model: ModelOutline, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Write config.json, generation_config.json and the tokenizer's files."""
    from transformers import GenerationConfig

    model.config.architectures = [model.architecture]
    model.config.dtype = dtype
    model.config.save_pretrained(aside)
    generation = GenerationConfig.from_model_config(model.config)
    if tokenizer is not None:
        generation.bos_token_id = tokenizer.bos_token_id
        generation.eos_token_id = tokenizer.eos_token_id
        generation.pad_token_id = tokenizer.pad_token_id
        tokenizer.save_pretrained(aside)
    generation.save_pretrained(aside)


def _find_tokenizer(tokenizer: str | Path | None, run: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer given, or the one that the run kept."""
    from flame.data.tokenize import load_tokenizer

    if tokenizer is None and (run / TOKENIZER).is_dir():
        tokenizer = run / TOKENIZER
    if tokenizer is None:
        logger.warning("%s keeps no tokenizer and none was given: the model is written without one", run)
        return None
    return load_tokenizer(str(tokenizer))


def _run_config(run: Path) -> Path:
    """The model config that the run kept."""
    if not (run / MODEL_CONFIG).is_file():
        raise UserError(f"{run} keeps no {MODEL_CONFIG}; give the model's config with --config")
    return run / MODEL_CONFIG


def _choose_dtype(export_dtype: str | None, run: Path) -> torch.dtype | None:
    """The dtype asked for, by argument or by the run's job config; None leaves the weights as they are."""
    export_dtype = export_dtype or read_job_config(run).get("checkpoint", {}).get("export_dtype")
    if export_dtype is not None and export_dtype not in EXPORT_DTYPES:
        raise UserError(f"export_dtype = {export_dtype!r}; allowed: {', '.join(EXPORT_DTYPES)}")
    return EXPORT_DTYPES[export_dtype] if export_dtype else None


def _spec(entry: TensorStorageMetadata, dtype: torch.dtype | None) -> TensorSpec:
    """Shape and dtype to write a tensor with; whole numbers keep theirs."""
    own = entry.properties.dtype
    return TensorSpec(entry.size, dtype if dtype is not None and own.is_floating_point else own)


def _main_dtype(specs: Mapping[str, TensorSpec]) -> torch.dtype:
    """The floating-point dtype of most of the weights, which config.json states."""
    numbers: Counter[torch.dtype] = Counter()
    for spec in specs.values():
        if spec.dtype.is_floating_point:
            numbers[spec.dtype] += spec.size.numel()
    return numbers.most_common(1)[0][0] if numbers else torch.float32
