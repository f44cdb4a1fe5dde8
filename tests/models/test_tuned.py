"""Shipped tuning results: taken where nothing was measured here, and only while the kernel has the candidate."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from flame.errors import UserError

triton = pytest.importorskip("triton")

from triton.runtime.autotuner import Autotuner  # noqa: E402

from flame.models import tuned  # noqa: E402
from flame.models.tuned import key_text, read_results, shipped_choice, use_shipped_results  # noqa: E402
from flame.models.tuning import tasks_of  # noqa: E402
from tests.models.tuned_kernel import add_kernel, bench_by_order, compiled, make_tuner, tune  # noqa: E402

KEY = [512, "torch.float32", "torch.float32"]


@pytest.fixture
def ship(hopper, monkeypatch):
    """Have results for the test's kernel ship; returns a function that takes the fastest candidate's options."""
    monkeypatch.setattr(Autotuner, "check_disk_cache", use_shipped_results(Autotuner.check_disk_cache))

    def ship(**fastest):
        folder = hopper / "shipped"
        folder.mkdir()
        entry = {"key": KEY, "fastest": {"num_warps": 4, "num_stages": 3, "num_ctas": 1} | fastest}
        (folder / "sm_90.json").write_text(json.dumps({"kernels": {"add_kernel": [entry]}}))
        monkeypatch.setattr(tuned, "FOLDER", folder)

    return ship


def test_a_shipped_result_spares_the_tuning(ship, hopper):
    ship(OFFSET=2, B=128)
    timed = []
    tuner = make_tuner(offset=2, do_bench=bench_by_order(timed))
    tune(tuner)
    assert (tuner.best_config.kwargs["B"], timed, compiled(hopper)) == (128, [], 1)
    assert not list(hopper.glob("*/*.autotune.json")), "nothing was measured"


def test_what_this_machine_has_measured_goes_first(ship, hopper):
    tune(make_tuner(offset=3, do_bench=bench_by_order([])))
    ship(OFFSET=3, B=128)
    timed = []
    tuner = make_tuner(offset=3, do_bench=bench_by_order(timed))
    tune(tuner)
    assert (tuner.best_config.kwargs["B"], timed) == (64, [])


@pytest.mark.parametrize("fastest", [{"OFFSET": 4, "B": 32}, {"OFFSET": 4, "B": 64, "num_warps": 2}, {"B": 64}])
def test_a_candidate_that_the_kernel_has_no_more_is_not_taken(ship, fastest):
    ship(**fastest)
    timed = []
    tune(make_tuner(offset=4, do_bench=bench_by_order(timed)))
    assert len(timed) == 3


def test_other_arguments_are_tuned(ship, hopper):
    ship(OFFSET=5, B=128)
    timed = []
    tuner = make_tuner(offset=5, do_bench=bench_by_order(timed))
    x = torch.empty(256)
    tuner.run(x, x, 256, grid=(8,), warmup=True)
    assert len(timed) == 3


def test_one_candidate_is_compiled_ahead(ship):
    ship(OFFSET=6, B=128)
    x = torch.empty(512)
    (task,) = tasks_of(make_tuner(offset=6), (x, x, 512), {})
    assert (task.options["B"], task.is_tuned) == (128, False)


def test_no_two_keys_that_json_cannot_hold_are_alike():
    assert key_text([1, add_kernel]) != key_text([1, object()])
    assert key_text((1, "a")) == key_text([1, "a"])


def test_a_card_without_shipped_results_tunes(monkeypatch):
    target = SimpleNamespace(backend="hip", arch="gfx942")
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_target=lambda: target))
    assert shipped_choice("add_kernel", KEY, []) is None
    target.backend, target.arch = "cuda", 1
    assert shipped_choice("add_kernel", KEY, []) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"measured": {}}', '{"kernels": {"a": [{"key": []}]}}', "\xff"])
def test_a_damaged_file_is_named(tmp_path, text):
    path = tmp_path / "sm_90.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"sm_90\.json holds no tuning results .*no-shipped_tuning"):
        read_results(path)


def add_to_cache(cache, key, timings):
    """Have Triton's cache hold a result: (size, milliseconds) of candidates."""
    configs = [
        [{"kwargs": {"B": size}, "num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None}, [ms] * 3]
        for size, ms in timings
    ]
    cache.mkdir(parents=True)
    (cache / "add_kernel.autotune.json").write_text(json.dumps({"key": key, "configs_timings": configs}))


def collect(cache, output):
    """Start the collector."""
    command = [sys.executable, "utils/collect_tuning.py", "--cache", str(cache), "--output", str(output)]
    options = ["--arch", "90", "--card", "NVIDIA H200"]
    return subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_shipped_file_is_what_the_collector_writes(tmp_path):
    shipped = tuned.FOLDER / "sm_90.json"
    results = read_results(shipped)
    assert len({kernel for kernel, _ in results}) > 10
    add_to_cache(tmp_path / "cache" / "HASH", KEY, [(64, 0.2), (128, 0.1)])
    add_to_cache(tmp_path / "cache" / "NONE_RAN", [1], [(64, float("inf"))])
    add_to_cache(tmp_path / "cache" / "NONE", [2], [])
    output = tmp_path / "sm_90.json"
    output.write_text(shipped.read_text())
    collector = collect(tmp_path / "cache", output)
    assert "1 more than before" in collector.communicate()[0]
    merged = read_results(output)
    assert merged.pop(("add_kernel", key_text(KEY))) == {"B": 128, "num_warps": 4, "num_stages": 3, "num_ctas": 1}
    assert merged == results


def test_two_that_collect_at_once_lose_nothing(tmp_path):
    output = tmp_path / "out" / "sm_90.json"
    output.parent.mkdir()
    caches = [tmp_path / "first", tmp_path / "second"]
    for number, cache in enumerate(caches):
        add_to_cache(cache / "HASH", [number], [(64, 0.2)])
    folder = os.open(output.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        collectors = [collect(cache, output) for cache in caches]
        with pytest.raises(subprocess.TimeoutExpired):
            collectors[0].wait(3)
    finally:
        os.close(folder)
    assert all(collector.communicate()[1] == "" and collector.returncode == 0 for collector in collectors)
    assert read_results(output).keys() == {("add_kernel", "[0]"), ("add_kernel", "[1]")}
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_the_collector_leaves_a_damaged_file_as_it_is(tmp_path):
    add_to_cache(tmp_path / "cache" / "HASH", KEY, [(64, 0.2)])
    output = tmp_path / "sm_90.json"
    output.write_text("{")
    collector = collect(tmp_path / "cache", output)
    error = collector.communicate()[1]
    assert collector.returncode == 1 and error.startswith(f"{output} holds no tuning results") and "Trace" not in error
    assert output.read_text() == "{"
