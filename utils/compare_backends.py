"""Compare flame's reference operators with FLA's Triton kernels, forward and every gradient.

    python utils/compare_backends.py --output docs/numerics_table.md

Every operator (utils/operator_cases) and the debug models (configs/debug/*.json) run on the same inputs in float32 and
bfloat16 with both backends, and in float64 with the reference one, which is the truth here. The table holds relative
errors |a - b| / |b| in the Euclidean norm: of each backend against the truth, and of the two against each other.
Without a GPU the Triton columns stay empty.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from operator_cases import operators
from operator_cases.case import CU_SEQLENS, HEAD_DIM, NUM_TOKENS
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from flame.models.attention import make_attention
from flame.models.backend import setup_backend
from flame.models.loss import attach_training_forward
from flame.models.model_config import load_model_config
from flame.paths import find_resource

DEBUG_MODELS = sorted(path.stem for path in find_resource("configs/debug").glob("*.json"))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# FLA's delta rule and stick-breaking layer refuse float32.
NEED_HALF = ("delta_net", "stickbreaking_attn")


@dataclass
class Row:
    """Relative errors of one tensor of one case in one dtype; None where a backend does not run."""

    case: str
    dtype: str
    tensor: str
    reference: float
    triton: float | None = None
    between: float | None = None


def run_operator(
    call: Callable, function: Callable, inputs: dict[str, Tensor], dtype: torch.dtype, device: torch.device,
    backward: bool = True,
) -> dict[str, Tensor]:  # fmt: skip
    """Outputs, and the gradients of the inputs for a fixed random cotangent, by name."""
    inputs = {name: x.detach().clone().to(device, dtype).requires_grad_() for name, x in inputs.items()}
    outputs = call(function, inputs)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    tensors = {f"output {i}" if len(outputs) > 1 else "output": y.detach() for i, y in enumerate(outputs)}
    if backward:
        generator = torch.Generator().manual_seed(1)
        cotangents = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in outputs]
        torch.autograd.backward(outputs, cotangents)
        tensors |= {f"d {name}": x.grad for name, x in inputs.items()}
    return tensors


def relative_error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def rows_of(case: str, dtype: str, truth: dict, reference: dict, triton: dict | None) -> list[Row]:
    """One row a tensor; Triton's columns stay empty for tensors that it did not give."""
    rows = []
    for name, expected in truth.items():
        row = Row(case, dtype, name, relative_error(reference[name], expected))
        if triton is not None and name in triton:
            row.triton = relative_error(triton[name], expected)
            row.between = relative_error(reference[name], triton[name])
        rows.append(row)
    return rows


def compare_operator(index: int, device: torch.device) -> list[Row]:
    """The operator at an index of `operators`; FLA's own functions must be in place while this runs."""
    rows, operator = [], operators(device)[index]
    reference = getattr(importlib.import_module(f"flame.models.reference.{operator.reference}"), operator.name)
    for dtype_name, dtype in DTYPES.items():
        rounded = {name: x.to(dtype).double() for name, x in operator.inputs.items()}
        truth = run_operator(operator.call, reference, rounded, torch.float64, device)
        low = run_operator(operator.call, reference, rounded, dtype, device)
        triton = None
        if device.type == "cuda" and (operator.float32 or dtype != torch.float32):
            kernel = getattr(importlib.import_module(operator.home), operator.name)
            triton = run_operator(operator.call, kernel, rounded, dtype, device, operator.backward)
        rows += rows_of(operator.name + operator.label, dtype_name, truth, low, triton)
    return rows


