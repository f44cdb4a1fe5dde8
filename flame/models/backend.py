"""Which code runs FLA's operators, and the one list of everything that flame replaces inside FLA.

Eleven sets of replacements, written against flash-linear-attention 0.6:

- reference operators: FLA's are Triton kernels, which do not run on a CPU; `--model.backend reference` also asks for
  them on a GPU, to check a kernel against an independent answer.
- softmax attention: FLA's layers raise ImportError when the flash_attn package is missing.
- one backward step of the gated operators: FLA refuses it on Hopper GPUs with Triton 3.4 to 3.7.0, where the compiler
  gets it wrong (flash-linear-attention issue 640; Triton 3.7.1 is right again); flame/models/chunk_backward_kernels.py.
- state space mixers: FLA's Mamba and Mamba2 layers run on from one packed document into the next, and without the
  mamba_ssm package in loops or products that no long sequence fits (flame/models/state_space.py, on any backend; on
  Hopper GPUs Mamba-2's scan has kernels of its own, flame/models/chunk_ssd.py).
- generation: with transformers 5.24 FLA's models lose their cache (flame/models/generation.py).
- the loss: FLA multiplies float32 matrices for the output projection's gradient (flame/models/linear_cross_entropy.py).
- SwiGLU, rotary embeddings and the norms' backward: FLA's do not use the memory's bandwidth, or use more than they need
  (flame/models/swiglu_kernels.py, rotary_kernels.py, gated_norm.py).
- short convolutions: FLA keeps its fast kernels for runs of one process (flame/models/convolutions.py).
- gated linear attention and the gated delta rule: on Hopper GPUs FLA's kernels take three times and twice as long
  (flame/models/chunk_gla.py, delta_rule.py).
- chunks of packed documents: FLA counts them on the device and waits for it (flame/models/chunk_bounds.py).
- autotuning: Triton tries the candidates of a kernel one after the other (flame/models/tuning.py), also where it has
  been found out before which is the fastest (flame/models/tuned.py).

A function is replaced by identity, wherever a loaded `fla` module has bound it: FLA's modules import each other's
functions by name, so that replacing it at its home alone would change nothing. FLA's own backend registry covers only
some of these functions (not the delta rule, norms' residuals or attention) and only when its dispatch is on.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from flame.errors import UserError
from flame.models import chunk_bounds
from flame.models.attention import Attention, resolve_attention_backend
from flame.models.generation import is_cache_renamed, prepare_inputs_for_generation
from flame.models.linear_cross_entropy import make_fused_loss
from flame.models.native_attention import register_native_attention
from flame.models.ssd import make_ssd
from flame.models.state_space import make_mamba2_forward, make_mamba_forward
from flame.models.tuned import use_shipped_results
from flame.models.tuning import bench_compiled, keep_plain_results
from flame.quiet import quiet_third_party

BACKENDS = ("auto", "triton", "reference")
REFERENCE_FAMILIES = (
    "delta_net",
    "gated_deltanet",
    "gla",
    "gsa",
    "hgrn2",
    "kda",
    "mamba",
    "mamba2",
    "retnet",
    "rwkv7",
    "samba",
    "stickbreaking_attn",
    "transformer",
)

_REFERENCE = "flame.models.reference"
# FLA module and function, the reference module that holds the function of that name (or "module:name").
_FUNCTIONS: tuple[tuple[str, str, str], ...] = (
    ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", "delta_rule"),
    ("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule", "delta_rule"),
    ("fla.ops.delta_rule", "chunk_delta_rule", "delta_rule"),
    ("fla.ops.delta_rule", "fused_recurrent_delta_rule", "delta_rule"),
    ("fla.ops.gla", "chunk_gla", "gla"),
    ("fla.ops.gla", "fused_recurrent_gla", "gla"),
    ("fla.ops.simple_gla", "chunk_simple_gla", "simple_gla"),
    ("fla.ops.generalized_delta_rule", "chunk_dplr_delta_rule", "generalized_delta_rule"),
    ("fla.ops.generalized_delta_rule", "fused_recurrent_dplr_delta_rule", "generalized_delta_rule"),
    ("fla.ops.rwkv7", "fused_mul_recurrent_rwkv7", "generalized_delta_rule"),
    ("fla.ops.rwkv7.fused_addcmul", "fused_addcmul_rwkv7", "rwkv7"),
    ("fla.ops.rwkv7.fused_k_update", "fused_k_rwkv7", "rwkv7"),
    ("fla.ops.rwkv7.gate_output_correction", "gate_output_correction", "rwkv7"),
    ("fla.modules.token_shift", "token_shift", "token_shift"),
    ("fla.ops.stickbreaking_attn", "parallel_stickbreaking_attn", "stickbreaking"),
    ("fla.ops.gsa", "chunk_gsa", "gsa"),
    ("fla.ops.gsa", "fused_recurrent_gsa", "gsa"),
    ("fla.ops.kda", "chunk_kda", "kda"),
    ("fla.ops.kda", "fused_recurrent_kda", "kda"),
    ("fla.ops.retention", "chunk_retention", "retention"),
    ("fla.ops.retention", "fused_chunk_retention", "retention"),
    ("fla.ops.retention", "fused_recurrent_retention", "retention"),
    ("fla.ops.attnres", "fused_attnres", "attnres"),
    ("fla.modules.causal_conv1d", "causal_conv1d", "convolution"),
    ("fla.modules.causal_conv1d", "causal_conv1d_update", "convolution"),
    ("fla.modules.norm.layernorm", "layer_norm", "norms"),
    ("fla.modules.norm.layernorm", "group_norm", "norms"),
    ("fla.modules.norm.layernorm", "rms_norm", "norms"),
    ("fla.modules.norm.layernorm", "layer_norm_linear", "norms"),
    ("fla.modules.norm.fused_norm_gate", "layer_norm_gated", "norms"),
    ("fla.modules.norm.fused_norm_gate", "rms_norm_gated", "norms"),
    ("fla.modules.norm.layernorm_gated", "layernorm_fn", "gated_group_norm"),
    ("fla.modules.norm.layernorm_gated", "rmsnorm_fn", "gated_group_norm"),
    ("fla.modules.norm.l2norm", "l2norm", "norms"),
    ("fla.modules.rotary", "rotary_embedding", "rotary"),
    ("fla.modules.activations", "sigmoid", "activations"),
    ("fla.modules.activations", "swish", "activations"),
    ("fla.modules.activations", "logsigmoid", "activations"),
    ("fla.modules.activations", "sqrelu", "activations"),
    ("fla.modules.activations", "fast_gelu_impl", "activations:gelu"),
    ("fla.modules.activations.ops", "bias_gelu_impl", "activations:bias_gelu"),
    ("fla.modules.activations", "swiglu", "activations"),
    ("fla.modules.activations", "swiglu_linear", "activations"),
    ("fla.modules.activations", "sigmoidglu", "activations"),
    ("fla.modules.activations", "sigmoidglu_linear", "activations"),
    ("fla.modules.activations", "powglu", "activations"),
    ("fla.modules.activations", "powglu_linear", "activations"),
    ("fla.modules.fused_cross_entropy", "cross_entropy_loss", "cross_entropy"),
    ("fla.modules.fused_linear_cross_entropy", "fused_linear_cross_entropy_loss", "cross_entropy"),
)
# Reference modules whose functions a compiler can fuse with what is around them.
_FUSIBLE = ("activations", "gated_group_norm", "norms")
# Methods that themselves refuse or launch kernels, whatever functions their module binds.
_CROSS_ENTROPY = "fla.modules.fused_cross_entropy"
_METHODS: tuple[tuple[str, str, str, str], ...] = (
    # Asserts that its tensors are on an accelerator before calling cross_entropy_loss.
    (_CROSS_ENTROPY, "FusedCrossEntropyLoss", "forward", "cross_entropy:cross_entropy_module_forward"),
    # Refuses devices that are no accelerator and tensors that are not in half precision.
    ("fla.layers.stickbreaking_attn", "StickBreakingAttention", "forward", "stickbreaking:layer_forward"),
)
# Modules that import flash_attn at the top and fail without it; the first serves the reference families.
_ATTENTION_MODULES = (
    "fla.layers.attn",
    "fla.layers.bitattn",
    "fla.layers.mla",
    "fla.layers.rodimus",
    "fla.ops.deltaformer.parallel",
    "fla.ops.nsa.parallel",
)

# Programs of a norm's backward on each multiprocessor. FLA starts one, which takes its rows one after the other and
# waits for each: a quarter of the memory's bandwidth on an H200.
NORM_PROGRAMS = 8
_NORM_MODULES = ("fla.modules.norm.layernorm", "fla.modules.norm.layernorm_gated")

_installed: list[tuple[Any, Any, Any, bool]] = []  # (namespace, name, original, is a dict)
_attention: list[Attention] = []  # the one in place


def setup_backend(
    backend: str,
    device_type: str,
    attention_backend: str = "auto",
    context_len: int | None = None,
    shipped_tuning: bool = True,
) -> str:
    """Import FLA, register its model classes with transformers' auto classes, and put the backend's code in place.

    Call before building a model. Calling again replaces what an earlier call installed.

    Args:
        backend: "auto" (triton on a GPU, reference on a CPU), "triton" or "reference".
        device_type: "cuda" or "cpu".
        attention_backend: one of ATTENTION_BACKENDS (flame/models/attention.py).
        context_len: longest document in a packed row, in tokens; keeps attention from planning for the whole row.
        shipped_tuning: whether kernels use the tuning results that ship with flame.

    Returns:
        The backend in use, "triton" or "reference".

    Raises:
        UserError: a name that is not known or cannot run on the device; an FLA release whose functions have moved.
    """
    resolved = resolve_backend(backend, device_type)
    attention = resolve_attention_backend(attention_backend, device_type)
    import_fla()
    uninstall()
    if resolved == "reference":
        _install_reference()
    else:
        _install_tuning(shipped_tuning)
        wrap_operator("fla.modules.fused_linear_cross_entropy", "fused_linear_cross_entropy_loss", make_fused_loss)
        wrap_operators((module, name, getattr(chunk_bounds, maker)) for module, name, maker in chunk_bounds.REPLACED)
        _install_kernels()
    _attention[:] = [Attention(attention, context_len)]
    _install_attention(_attention[0])
    _install_state_space(resolved)
    register_native_attention(_attention[0].varlen)
    if is_cache_renamed():
        mixin = find_operator("fla.models.generation_utils", "FLAGenerationMixin")
        _replace(mixin, "prepare_inputs_for_generation", prepare_inputs_for_generation)
    return resolved


def resolve_backend(backend: str, device_type: str) -> str:
    """ "triton" or "reference" for a requested backend and a device type."""
    if backend not in BACKENDS:
        raise UserError(f"model.backend = {backend!r}; allowed: {', '.join(BACKENDS)}")
    if backend == "auto":
        return "triton" if device_type == "cuda" else "reference"
    if backend == "triton" and device_type != "cuda":
        raise UserError(f"model.backend = 'triton' needs a CUDA device, this is {device_type}; use 'reference'")
    return backend


def attention_in_use() -> Attention:
    """The attention that the last ``setup_backend`` put in place; its backend may be changed."""
    return _attention[0]


def runs_reference() -> bool:
    """Whether the reference operators are in place now; custom models with kernels of their own ask."""
    module_name, name, source = _FUNCTIONS[0]
    return "fla.models" in sys.modules and find_operator(module_name, name) is _reference(source, name)


def import_fla() -> None:
    """Import FLA without its start-up noise; its model classes register themselves with transformers."""
    if "fla.models" in sys.modules:
        return
    # Without flash_attn, a GPU or a torch build they like, FLA, torchao and others warn from a dozen places, through
    # warnings, loggers and prints; none of it is about this job.
    with quiet_third_party(), contextlib.redirect_stdout(io.StringIO()):
        importlib.import_module("fla.models")


def wrap_operator(module_name: str, name: str, wrap: Callable[[Callable], Callable]) -> None:
    """Put ``wrap(operator)`` in the place of an operator of FLA's, as the backend in use has it, until the next
    ``setup_backend``. ``name`` may be a method: ``RotaryEmbedding.forward``.

    Raises:
        UserError: this release of FLA has no such operator.
    """
    wrap_operators([(module_name, name, wrap)])


def wrap_operators(wraps: Iterable[tuple[str, str, Callable[[Callable], Callable]]]) -> None:
    """``wrap_operator`` for many, in one walk over FLA's modules. One that is returned as it is stays."""
    pairs = []
    for module_name, name, wrap in wraps:
        owner, _, method = name.partition(".")
        current = find_operator(module_name, owner)
        operator = getattr(current, method) if method else current
        wrapped = wrap(operator)
        if wrapped is operator:
            continue
        if method:
            _replace(current, method, wrapped)
        else:
            pairs.append((current, wrapped))
    _replace_everywhere(*pairs)


