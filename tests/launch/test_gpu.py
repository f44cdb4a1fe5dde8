"""The kind of GPU, asked of a stand-in for the driver, and what is told to processes that see none."""

from __future__ import annotations

import ctypes
import os

import pytest

from flame.launch import gpu
from flame.launch.gpu import Gpu, find_gpu, hide_gpus


class Driver:
    """``libcuda.so.1`` with one H200, or where ``fault`` names a function, one that fails there."""

    def __init__(self, fault=None):
        for name in ("cuInit", "cuDeviceGet", "cuDeviceGetAttribute"):
            setattr(self, name, self.fail if name == fault else getattr(self, name))

    def fail(self, *_):
        return 100

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, device, number):
        device._obj.value = 7
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        assert device.value == 7
        value._obj.value = {75: 9, 76: 0, 16: 132}[attribute]
        return 0


def test_the_driver_is_asked(monkeypatch, capsys):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert gpu.main() == 0
    assert capsys.readouterr().out == "9 0 132\n"


@pytest.mark.parametrize("fault", ["cuInit", "cuDeviceGet", "cuDeviceGetAttribute"])
def test_a_driver_without_a_gpu(fault, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(fault))
    assert gpu.main() == 1


def test_no_gpu_is_seen_where_none_is_to_be():
    assert find_gpu(os.environ | {"CUDA_VISIBLE_DEVICES": ""}) is None


def test_what_the_other_process_prints_is_the_gpu(monkeypatch):
    code = "import sys; print(9, 0, 132); sys.exit(int(sys.argv[-1] == '1'))"
    for exit_code, expected in (("0", Gpu(9, 0, 132)), ("1", None)):
        run = gpu.subprocess.run
        with monkeypatch.context() as patch:
            words = [gpu.sys.executable, "-c", code, exit_code]
            patch.setattr(gpu.subprocess, "run", lambda command, words=words, run=run, **options: run(words, **options))
            assert find_gpu(os.environ) == expected


def test_what_a_user_has_set_stays():
    environ = {"CUDA_VISIBLE_DEVICES": "3", "FLASH_ATTENTION_NUM_SMS": "100"}
    hide_gpus(environ, Gpu(10, 0, 148))
    assert environ == {
        "CUDA_VISIBLE_DEVICES": "",
        "CUTE_DSL_ARCH": "sm_100a",
        "QUACK_ARCH": "sm_100",
        "FLASH_ATTENTION_ARCH": "sm_100",
        "FLASH_ATTENTION_NUM_SMS": "100",
    }
