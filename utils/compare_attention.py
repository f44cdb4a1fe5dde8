"""Time every attention backend that is available here, forward and backward, on the shapes of some models.

    python utils/compare_attention.py --json attention.json
    python utils/compare_attention.py --configs configs/hybrid_340M.json --seq_len 16384 --backends varlen,flex

One layer's attention over a packed row in bfloat16, as training computes it, and as `--model.attention_backend auto`
measures it (flame/models/attention_speed.py). The first backend says what is right: others whose outputs or gradients
differ have no figures. TFLOP/s count the pairs of query and key that see each other, and 2.5 times as much backward.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from a checkout, flame need not be installed

from flame.errors import UserError  # noqa: E402
from flame.models.attention import (  # noqa: E402
    available_attention_backends,
    default_attention_backend,
    resolve_attention_backend,
)
from flame.models.attention_choice import attention_layers  # noqa: E402
from flame.models.attention_speed import (  # noqa: E402
    BACKWARD_PRODUCTS,
    AttentionShape,
    Timing,
    as_plain,
    measure_all,
)
from flame.models.backend import import_fla  # noqa: E402
from flame.models.model_config import load_model_config  # noqa: E402
from utils.arguments import output_file, positive  # noqa: E402

CONFIGS = ",".join(f"configs/transformer_{size}.json" for size in ("340M", "1B", "7B"))
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
COLUMNS = ("backend", "forward ms", "backward ms", "forward TFLOP/s", "backward TFLOP/s", "memory MiB")
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def shapes_of(options: argparse.Namespace) -> Iterator[tuple[str, AttentionShape]]:
    """Each config's softmax layers, once for each shape.

    Raises:
        UserError: a config that cannot be read, or has none.
    """
    import_fla()
    for path in options.configs.split(","):
        config = load_model_config(SimpleNamespace(config=path, norm_type="", trust_remote_code=False))
        layers = attention_layers(
            config, num_rows=1, num_tokens=options.seq_len, document_len=min(options.context_len, options.seq_len)
        )
        if not layers:
            raise UserError(f"--configs {path}: this model has no softmax attention that flame computes; leave it out")
        for shape in layers:
            yield Path(path).stem, shape


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """All figures, as plain data; prints a table for each shape as soon as it is measured.

    Raises:
        UserError: a backend that is not available, or a config without softmax attention.
    """
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU here; use cpu")
    available = available_attention_backends(device.type)
    default = default_attention_backend(device.type)
    names = options.backends.split(",") if options.backends else [default, *sorted(set(available) - {default})]
    names = [resolve_attention_backend(name, device.type) for name in names]
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    rows = []
    for model, shape in list(shapes_of(options)):
        print(f"\n{model}: {shape.describe()}, {options.dtype} on {card}\n\n{HEADER}")
        for name, result in measure_all(shape, names, device, DTYPES[options.dtype]).items():
            print(line_of(name, shape, result))
            shown = as_plain(result) if isinstance(result, str) else as_plain(result) | rates_of(shape, result)
            rows.append({"model": model, "shape": vars(shape), "backend": name} | shown)
    return {"device": card, "torch": torch.__version__, "dtype": options.dtype, "rows": rows}


def rates_of(shape: AttentionShape, timing: Timing) -> dict[str, float]:
    """TFLOP/s of both directions."""
    flops = shape.forward_flops()
    return {
        "forward_tflops": flops / timing.forward_ms / 1e9,
        "backward_tflops": BACKWARD_PRODUCTS * flops / timing.backward_ms / 1e9,
    }


def line_of(name: str, shape: AttentionShape, result: Timing | str) -> str:
    """A row of the table."""
    if isinstance(result, str):
        return f"| {name} | {result.replace('|', '/')} | | | | |"
    rates = rates_of(shape, result)
    memory = "" if result.memory_bytes is None else f"{result.memory_bytes / 2**20:,.0f}"
    figures = (result.forward_ms, result.backward_ms, rates["forward_tflops"], rates["backward_tflops"])
    return f"| {name} | {' | '.join(f'{figure:.4g}' for figure in figures)} | {memory} |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", default=CONFIGS, help="model configs, comma-separated")
    parser.add_argument("--seq_len", type=positive, default=65_536, help="tokens of the packed row")
    parser.add_argument("--context_len", type=positive, default=4_096, help="tokens of its longest documents")
    parser.add_argument("--backends", default="", help="comma-separated, the first is right; all that are available")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--json", type=output_file, help="write the figures here too")
    options = parser.parse_args(arguments)
    try:
        result = compare(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