def find_operator(module_name: str, name: str) -> Any:
    """A function or class of FLA's, as the backend in use has it.

    Raises:
        UserError: this release of FLA has none of that name.
    """
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        fla = importlib.import_module("fla")
        raise UserError(
            f"flash-linear-attention {fla.__version__} has no {module_name}.{name}; flame replaces it and knows "
            "release 0.6. Install flash-linear-attention 0.6, or update flame/models/backend.py"
        ) from error


def fusible_operators() -> Iterator[tuple[str, str, Callable]]:
    """FLA's operators on single tokens and channels, such as norms: (module, name, plain PyTorch of the same)."""
    for module_name, name, source in _FUNCTIONS:
        if source.partition(":")[0] in _FUSIBLE:
            yield module_name, name, _reference(source, name)


def uninstall() -> None:
    """Put FLA's own functions back."""
    while _installed:
        namespace, name, original, existed = _installed.pop()
        if not existed:
            _delete(namespace, name)
        else:
            _assign(namespace, name, original)


def _install_reference() -> None:
    found = [(find_operator(module_name, name), _reference(source, name)) for module_name, name, source in _FUNCTIONS]
    _replace_everywhere(*found)
    for module_name, class_name, method, source in _METHODS:
        cls = find_operator(module_name, class_name)
        _replace(cls, method, _reference(source, method))


