"""Processes and machines of a run, from the environment."""

import pytest

from flame.errors import UserError
from flame.launch import layout
from flame.launch.layout import Layout, count_gpus, free_port, gpu_names, read_layout, threads_per_process


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that the machine has some GPUs and torch can use them."""

    def pretend(number):
        layout._listing.cache_clear()
        listing = "".join(f"GPU {index}: H200 (UUID: GPU-{index})\n  MIG 1g\n" for index in range(number))
        monkeypatch.setattr(layout.metadata, "version", lambda name: "2.13.0")
        monkeypatch.setattr(
            layout.subprocess, "run", lambda *_, **__: layout.subprocess.CompletedProcess([], 0, stdout=listing)
        )

    yield pretend
    layout._listing.cache_clear()


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, 4), ("", 0), ("-1", 0), ("0", 1), ("2,3", 2), ("0,-1,1", 1), ("GPU-abc, GPU-d", 2)]
)
def test_visible_gpus(gpus, visible, expected):
    gpus(4)
    assert count_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_kinds_of_gpus(gpus):
    gpus(0)
    assert gpu_names() == []
    gpus(2)
    assert gpu_names() == ["H200"]


def test_no_gpu_for_a_cpu_build_of_torch(gpus, monkeypatch):
    gpus(4)
    monkeypatch.setattr(layout.metadata, "version", lambda name: "2.13.0+cpu")
    assert count_gpus({}) == 0


def test_no_gpu_without_a_driver(gpus, monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError

    gpus(4)
    monkeypatch.setattr(layout.subprocess, "run", missing)
    assert count_gpus({}) == 0


def test_one_process_per_gpu_and_one_on_a_cpu(gpus):
    gpus(4)
    assert read_layout({}).processes_per_node == 4
    gpus(0)
    assert read_layout({}) == Layout(1, 1, "127.0.0.1", 0, "0")


def test_environment_says_otherwise():
    given = {"NNODE": "2", "NGPU": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOG_RANK": "0,2"}
    assert read_layout(given) == Layout(2, 3, "127.0.0.1", 29500, "0,2")
    assert read_layout(given).world_size == 6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"NGPU": "many"}, "NGPU = many: must be a whole number, at least 1"),
        ({"NGPU": "²"}, "NGPU = ²: must be a whole number, at least 1"),
        (
            {"NGPU": "1", "NNODE": "2", "MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "29500"},
            "MASTER_ADDR = no.such.host.invalid: no machine is known by that name here",
        ),
        ({"NGPU": "0"}, "NGPU = 0: must be a whole number, at least 1"),
        ({"NGPU": "1", "NNODE": "2"}, "NNODE = 2: a run on several machines needs MASTER_ADDR and MASTER_PORT"),
        ({"NGPU": "2", "LOG_RANK": "2"}, "LOG_RANK = 2: must be numbers from 0 to 1"),
    ],
)
def test_wrong_environment(given, message):
    with pytest.raises(UserError, match=message):
        read_layout(given)


def test_threads_share_the_cores(monkeypatch):
    monkeypatch.setattr(layout.os, "sched_getaffinity", lambda pid: set(range(16)))
    assert threads_per_process(Layout(1, 8, "127.0.0.1", 0, "0")) == 2
    assert threads_per_process(Layout(1, 32, "127.0.0.1", 0, "0")) == 1


def test_free_port_is_a_port():
    assert 1024 <= free_port() < 65536