def compare_attention(device: torch.device) -> list[Row]:
    """Torch's varlen attention (the Triton columns) and SDPA (the reference's), with grouped queries and a window."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (NUM_TOKENS, 8, HEAD_DIM), "k": (NUM_TOKENS, 4, HEAD_DIM), "v": (NUM_TOKENS, 4, HEAD_DIM)}
    inputs = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    cu = torch.tensor(CU_SEQLENS, dtype=torch.int32, device=device)
    rows = []
    for case, window in {"attention": (-1, -1), "attention, window of 64": (63, 0)}.items():

        def call(attend, x, window=window):
            longest = max(b - a for a, b in itertools.pairwise(CU_SEQLENS))
            return attend(x["q"], x["k"], x["v"], cu, cu, longest, longest, causal=True, window_size=window)

        for dtype_name, dtype in DTYPES.items():
            rounded = {name: x.to(dtype).double() for name, x in inputs.items()}
            _, sdpa = make_attention("sdpa")
            _, varlen = make_attention("varlen")
            truth = run_operator(call, sdpa, rounded, torch.float64, device)
            low = run_operator(call, sdpa, rounded, dtype, device)
            runs_kernel = device.type == "cuda" and dtype != torch.float32
            kernel = run_operator(call, varlen, rounded, dtype, device) if runs_kernel else None
            rows += rows_of(case, dtype_name, truth, low, kernel)
    return rows


def compare_model(family: str, device: torch.device) -> list[Row]:
    """The loss of one training step and every parameter's gradient; layers of a kind share a row, the worst counts."""
    setup_backend("reference", device.type, "sdpa")
    path = f"configs/debug/{family}.json"
    config = load_model_config(SimpleNamespace(config=path, norm_type="", trust_remote_code=False))
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    attach_training_forward(model).train()
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    ids = torch.randint(config.vocab_size, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(0)).to(device)
    rows = []
    for dtype_name, dtype in DTYPES.items():
        rounded = {name: x.to(dtype) for name, x in weights.items()}
        truth = _model_result(model, rounded, torch.float64, ids)
        low = _model_result(model, rounded, dtype, ids)
        triton = None
        if device.type == "cuda" and not (family in NEED_HALF and dtype == torch.float32):
            setup_backend("triton", device.type, "varlen", context_len=NUM_TOKENS)
            triton = _model_result(model, rounded, dtype, ids)
            setup_backend("reference", device.type, "sdpa")
        rows += _merge_layers(rows_of(f"model {family}", dtype_name, truth, low, triton))
    return rows


def _model_result(model: nn.Module, weights: dict[str, Tensor], dtype: torch.dtype, ids: Tensor) -> dict:
    model.to(dtype)
    model.load_state_dict(weights)
    for module in model.modules():  # position tables are kept in the dtype of an earlier run
        if hasattr(module, "_seq_len_cached"):
            module._seq_len_cached, module._cos_cached = 0, None
    model.zero_grad()
    cu_seqlens = torch.tensor(CU_SEQLENS, dtype=torch.int32, device=ids.device)
    loss = model(ids, labels=ids.roll(-1), cu_seqlens=cu_seqlens)
    loss.backward()
    gradients = {f"d {name}": p.grad.clone() for name, p in model.named_parameters()}
    return {"loss": loss.detach()} | gradients


def _merge_layers(rows: list[Row]) -> list[Row]:
    merged: dict[str, Row] = {}
    for row in rows:
        row.tensor = ".".join("*" if part.isdigit() else part for part in row.tensor.split("."))
        worst = merged.setdefault(row.tensor, row)
        for column in ("reference", "triton", "between"):
            values = [v for v in (getattr(worst, column), getattr(row, column)) if v is not None]
            setattr(worst, column, max(values) if values else None)
    return list(merged.values())


def skip_tuning() -> None:
    """Give every FLA kernel its first configuration only: tuning takes minutes and changes speed, not the question."""
    from triton.runtime.autotuner import Autotuner

    for name, module in list(sys.modules.items()):
        if not name.startswith("fla.") or module is None:
            continue
        for kernel in list(vars(module).values()):
            while kernel is not None and not isinstance(kernel, Autotuner) and hasattr(kernel, "run"):
                kernel = getattr(kernel, "fn", None)
            if isinstance(kernel, Autotuner):
                kernel.configs = kernel.configs[:1]


def markdown(rows: list[Row]) -> str:
    """The table, one line a tensor."""

    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.1e}"

    lines = [
        "| case | dtype | tensor | reference vs float64 | Triton vs float64 | reference vs Triton |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (row.case, row.dtype, row.tensor, cell(row.reference), cell(row.triton), cell(row.between))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def compare(name: str, device_name: str) -> list[Row]:
    """One case: an operator's index, "attention" or "model FAMILY"."""
    device = torch.device(device_name)
    if device.type == "cuda":
        setup_backend("triton", "cuda", "varlen", context_len=NUM_TOKENS)
        skip_tuning()
    if name == "attention":
        return compare_attention(device)
    if name.startswith("model "):
        return compare_model(name.removeprefix("model "), device)
    return compare_operator(int(name), device)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the markdown table here too")
    parser.add_argument(
        "--models", default=",".join(DEBUG_MODELS), help="debug models, comma-separated; empty for none"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=8, help="processes that share the GPU; compiling takes the time")
    options = parser.parse_args(arguments)
    names = [str(index) for index in range(len(operators(torch.device("cpu"))))] + ["attention"]
    names += [f"model {family}" for family in options.models.split(",") if family]
    run = partial(compare, device_name=options.device)
    if options.device == "cpu" or options.jobs == 1:
        rows = [row for name in names for row in run(name)]
    else:
        with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            # The models take longest: first in, last in the table.
            results = dict(zip(reversed(names), pool.map(run, reversed(names)), strict=True))
        rows = [row for name in names for row in results[name]]
    table = markdown(rows)
    print(table)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(table)


if __name__ == "__main__":
    main()
