"""A micro-batch without memory takes what one with memory does, on the device that it stands for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flame.cli.parse import parse_args
from flame.config import ActivationCheckpoint
from flame.dry_run.trial import META, Gradients, gather_on_paper, run_trial
from flame.errors import UserError
from flame.models import build_model, find_blocks, load_model_config
from flame.models.backend import setup_backend, uninstall
from flame.models.loss import attach_training_forward
from flame.parallel import recompute
from flame.parallel.recompute import recompute_blocks

NUM_TOKENS, CONTEXT_LEN = 16_384, 4_096


def make(family: str, mode: str) -> nn.Module:
    job = parse_args(["--model.config", f"configs/{family}.json"], check=False)
    setup_backend("auto", "cuda", context_len=CONTEXT_LEN)
    model = attach_training_forward(build_model(load_model_config(job.model)).model)
    recompute_blocks(find_blocks(model), ActivationCheckpoint(mode=mode, selective_ac_option="op"))
    return model.train()


def forward_of(model: nn.Module, device: torch.device) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        ids = torch.empty(1, NUM_TOKENS, dtype=torch.int64, device=device)
        bounds = torch.arange(0, NUM_TOKENS + 1, CONTEXT_LEN, dtype=torch.int32)
        ids, bounds = (ids, bounds) if device == META else (ids.zero_(), bounds.to(device))
        return model(ids, labels=ids.clone(), cu_seqlens=bounds)

    return forward


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["transformer_340M", "delta_net_340M", "gated_deltanet_340M"])
def test_activations_are_those_of_a_gpu(family, mode):
    model = make(family, mode)
    blocks = [block for _, block in find_blocks(model)]
    gather_on_paper(model, blocks, torch.bfloat16)
    units = [list(block.parameters()) for block in blocks]
    trial = run_trial(forward_of(model, META), Gradients(units, 1, "left"))

    model = make(family, mode).bfloat16().to_empty(device="cuda")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)
    units = [list(block.parameters()) for _, block in find_blocks(model)]
    Gradients(units, 1, "left")
    for _ in range(2):  # the first compiles and tunes kernels, which allocates
        model.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = forward_of(model, torch.device("cuda"))()
        saved = torch.cuda.memory_allocated() - before
        loss.backward()
        peak = torch.cuda.max_memory_allocated() - before
    uninstall()
    assert trial.saved == pytest.approx(saved, rel=0.05)
    assert max(trial.forward_peak, trial.backward_peak) == pytest.approx(peak, rel=0.1)


def test_kept_attention_counts():
    saved = []
    for is_kept in (True, False):
        model = make("debug/transformer", "selective")
        blocks = [block for _, block in find_blocks(model)]
        gather_on_paper(model, blocks, torch.bfloat16)
        with pytest.MonkeyPatch.context() as patch:
            if not is_kept:
                patch.setattr(recompute, "_ATTENTION", set())
            saved.append(run_trial(forward_of(model, META), Gradients([], 1, "left")).saved)
    uninstall()
    output, logsumexp = 2 * model.config.hidden_size, 4 * model.config.num_heads  # bytes a token
    assert saved[0] - saved[1] == pytest.approx(len(blocks) * NUM_TOKENS * (output + logsumexp), rel=0.01)


def test_gradients_of_a_unit_leave_when_all_are_there():
    unit = nn.Sequential(nn.Linear(1024, 1024, device=META), nn.Linear(1024, 1024, device=META))
    gather_on_paper(unit, [], torch.bfloat16)
    size = sum(parameter.numel() for parameter in unit.parameters())
    gradients = Gradients([list(unit.parameters())], 4, "kept")
    trial = run_trial(lambda: unit(torch.empty(1, 1024, device=META)).sum(), gradients)
    # All in bfloat16, all in float32 for the reduction, and a quarter that stays.
    assert trial.backward_peak == pytest.approx(2 * size + 4 * size + 4 * size / 4, rel=0.01)
    assert all(parameter.grad is None for parameter in unit.parameters())


def test_a_model_that_looks_at_values_cannot_be_planned():
    weight = torch.ones(4, device=META, requires_grad=True)
    with pytest.raises(UserError, match="looks at values"):
        run_trial(lambda: weight.sum() * float(weight.detach().max()), Gradients([[weight]], 1, "left"))


def test_a_model_that_asks_for_a_gpu_cannot_be_planned():
    weight = torch.ones(4, device=META, requires_grad=True)

    def forward():
        assert weight.is_cuda
        return weight.sum()

    with pytest.raises(UserError, match=r"asks for a GPU while it computes.* \(.+\): job\.dry_run"):
        run_trial(forward, Gradients([[weight]], 1, "left"))


def test_a_fault_of_the_model_is_shown_as_it_is():
    weight = torch.empty(4, device=META, requires_grad=True)
    with pytest.raises(RuntimeError, match="broadcast a dimension of length 3"):
        run_trial(lambda: (weight + torch.empty(3, device=META)).sum(), Gradients([[weight]], 1, "left"))


def test_what_is_computed_again_is_fused_too():
    weight = torch.empty(64, device=META, requires_grad=True)

    def taken(forward):
        trial = run_trial(lambda: forward(torch.empty(4096, 64, device=META)), Gradients([[weight]], 1, "kept"))
        return trial.backward_peak

    def norms(x):
        for _ in range(4):
            x = F.rms_norm(x, (64,), weight)
        return x.sum()

    again = taken(lambda x: checkpoint(norms, x, use_reentrant=False))
    assert again == pytest.approx(taken(norms), rel=0.05)  # all of it is there again when the backward begins


def test_stick_breaking_attention_is_planned_for_a_gpu():
    model = make("debug/stickbreaking_attn", "none")
    blocks = [block for _, block in find_blocks(model)]
    gather_on_paper(model, blocks, torch.bfloat16)
    trial = run_trial(forward_of(model, META), Gradients([], 1, "left"))
    uninstall()
    assert trial.saved > len(blocks) * NUM_TOKENS * 2 * model.config.hidden_size
