"""What is compiled beside a start, each by a process of its own (``flame.launch.ahead``). Standard library only.

To add one: a function that compiles, and an entry in ``WORKS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flame.config import AUTO, JobConfig, auto_options
from flame.launch.caches import FLASH_ATTENTION_4_SWITCH, flash_attention_4_cache, triton_cache
from flame.launch.versions import installed_version
from flame.model_file import may_attend

KERNELS, ATTENTION_FORWARD, ATTENTION_BACKWARD = "kernels", "attention_forward", "attention_backward"
# Compute capabilities (major) that the packages on CuTe DSL are asked to compile for.
CUTE_GPUS = (9, 10)


@dataclass(frozen=True)
class Work:
    """Something to compile.

    Attributes:
        what: it is, in log lines.
        function: ``module:name`` of what compiles it, called with the config and the number of ranks. It returns what
            it did in words, none when there was nothing to do; faults it raises.
        is_wanted: whether a job may need it, from its config and the environment.
        cache: the folder where it is kept; of an environment.
        options: of a job, those that it depends on.
        packages: distributions that it depends on.
        gpus: compute capabilities (major) that it is for. The function then sees no GPU, and in the environment what
            kind there is. None: it finds out by itself.
    """

    what: str
    function: str
    is_wanted: Callable[[JobConfig, Mapping[str, str]], bool]
    cache: Callable[[Mapping[str, str]], Path]
    options: Callable[[JobConfig], Any]
    packages: tuple[str, ...]
    gpus: tuple[int, ...] | None = None


def _wants_kernels(config: JobConfig, environ: Mapping[str, str]) -> bool:
    return (
        config.job.compile_ahead
        and config.model.backend != "reference"
        and not config.checkpoint.create_seed_checkpoint
        and not auto_options(config)  # what shapes its kernels have is found by the run itself
    )


def _kernel_options(config: JobConfig) -> Any:
    sections = ("model", "training", "activation_checkpoint", "activation_offload", "experimental", "float8")
    return {name: asdict(getattr(config, name)) for name in sections}


def _wants_attention(config: JobConfig, environ: Mapping[str, str]) -> bool:
    """Whether FlashAttention-4 is asked for, or one of those that are to be measured."""
    return (
        (config.job.compile_ahead or "job.compile_ahead" not in config.given)
        and config.model.attention_backend in ("fa4", AUTO)
        and not config.training.deterministic  # for which the package compiles with real tensors only
        and not config.checkpoint.create_seed_checkpoint
        and environ.get(FLASH_ATTENTION_4_SWITCH, "1") == "1"
        and installed_version("flash-attn-4") is not None
        and not (config.model.custom_models or config.experimental.custom_model_path)  # which need not compute with it
        and may_attend(config.model.config)
    )


def _attention_options(config: JobConfig) -> Any:
    training, experimental = config.training, config.experimental
    return (
        (config.model.attention_backend, training.mixed_precision_param),
        (training.varlen, training.seq_len, training.context_len, training.batch_size),
        (training.gradient_accumulation_steps, training.tensor_parallel_degree),
        asdict(experimental),
    )


def _attention(name: str) -> Work:
    return Work(
        what=f"FlashAttention-4's {name} pass",
        function=f"flame.training.attention_ahead:compile_{name}",
        is_wanted=_wants_attention,
        cache=flash_attention_4_cache,
        options=_attention_options,
        packages=("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi"),
        gpus=CUTE_GPUS,
    )


WORKS = {
    KERNELS: Work(
        what="Triton's kernels",
        function="flame.dry_run.kernels:compile_kernels",
        is_wanted=_wants_kernels,
        cache=triton_cache,
        options=_kernel_options,
        packages=("torch", "triton", "flash-linear-attention", "transformers"),
    ),
    ATTENTION_FORWARD: _attention("forward"),
    ATTENTION_BACKWARD: _attention("backward"),
}
