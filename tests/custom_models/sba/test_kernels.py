"""The Triton kernels against plain PyTorch: interpreted on the CPU here, and on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.custom_models.sba.cases import CASES, GPU_CASES, check_case, check_isolation, inputs, run
from tests.runs.harness import ROOT


def test_interpreted_kernels_agree_with_the_reference_in_float64():
    # Triton decides at its import whether it compiles or interprets, so that this needs a process of its own.
    done = subprocess.run(
        [sys.executable, "-m", "tests.custom_models.sba.cases"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == [*CASES, "isolation"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_float32_on_a_gpu(name):
    check_case(name, "cuda", torch.float32, tolerance=3e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_bfloat16_on_a_gpu(name):
    check_case(name, "cuda", torch.bfloat16, tolerance=2e-2)


@pytest.mark.gpu
def test_documents_on_a_gpu_do_not_touch_each_other():
    check_isolation("cuda", block=64)


@pytest.mark.gpu
def test_the_same_bits_twice_on_a_gpu():
    from custom_models.sba.kernels import stick_breaking_kernel

    case = inputs(seq_len=1000, head_dim=64, device="cuda", dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([0, 10, 500, 1000], dtype=torch.int32, device="cuda")
    one, other = (run(stick_breaking_kernel, case, cu_seqlens) for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