def _install_kernels() -> None:
    # Triton is there on Linux only.
    from flame.models import rotary_kernels, swiglu_kernels
    from flame.models.chunk_backward_kernels import make_chunk_bwd_dqkwg
    from flame.models.chunk_gla import make_chunk_gla
    from flame.models.convolutions import make_causal_conv1d_bwd, make_causal_conv1d_fwd
    from flame.models.delta_rule import RULE, make_chunk_gated_delta_rule_bwd, make_chunk_gated_delta_rule_fwd
    from flame.models.gated_norm import make_gated_rms_norm, make_layer_norm_gated_bwd

    activations, convolution = "fla.modules.activations.ops", "fla.modules.causal_conv1d.ops"
    wrap_operators(
        [
            ("fla.ops.gla", "chunk_gla", make_chunk_gla),
            (convolution, "causal_conv1d_fwd", make_causal_conv1d_fwd),
            (convolution, "causal_conv1d_bwd", make_causal_conv1d_bwd),
            (RULE, "chunk_gated_delta_rule_fwd", make_chunk_gated_delta_rule_fwd),
            (RULE, "chunk_gated_delta_rule_bwd", make_chunk_gated_delta_rule_bwd),
            (activations, "swiglu_fwd", swiglu_kernels.make_swiglu_forward),
            (activations, "swiglu_fwdbwd", swiglu_kernels.make_swiglu_backward),
            ("fla.modules.rotary", "rotary_embedding", rotary_kernels.make_rotary_embedding),
            ("fla.modules.norm.layernorm_gated", "rmsnorm_fn", make_gated_rms_norm),
            ("fla.modules.norm.fused_norm_gate", "layer_norm_gated_bwd", make_layer_norm_gated_bwd),
            *([("fla.ops.common.chunk_o", "chunk_bwd_dqkwg", make_chunk_bwd_dqkwg)] if needs_chunk_backward() else ()),
        ]
    )
    count = find_operator("fla.modules.norm.layernorm", "get_multiprocessor_count")
    for name in _NORM_MODULES:
        norms = importlib.import_module(name)
        _replace(norms, "get_multiprocessor_count", lambda device=0: NORM_PROGRAMS * count(device))


