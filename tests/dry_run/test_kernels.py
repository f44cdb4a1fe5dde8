"""The kernels of a job are found without running it."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist

from flame.cli.parse import parse_args
from flame.models.backend import import_fla, uninstall
from tests.hopper import compile_for_hopper

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)
triton = pytest.importorskip("triton")

JOB = ["--model.config", "configs/debug/gla.json", "--model.tokenizer_path", "configs/tokenizer"]
JOB += ["--training.dataset", "builtin:stdlib", "--training.varlen", "--training.seq_len", "512"]


@pytest.fixture
def hopper(tmp_path, monkeypatch):
    """A Hopper GPU to plan for, with an empty cache."""
    import_fla()  # which looks at the device
    compile_for_hopper(tmp_path, monkeypatch)
    yield
    uninstall()


def test_a_jobs_kernels_are_found_and_compiled(hopper, monkeypatch):
    from flame.dry_run import kernels

    compiled, processes = [], []

    def compile_ahead(tasks, num_processes):
        compiled.extend(tasks)
        processes.append(num_processes)

    monkeypatch.setattr(kernels, "compile_ahead", compile_ahead)
    monkeypatch.setattr(kernels, "num_compilers", lambda: 128)
    monkeypatch.setattr(kernels, "available_memory", lambda: 5 * 2**30)
    try:
        told = kernels.compile_kernels(parse_args(JOB), 1)
    finally:
        dist.destroy_process_group()
    names = {task.name for task in compiled}
    assert {
        "chunk_fwd_kernel_h",
        "chunk_bwd_kernel_dh",
        "swiglu_backward_kernel",
        "layer_norm_bwd_kernel",
    } - names == set()
    assert processes == [5]  # the host's memory has no room for more
    assert len({task.key for task in compiled}) == len(compiled)
    assert [task.is_tuned for task in compiled] == sorted((task.is_tuned for task in compiled), reverse=True)
    assert told == f"{len(compiled)} forms of {len(names)} kernels"


def test_a_gated_delta_nets_backward_takes_the_kernels_that_flame_chose(hopper, monkeypatch):
    """They are reached through FLA's layers, and compile."""
    from flame.dry_run.kernels import planned_kernels
    from flame.models import backend

    monkeypatch.setattr(backend, "needs_chunk_backward", lambda: True)  # as with Triton before 3.7.1
    job = [option.replace("gla.json", "gated_deltanet.json") for option in JOB]
    try:
        tasks = planned_kernels(parse_args(job), 1)
    finally:
        dist.destroy_process_group()
    homes = {task.name: task.kernel.fn.__module__ for task in tasks if not task.is_tuned}
    assert homes["causal_conv1d_bwd_kernel"] == "fla.modules.causal_conv1d.backends.gluon"
    assert homes["chunk_gradient_kernel"] == "flame.models.chunk_backward_kernels"
    for task in tasks:
        if task.name in ("causal_conv1d_bwd_kernel", "chunk_gradient_kernel"):
            assert task.kernel.run(*task.args, **task.options).metadata.shared < 227 * 1024


def test_wide_heads_of_gated_delta_nets_take_flames_kernels(hopper):
    """Matrices that come as descriptors are planned and compiled as others."""
    from flame.dry_run.kernels import planned_kernels

    job = [option.replace("debug/gla.json", "gated_deltanet_340M.json") for option in JOB]
    try:
        tasks = planned_kernels(parse_args([*job, "--training.mixed_precision_param", "bfloat16"]), 1)
    finally:
        dist.destroy_process_group()
    own = {"delta_prepare_kernel", "delta_state_kernel", "delta_state_gradient_kernel", "delta_gradient_kernel"}
    names = [task.name for task in tasks]
    assert own - set(names) == set()
    assert names.count("delta_state_kernel") == 2  # for the outputs, and for the states
    assert not {name for name in names if name.startswith("chunk_gated_delta_rule") and "kkt" not in name}
    for task in tasks:
        if task.name in own:
            assert task.kernel.run(*task.args, **task.options).metadata.shared <= 227 * 1024


def test_mamba2s_scan_takes_flames_kernels(hopper):
    from flame.dry_run.kernels import planned_kernels

    job = [option.replace("debug/gla.json", "mamba2_340M.json") for option in JOB]
    try:
        tasks = planned_kernels(parse_args([*job, "--training.mixed_precision_param", "bfloat16"]), 1)
    finally:
        dist.destroy_process_group()
    names = {task.name for task in tasks}
    assert {"ssd_forward_kernel", "ssd_backward_kernel", "ssd_gradient_kernel"} - names == set()
    assert not {name for name in names if name.startswith("chunk_")}


@pytest.mark.parametrize("family", ["transformer", "gla", "gated_deltanet"])
def test_what_is_tuned_does_not_depend_on_how_many_documents_a_row_has(family, hopper):
    from triton.runtime.autotuner import Autotuner, Heuristics

    from flame.dry_run.plan import plan_job
    from flame.models.without_kernels import observed_launches

    def tuned(context_len: int) -> set[tuple]:
        keys = set()

        def observe(kernel, args, options):
            while isinstance(kernel, Heuristics):
                named = dict(zip(kernel.arg_names, args, strict=False)) | options
                options = options | {name: choose(named) for name, choose in kernel.values.items()}
                kernel = kernel.fn
            if isinstance(kernel, Autotuner):
                named = dict(zip(kernel.arg_names, args, strict=False)) | options
                dtypes = [str(named[name].dtype) for name in kernel.arg_names if hasattr(named.get(name), "dtype")]
                keys.add((kernel.base_fn.__name__, *(named.get(name) for name in kernel.keys), *dtypes))

        words = ["--model.config", f"configs/debug/{family}.json", "--training.context_len", str(context_len)]
        with observed_launches(observe):
            plan_job(parse_args([*words, *JOB[2:]]), 1)
        dist.destroy_process_group()
        return keys

    keys = tuned(512)
    assert len(keys) >= 4
    assert tuned(7) == keys  # 74 documents instead of one
