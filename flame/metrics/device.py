"""What the metrics need to know of a device: how much memory it took and how fast it could be."""

from __future__ import annotations

import sys

import torch

GIB = 2**30

# Dense bfloat16 matrix peak with float32 accumulation, TFLOP/s, from the makers' data sheets (without sparsity).
# The first name contained in the device's name counts, so that a longer name stands before its prefix.
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "B100": 1750.0,
    "GH200": 989.4,
    "H200 NVL": 835.5,
    "H200": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI355X": 2500.0,
    "MI325X": 1307.4,
    "MI300X": 1307.4,
    "MI250X": 191.5,  # one of its two dies, which is what PyTorch calls a device
}


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 FLOP/s of ``device``, or None where it is unknown (a CPU, an unlisted card): no MFU then."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    tflops = next((peak for known, peak in PEAK_TFLOPS.items() if known.lower() in name.lower()), None)
    return None if tflops is None else tflops * 1e12


def peak_memory_gib(device: torch.device) -> float:
    """Peak of the memory allocated on ``device`` since the last reset, GiB; on a CPU, of the process in all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
