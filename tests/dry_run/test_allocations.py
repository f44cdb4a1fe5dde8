"""Bytes of tensors without memory are counted while they exist."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from flame.dry_run.allocations import BLOCK, Allocations


def test_storages_count_once_until_they_are_freed():
    with Allocations() as allocations:
        x = torch.empty(1024, device="meta")
        view, copy = x[:10], x.clone()
        assert allocations.live == 2 * 4096
        del x, copy
        assert allocations.live == 4096  # the view holds it
        del view
        assert allocations.live == 0
    assert allocations.peak == 2 * 4096


def test_what_was_there_before_is_not_counted():
    weight = torch.empty(64, 64, device="meta", requires_grad=True)
    with Allocations() as allocations:
        transposed = weight.t()
        assert allocations.live == 0
        (transposed * 2).sum().backward()
        assert allocations.live == 64 * 64 * 4  # the gradient


def test_sizes_are_rounded_up_as_on_a_gpu():
    with Allocations() as allocations:
        x = torch.empty(1, dtype=torch.uint8, device="meta")
        assert allocations.live == BLOCK
        del x


def test_the_peak_of_a_backward_pass_is_its_own():
    with Allocations() as allocations:
        x = torch.empty(256, 256, device="meta", requires_grad=True)
        y = x.exp().exp().sum()
        saved = allocations.live
        allocations.restart_peak()
        y.backward()
        assert allocations.peak > saved
        y = None
        assert allocations.live == 2 * 256 * 256 * 4  # x and its gradient


def test_real_bounds_may_meet_tensors_without_memory():
    with Allocations():
        rows = torch.arange(4)
        assert (torch.empty(8, 3, device="meta")[rows]).shape == (4, 3)
        assert rows.tolist() == [0, 1, 2, 3]


def test_what_gpus_do_not_keep_is_not_counted():
    with Allocations() as allocations:
        x = torch.empty(1024, device="meta")
        y = F.logsigmoid(x)
        assert allocations.live == 2 * 4096
        del y