def needs_chunk_backward() -> bool:
    """Whether FLA would refuse the backward of its gated operators on this machine's GPU and Triton."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    if importlib.util.find_spec("tilelang") is not None:
        return False  # FLA dispatches to its tilelang kernel before it looks at Triton
    return (3, 4) <= _release(importlib.metadata.version("triton")) < (3, 7, 1)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"\d+(?:\.\d+)*", version).group().split("."))


def _install_tuning(shipped: bool) -> None:
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    _replace(autotuner, "_bench", bench_compiled(autotuner._bench))
    look_up = keep_plain_results(autotuner.check_disk_cache)
    _replace(autotuner, "check_disk_cache", use_shipped_results(look_up) if shipped else look_up)


def _install_attention(attention: Attention) -> None:
    for module_name in _ATTENTION_MODULES:
        module = importlib.import_module(module_name)
        find_operator(module_name, "flash_attn_func")
        _replace(module, "flash_attn_func", attention.dense)
        _replace(module, "flash_attn_varlen_func", attention.varlen)  # not even bound when flash_attn is missing


def _install_state_space(backend: str) -> None:
    causal_conv1d = find_operator("fla.modules.causal_conv1d", "causal_conv1d")  # by now the backend's
    if backend == "reference":
        selective_scan = _reference("selective_scan", "selective_scan")
        ssd = make_ssd(_reference("simple_gla", "chunk_simple_gla"))
    else:
        # Triton is there on Linux only.
        selective_scan = importlib.import_module("flame.models.selective_scan").selective_scan
        make_chunk_ssd = importlib.import_module("flame.models.chunk_ssd").make_chunk_ssd
        ssd = make_chunk_ssd(make_ssd(find_operator("fla.ops.simple_gla", "chunk_simple_gla")))
    # In the layers' modules, as FLA's own operators are, so that they can be wrapped there.
    mamba, mamba2 = (importlib.import_module(name) for name in ("fla.layers.mamba", "fla.layers.mamba2"))
    _replace(mamba, "selective_scan", selective_scan)
    _replace(mamba2, "ssd", ssd)
    for module, class_name, make in ((mamba, "Mamba", make_mamba_forward), (mamba2, "Mamba2", make_mamba2_forward)):
        _replace(logging.getLogger(module.__name__), "disabled", True)  # it would announce FLA's own fallbacks
        _replace(module, "causal_conv1d", causal_conv1d)
        _replace(find_operator(module.__name__, class_name), "forward", make(module))


def _reference(source: str, name: str) -> Callable:
    module_name, _, other_name = source.partition(":")
    return getattr(importlib.import_module(f"{_REFERENCE}.{module_name}"), other_name or name)


def _replace_everywhere(*pairs: tuple[Any, Any]) -> None:
    """Rebind originals to their replacements in every loaded FLA module, and in their tables (ACT2FN)."""
    replacements = {id(original): replacement for original, replacement in pairs}
    for module_name, module in list(sys.modules.items()):
        if module is None or not (module_name == "fla" or module_name.startswith("fla.")):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in replacements:
                _replace(module, name, replacements[id(value)])
            elif isinstance(value, dict) and name.isupper():
                for key, entry in list(value.items()):
                    if id(entry) in replacements:
                        _replace(value, key, replacements[id(entry)])


def _replace(namespace: Any, name: Any, replacement: Any) -> None:
    table = namespace if isinstance(namespace, dict) else vars(namespace)
    _installed.append((namespace, name, table.get(name), name in table))
    _assign(namespace, name, replacement)


def _assign(namespace: Any, name: Any, value: Any) -> None:
    if isinstance(namespace, dict):
        namespace[name] = value
    else:
        setattr(namespace, name, value)


def _delete(namespace: Any, name: Any) -> None:
    if isinstance(namespace, dict):
        del namespace[name]
    else:
        delattr(namespace, name)
