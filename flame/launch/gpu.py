"""The kind of GPU that this machine has, for processes that compile for it without using it.

``python -m flame.launch.gpu`` asks the driver, which a process cannot do and still hide the GPUs from its libraries.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

LONGEST_S = 60.0
# CUdevice_attribute of the CUDA driver: multiprocessors, compute capability.
_ATTRIBUTES = (75, 76, 16)


@dataclass(frozen=True)
class Gpu:
    """What kernels are compiled for.

    Attributes:
        major, minor: compute capability.
        num_multiprocessors: of the GPU.
    """

    major: int
    minor: int
    num_multiprocessors: int


def find_gpu(environ: Mapping[str, str]) -> Gpu | None:
    """The first GPU that ``environ`` lets a process see; None without one."""
    command = [sys.executable, "-m", __name__]
    found = subprocess.run(command, env=dict(environ), capture_output=True, text=True, timeout=LONGEST_S, check=False)
    return Gpu(*map(int, found.stdout.split())) if found.returncode == 0 else None


def hide_gpus(environ: MutableMapping[str, str], gpu: Gpu) -> None:
    """Have torch and the packages on CuTe DSL see no GPU and compile for ``gpu``: none of its memory is taken.

    To be called before they are imported. The variables are those that the packages name for such machines.
    """
    kind = f"sm_{gpu.major}{gpu.minor}"
    environ["CUDA_VISIBLE_DEVICES"] = ""
    environ.setdefault("CUTE_DSL_ARCH", kind + "a")  # as the package itself says of GPUs from Hopper on
    environ.setdefault("QUACK_ARCH", kind)
    environ.setdefault("FLASH_ATTENTION_ARCH", kind)
    environ.setdefault("FLASH_ATTENTION_NUM_SMS", str(gpu.num_multiprocessors))


def main() -> int:
    """Print the numbers of the first GPU; the exit code is returned, 1 without one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 1
    device, value, numbers = ctypes.c_int(), ctypes.c_int(), []
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return 1
    for attribute in _ATTRIBUTES:
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return 1
        numbers.append(value.value)
    print(*numbers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
