import gzip
import json

import pytest
import torch

from flame.config import Profiling
from flame.errors import UserError
from flame.training.profiling import Profiler, check_profiling

CPU = torch.device("cpu")


def train_steps(profiler, num_steps):
    with profiler:
        for _ in range(num_steps):
            torch.ones(4, 4) @ torch.ones(4, 4)
            profiler.step()


def trace_names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.gz"))


def test_off_writes_nothing(tmp_path):
    train_steps(Profiler(Profiling(), tmp_path, CPU), 12)
    assert not list(tmp_path.iterdir())


def test_a_trace_every_profile_freq_steps(tmp_path):
    profiling = Profiling(enable_profiling=True, profile_freq=5, save_traces_folder="traces")
    train_steps(Profiler(profiling, tmp_path, CPU, rank=3), 12)
    assert trace_names(tmp_path / "traces") == [
        "iteration_10/rank3_trace.json.gz",
        "iteration_5/rank3_trace.json.gz",
    ]
    with gzip.open(tmp_path / "traces" / "iteration_5" / "rank3_trace.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in names


@pytest.mark.parametrize("freq", [1, 2])
def test_short_intervals(tmp_path, freq):
    train_steps(Profiler(Profiling(enable_profiling=True, profile_freq=freq), tmp_path, CPU), 4)
    assert len(trace_names(tmp_path)) == 4 // freq


def test_steps_are_the_runs_own_after_a_resume(tmp_path):
    profiling = Profiling(enable_profiling=True, profile_freq=10)
    train_steps(Profiler(profiling, tmp_path, CPU, last_step=7), 5)
    assert trace_names(tmp_path) == ["profile_traces/iteration_10/rank0_trace.json.gz"]


def test_exception_passes(tmp_path):
    with pytest.raises(KeyError), Profiler(Profiling(enable_profiling=True), tmp_path, CPU):
        raise KeyError("x")


def test_memory_snapshot_needs_a_gpu():
    with pytest.raises(UserError, match=r"enable_memory_snapshot.*CUDA"):
        check_profiling(Profiling(enable_memory_snapshot=True), CPU)


@pytest.mark.gpu
def test_memory_snapshots_at_steps_and_when_memory_runs_out(tmp_path):
    profiler = Profiler(Profiling(enable_memory_snapshot=True, profile_freq=2), tmp_path, torch.device("cuda"))
    with pytest.raises(torch.OutOfMemoryError), profiler:
        for _ in range(2):
            torch.ones(1024, device="cuda")
            profiler.step()
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    folders = sorted(path.name for path in (tmp_path / "memory_snapshot").iterdir())
    assert folders == ["iteration_2", "iteration_3_oom"]
    assert all(
        (tmp_path / "memory_snapshot" / name / "rank0_memory_snapshot.pickle").stat().st_size for name in folders
    )
