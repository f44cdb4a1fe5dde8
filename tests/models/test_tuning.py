"""Kernels are compiled here as for a GPU, which needs none; what only a GPU can time is timed by a stand-in."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)
triton = pytest.importorskip("triton")

from triton.runtime.autotuner import Autotuner  # noqa: E402

from flame.models import tuning  # noqa: E402
from flame.models.backend import import_fla  # noqa: E402
from flame.models.tuning import (  # noqa: E402
    bench_compiled,
    compile_ahead,
    keep_plain_results,
    num_compilers,
    spills,
    tasks_of,
)
from tests.models.tuned_kernel import SIZES, add_kernel, bench_by_order, compiled, make_tuner, tune  # noqa: E402


def test_all_candidates_are_compiled_before_the_first_is_timed(hopper):
    seen = []

    def bench(launch, quantiles):
        seen.append(compiled(hopper))
        return [float(len(seen))] * 3

    tuner = make_tuner(offset=1, do_bench=bench)
    tune(tuner)
    # One of the three cannot be compiled, which is the autotuner's to find out.
    assert seen == [2, 2, 2]
    assert tuner.best_config.kwargs["B"] == 64


def test_what_was_tuned_before_is_neither_compiled_nor_timed(hopper):
    timed = []
    tune(make_tuner(offset=2, do_bench=bench_by_order(timed)))
    num_compiled, num_timed = compiled(hopper), len(timed)
    again = make_tuner(offset=2, do_bench=bench_by_order(timed))
    tune(again)
    assert (compiled(hopper), len(timed)) == (num_compiled, num_timed)
    assert again.best_config.kwargs["B"] == 64


def test_what_json_cannot_hold_is_tuned_each_time(hopper, monkeypatch):
    monkeypatch.setattr(Autotuner, "check_disk_cache", keep_plain_results(Autotuner.check_disk_cache))
    timed = []
    for number in (1, 2):
        configs = [triton.Config({"B": size}) for size in SIZES]
        bench = bench_by_order(timed)
        tuner = triton.autotune(configs, key=["n", "OFFSET"], cache_results=True, do_bench=bench)(add_kernel)
        x = torch.empty(512)
        tuner.run(x, x, 512, OFFSET=triton.language.constexpr(7), grid=(8,), warmup=True)
        assert (len(timed), tuner.best_config.kwargs["B"]) == (3 * number, 64)
    assert not list(hopper.glob("*/*.autotune.json"))
    tune(make_tuner(offset=7, do_bench=bench_by_order(timed)))
    assert len(list(hopper.glob("*/*.autotune.json"))) == 1


def test_timing_is_short_unless_the_kernel_has_its_own(hopper, monkeypatch):
    given = []

    def do_bench(launch, **options):
        given.append(options)
        return [1.0] * 3

    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    tune(make_tuner(offset=3))
    assert given == [{"warmup": tuning.WARMUP_MS, "rep": tuning.TIMED_MS, "quantiles": (0.5, 0.2, 0.8)}] * 3


def test_what_cannot_be_compiled_together_is_tuned_as_triton_does(hopper, monkeypatch):
    monkeypatch.setattr(tuning, "compile_candidates", None)  # calling it is an error
    timed = []
    tuner = make_tuner(offset=9, do_bench=bench_by_order(timed))
    tune(tuner)
    assert (len(timed), tuner.best_config.kwargs["B"]) == (3, 64)


def test_what_is_compiled_ahead_is_not_compiled_again(hopper):
    tuner = make_tuner(offset=5, do_bench=bench_by_order([]))
    x = torch.empty(512, device="meta")
    tasks = list(tasks_of(tuner, (x, x, 512), {}))
    assert [(task.name, task.is_tuned, task.options["B"]) for task in tasks] == [
        ("add_kernel", True, size) for size in SIZES
    ]
    compile_ahead(tasks, 2)
    made = {path: path.stat().st_mtime_ns for path in hopper.glob("*/*.cubin")}
    assert len(made) == 2  # the third is left for the run to find out
    tune(tuner)
    assert {path: path.stat().st_mtime_ns for path in hopper.glob("*/*.cubin")} == made
    # What was chosen is all that another run has to compile.
    (task,) = tasks_of(make_tuner(offset=5), (x, x, 512), {})
    assert (task.options["B"], task.is_tuned) == (64, False)


def test_tasks_are_told_apart_by_what_they_compile_to(hopper):
    def keys(*args):
        return {task.key for task in tasks_of(add_kernel, args, {"OFFSET": 1, "B": 64})}

    x, y = torch.empty(512, device="meta"), torch.empty(64, device="meta")
    assert keys(x, x, 512) == keys(y, x, 512)
    assert keys(x, x, 512) != keys(x, x, 256)
    assert keys(x, x, 512) != keys(x.bfloat16(), x, 512)


def test_heuristics_around_a_tuned_kernel_choose_as_in_a_launch(hopper):
    configs = [triton.Config({"B": size}) for size in SIZES[:2]]
    tuned = triton.autotune(configs, key=["n"])(add_kernel)
    kernel = triton.heuristics({"OFFSET": lambda named: named["n"] + 1})(tuned)
    x = torch.empty(512, device="meta")
    assert [task.options["OFFSET"] for task in tasks_of(kernel, (x, x, 512), {})] == [513, 513]


@pytest.fixture
def fla():
    """FLA, which looks at the device when it is imported: before ``hopper`` puts a stand-in there."""
    import_fla()


def test_candidates_whose_threads_hold_too_much_are_left_out(fla, hopper, monkeypatch):
    from fla.modules.activations.ops import swiglu_fwdbwd_kernel

    swiglu = swiglu_fwdbwd_kernel.fn  # inside heuristics
    left_out = {(each.kwargs["B"], each.num_warps) for each in swiglu.configs if spills(swiglu, each)}
    assert left_out == {(4096, 1), (8192, 1), (8192, 2)}
    tuner = make_tuner(offset=6)
    assert not any(spills(tuner, each) for each in tuner.configs)
    timed = []
    monkeypatch.setattr(tuning, "spills", lambda tuner, config: config.kwargs["B"] == 64)
    tuner = make_tuner(offset=6, do_bench=bench_by_order(timed))
    tune(tuner)
    assert (len(timed), tuner.best_config.kwargs["B"]) == (2, 128)


def test_processes_of_a_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    for processes, expected in (("1", 16), ("4", 4), ("32", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert num_compilers() == expected


@pytest.mark.gpu
def test_tuning_on_a_gpu_chooses_a_kernel_that_is_right(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Autotuner, "_bench", bench_compiled(Autotuner._bench))
    x = torch.rand(512, device="cuda")
    y = torch.empty_like(x)
    tuner = make_tuner(offset=4)
    tuner[lambda options: (triton.cdiv(512, options["B"]),)](x, y, 512)
    assert torch.equal(y, x + 4)
    assert compiled(tmp_path) == 2
    assert tuner.best_config.kwargs["B"] in (64, 128)
