"""The Triton kernels against the reference: on a GPU, and on any machine in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from flame.models.reference.selective_scan import selective_scan as reference
from flame.models.selective_scan import CHUNK_SIZE, selective_scan
from tests.models.reference.recurrences import assert_nan_stays_in_its_document, assert_same_with_gradients
from tests.models.reference.test_selective_scan import TOKENS, chunked, make_inputs

# A one-token document, an empty one, one of a whole chunk, one of a chunk and a token.
SMALL = (0, 1, 4, 4, 4 + CHUNK_SIZE, 5 + 2 * CHUNK_SIZE)
CASES = {
    "mild": dict(bounds=SMALL),
    "strong": dict(bounds=(0, 3, 40), decay="strong"),
    "weak": dict(bounds=(0, 3, 40), decay="weak"),
    "ragged": dict(bounds=(0, 7, 30), num_channels=5, state_size=3),
    "blocks": dict(bounds=(0, 7, 12), num_channels=150, state_size=16),
    "plain": dict(bounds=(0, 5, 12), leave_out=("D", "z", "dt_bias", "initial_state")),
}


def release(package):
    return tuple(int(part) for part in version(package).split(".")[:2])


def check_case(device, bounds, leave_out=(), **options):
    inputs = {name: x.to(device) for name, x in make_inputs(bounds, **options).items() if name not in leave_out}
    cotangent_device = torch.device(device)

    def run(scan):
        def on_device(**tensors):
            y, final = scan(**tensors)
            return y.to("cpu"), final.to("cpu")

        return on_device

    assert_same_with_gradients(
        run(chunked(bounds, selective_scan, cotangent_device)),
        run(chunked(bounds, reference, cotangent_device)),
        inputs,
        2e-5,
        torch.float32,
    )


def check_rows_and_views(device):
    """Two rows without bounds; gates and B, C that are slices of a wider tensor, as in the layer."""
    inputs = {name: x.float().to(device) for name, x in make_inputs((0, 20, 40)).items()}
    rows = {name: x.unflatten(0, (2, 20)) if name in TOKENS else x for name, x in inputs.items()}
    wide = torch.cat([rows["B"], rows["C"], rows["z"]], dim=-1)
    views = dict(zip("BCz", wide.split([4, 4, 6], dim=-1), strict=True))
    y, final = selective_scan(**(rows | views), output_final_state=True)
    expected, expected_final = reference(**rows, output_final_state=True)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(final, expected_final, rtol=1e-5, atol=1e-5)
    assert selective_scan(**rows)[1] is None


def check_isolation(device):
    bounds = (0, 5, 20, 30)
    inputs = {name: x.to(device) for name, x in make_inputs(bounds).items()}
    run = chunked(bounds, selective_scan, device)
    assert_nan_stays_in_its_document(run, inputs, TOKENS, bounds, document=1)


def check_everything(device):
    for name, options in CASES.items():
        print(name, flush=True)
        check_case(device, **options)
    check_rows_and_views(device)
    check_isolation(device)


@pytest.mark.skipif(
    release("triton") < (3, 7) and release("numpy") >= (2, 4),
    reason="numpy 2.4 no longer takes the loop bounds that the interpreter of Triton 3.6 gives it",
)
def test_kernels_in_the_interpreter():
    """The interpreter must be chosen before triton is imported, so it has a process of its own."""
    code = "from tests.models.test_selective_scan_operator import check_everything; check_everything('cpu')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_the_reference(name):
    check_case("cuda", **CASES[name])


@pytest.mark.gpu
def test_memory_of_a_long_row():
    """A state [2048, 16] for each token would take 8 GiB; outputs are 256 MiB."""
    num_tokens, num_channels, state_size = 65536, 2048, 16
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        tensor = torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        return tensor.requires_grad_()

    inputs = {name: draw(1, num_tokens, num_channels) for name in ("x", "dt", "z")}
    inputs |= {name: draw(1, num_tokens, state_size) for name in "BC"}
    A = -torch.arange(1.0, state_size + 1, device="cuda").repeat(num_channels, 1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y, _ = selective_scan(**inputs, A=A.requires_grad_(), D=draw(num_channels), dt_bias=draw(num_channels))
    kept = torch.cuda.memory_allocated() - before
    y.sum().backward()
    assert kept < 1.6 * y.numel() * y.element_size()
    assert torch.cuda.max_memory_allocated() - before < 12 * y.numel() * y.element_size()
    assert all(torch.isfinite(x.grad).all() for x in [A, *inputs.values()])


@pytest.mark.gpu
def test_rows_views_and_isolation():
    check_rows_and_views("cuda")
    check_isolation("cuda")
