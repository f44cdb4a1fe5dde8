"""FlexAttention's mask of documents, and its outputs, against the reference."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask

from flame.models.attention_kernels import Documents, Window, grouped_sdpa
from flame.models.compiled import keep_outside
from flame.models.flex_attention import FlexAttention, document_block_mask
from flame.parallel.recompute import _keep_expensive

BOUNDS = [0, 1, 2, 9, 130, 400, 401, 656, 700]
WINDOWS = [Window(-1, 0), Window(31, 0), Window(200, 0), Window(-1, -1), Window(5, 3)]


def bounds_of(*bounds):
    return torch.tensor(bounds, dtype=torch.int32)


def make_inputs(num_tokens, num_kv_heads=4, head_dim=16):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(num_tokens, heads, head_dim, generator=generator) for heads in (4, num_kv_heads, num_kv_heads)]


@pytest.fixture
def unfused():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield FlexAttention(compiler=None)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(4, 16), (2, 36), (1, 8)])
def test_outputs_are_those_of_the_reference(unfused, window, num_kv_heads, head_dim):
    cu = bounds_of(*BOUNDS)
    inputs = make_inputs(BOUNDS[-1], num_kv_heads, head_dim)
    o = unfused(*inputs, Documents(cu, cu, 270, 270), None, window)
    torch.testing.assert_close(o, grouped_sdpa(*inputs, Documents(cu, cu, 270, 270), None, window))


def test_changing_a_document_leaves_the_others_bit_equal(unfused):
    cu = bounds_of(*BOUNDS)
    inputs = make_inputs(BOUNDS[-1])
    changed = [x.clone() for x in inputs]
    start, end = BOUNDS[3:5]
    for x in changed:
        x[start:end] += 3
    o, other = (unfused(*x, Documents(cu, cu, 270, 270), None, Window(-1, 0)) for x in (inputs, changed))
    assert torch.equal(o[:start], other[:start]) and torch.equal(o[end:], other[end:])
    assert not torch.equal(o[start:end], other[start:end])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("bounds", [BOUNDS, [0, 700], [0, 512, 1024], list(range(0, 1025, 4)), [0, 40]], ids=len)
def test_blocks_are_those_that_looking_at_every_pair_gives(window, bounds):
    mask = document_block_mask(bounds_of(*bounds), bounds[-1], window)
    whole = create_block_mask(mask.mask_mod, None, None, bounds[-1], bounds[-1], device="cpu")
    assert torch.equal(mask.to_dense(), whole.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(whole, name)), name


def test_layers_of_a_step_share_a_mask(unfused):
    cu = bounds_of(0, 9, 40)
    masks = [unfused._mask(each, 40, Window(-1, 0)) for each in (cu, cu, cu.clone())]
    assert masks[0] is masks[1] and masks[2] is not masks[1]
    assert unfused._mask(cu, 40, Window(3, 0)) is not masks[0]


def test_other_documents_compile_nothing_anew_wherever_it_is_called():
    """Also where attention is called: between compiled graphs, and in blocks whose expensive operators are kept."""
    torch._dynamo.reset()
    counter = CompileCounter()
    flex = FlexAttention(counter)
    inputs = make_inputs(512)

    def attend(cu):
        return flex(*inputs, Documents(cu, cu, 512, 512), None, Window(-1, 0))

    keeps = _keep_expensive()[0]
    with torch.no_grad(), keeps:
        for bounds in ((0, 512), (0, 5, 512), (0, 5, 6, 7, 300, 512)):
            attend(bounds_of(*bounds))
    assert counter.frame_count == 1
    torch._dynamo.reset()
    outside = keep_outside(attend)
    block = torch.compile(lambda cu: outside(cu) * 2, backend="eager")
    with torch.no_grad():
        for bounds in ((0, 512), (0, 5, 512), (0, 5, 6, 7, 300, 512)):
            cu = bounds_of(*bounds)
            expected = 2 * grouped_sdpa(*inputs, Documents(cu, cu, 512, 512), None, Window(-1, 0))
            torch.testing.assert_close(block(cu), expected)
    assert counter.frame_count == 2
    torch._dynamo.reset()


@torch.compiler.config.patch(recompile_limit=1)
def test_every_shape_stays_compiled():
    """Where torch would give up after some, eight by default."""
    torch._dynamo.reset()
    counter = CompileCounter()
    flex = FlexAttention(counter)
    for length in (130, 131, 132):
        inputs, cu = make_inputs(length), bounds_of(0, 9, length)
        with torch.no_grad():
            flex(*inputs, Documents(cu, cu, length, length), None, Window(-1, 0))
    assert counter.frame_count == 3
    torch._dynamo.reset()


@pytest.mark.gpu
def test_blocks_that_keep_operators_stay_fused_on_a_gpu():
    """Unfused, the scores alone would take 4 GiB; and the gradients are those without checkpointing."""
    from flame.config import ActivationCheckpoint
    from flame.parallel.recompute import recompute_blocks

    num_tokens = 32_768
    cu = torch.arange(0, num_tokens + 1, 1024, dtype=torch.int32, device="cuda")
    flex = FlexAttention()

    class Layer(torch.nn.Module):
        def forward(self, x):
            return flex(x, x * 0.5, x * 2, Documents(cu, cu, 1024, 1024), None, Window(-1, 0))

    x = torch.randn(num_tokens, 2, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    gradients = []
    for mode in ("none", "selective"):
        model = torch.nn.Sequential(Layer())
        recompute_blocks(model.named_children(), ActivationCheckpoint(mode=mode, selective_ac_option="op"))
        torch.cuda.reset_peak_memory_stats()
        gradients.append(torch.autograd.grad(model(x).square().sum(), x)[0])
        assert torch.cuda.max_memory_allocated() < 2**30
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-2)
