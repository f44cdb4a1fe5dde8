"""Plans of whole jobs: their memory against what runs on GPUs took, and what they refuse."""

from __future__ import annotations

import pytest

from flame.errors import UserError

LONG_ROWS = ("--training.seq_len=65536", "--training.context_len=4096")
TP2 = "--training.tensor_parallel_degree=2"
PP2 = "--experimental.pipeline_parallel_degree=2"
CP2 = "--experimental.context_parallel_degree=2"
TWICE = "--training.gradient_accumulation_steps=2"
FULL = ("--activation_checkpoint.mode=full",)
SELECTIVE = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op")
NORM = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=norm")

# Peaks on H200s (torch 2.11, Triton 3.6), rows of 65,536 tokens: docs/dry_run.md.
MEASURED = [
    ("transformer_340M", 1, (), 46.96),
    ("transformer_340M", 1, NORM, 43.96),
    ("transformer_340M", 1, FULL, 10.92),
    ("transformer_340M", 1, SELECTIVE, 30.42),
    ("gla_340M", 1, (), 52.77),
    ("hgrn2_340M", 1, (), 61.55),
    ("delta_net_340M", 1, (), 60.35),
    ("delta_net_340M", 1, FULL, 11.3),
    ("delta_net_340M", 1, SELECTIVE, 27.83),
    ("gated_deltanet_340M", 1, (), 59.93),
    ("gated_deltanet_340M", 1, FULL, 12.19),
    ("gated_deltanet_340M", 1, SELECTIVE, 27.21),
    ("transformer_1B", 1, (), 77.16),
    ("transformer_340M", 1, (TWICE,), 48.4),
    ("gated_deltanet_340M", 1, (TWICE,), 62.3),
    ("transformer_340M", 2, (), 44.48),
    ("gated_deltanet_340M", 2, (), 58.33),
    ("transformer_340M", 2, (TP2, TWICE), 27.78),
    ("gated_deltanet_340M", 2, (TP2, TWICE), 33.8),
    ("transformer_340M", 2, (PP2, TWICE), 48.78),
    ("transformer_340M", 2, (CP2, TWICE), 27.07),
    ("gated_deltanet_340M", 2, (PP2, TWICE), 67.18),
    ("gated_deltanet_340M", 2, (CP2, TWICE), 32.47),
]

# Measured with all logits of a row in memory at once.
MEASURED_BEFORE = [
    ("mamba_340M", 1, (), 88.4),
]


@pytest.fixture
def whole_logits(monkeypatch):
    """The loss as it was when the peaks were measured: of all logits of a row at once."""
    from fla.modules import FusedCrossEntropyLoss

    def loss_of_all_logits(hidden_states, head, labels, options):
        return FusedCrossEntropyLoss(reduction="sum")(head(hidden_states).flatten(0, 1), labels.flatten())

    monkeypatch.setattr("flame.models.loss._loss_by_blocks", loss_of_all_logits)


@pytest.mark.parametrize(("model", "world_size", "options", "measured"), MEASURED)
def test_memory_is_what_a_run_took(plan, model, world_size, options, measured):
    check_peak(plan, model, world_size, options, measured)


@pytest.mark.usefixtures("whole_logits")
@pytest.mark.parametrize(("model", "world_size", "options", "measured"), MEASURED_BEFORE)
def test_memory_is_what_a_run_took_before_the_loss_went_in_blocks(plan, model, world_size, options, measured):
    check_peak(plan, model, world_size, options, measured)


def check_peak(plan, model, world_size, options, measured):
    peak = plan(model, world_size, *LONG_ROWS, *options).heaviest.memory.peak / 2**30
    assert peak == pytest.approx(measured, rel=0.1)


def test_the_loss_in_blocks_takes_less(plan, request):
    blocks = plan("transformer_340M", 1, *LONG_ROWS).heaviest.memory.peak
    request.getfixturevalue("whole_logits")
    whole = plan("transformer_340M", 1, *LONG_ROWS).heaviest.memory.peak
    logits = 65536 * 32000 * 2
    assert 1.5 * logits < whole - blocks < 2 * logits  # and their gradient, less what the backward takes then


def test_a_large_model_on_512_gpus(plan):
    layout = ("--training.tensor_parallel_degree=8", "--experimental.pipeline_parallel_degree=4")
    options = ("--training.seq_len=8192", "--training.context_len=8192", "--training.gradient_accumulation_steps=16")
    job = plan("transformer_7B", 512, *layout, *options)
    assert (job.degrees.shard, job.degrees.tensor, job.degrees.pipeline) == (16, 8, 4)
    assert job.tokens == 16 * 16 * 8192
    assert [rank.num_blocks for rank in job.ranks] == [8] * 4
    assert [rank.in_flight for rank in job.ranks] == [4, 3, 2, 1]
    assert job.heaviest is job.ranks[0]
    # Every parameter is somewhere: 16 shards of 8 parts, norms whole on each of the 8.
    assert sum(rank.num_parameters for rank in job.ranks) * 8 == pytest.approx(job.num_parameters, rel=1e-3)
    assert sum(rank.num_kept for rank in job.ranks) * 128 == pytest.approx(job.num_parameters, rel=1e-3)
    assert 3 / (16 + 3) < job.waiting < 0.2  # the last stage has the output projection besides, for which others wait
    blocks = job.ranks[1]
    gathered = 2 * blocks.num_parameters * 15 / 16
    assert blocks.sent["gathered weights"] == pytest.approx((16 + 2) * gathered, rel=0.2)
    assert blocks.sent["reduced gradients"] == pytest.approx(2 * gathered, rel=1e-3)  # once, in float32
    assert blocks.sent["hidden states"] == 2 * 16 * 8192 // 8 * 4096 * 2
    # Each block gathers and scatters its rows twice, forward and backward.
    assert blocks.sent["tensor parallelism"] == 16 * 8 * 8 * (7 / 8 * 8192 * 4096 * 2)


@pytest.mark.parametrize("backend", ["flex", "flash", "fa3", "fa4", "sdpa"])
def test_plans_need_no_attention_backend(plan, backend):
    short = ("--training.seq_len=512", "--training.context_len=256")
    usual = plan("debug/transformer", 1, *short)
    named = plan("debug/transformer", 1, *short, f"--model.attention_backend={backend}")
    assert named.heaviest.memory == usual.heaviest.memory
    assert usual.notes == []
    assert named.notes == [f"as with model.attention_backend varlen, which keeps about what {backend} does"]


def test_recomputing_takes_less(plan):
    short = ("--training.seq_len=4096", "--training.context_len=4096")
    peaks = [
        plan("gla_340M", 1, *short, f"--activation_checkpoint.mode={mode}", *more).heaviest.memory.activations
        for mode, *more in (("full",), ("selective", "--activation_checkpoint.selective_ac_option=op"), ("none",))
    ]
    assert peaks == sorted(peaks) and peaks[0] < peaks[2] / 2  # the logits are in all


@pytest.mark.parametrize(
    ("model", "world_size", "options", "message"),
    [
        ("transformer_340M", 6, ("--training.tensor_parallel_degree=4",), "must multiply to the 6 processes"),
        ("transformer_340M", 7, (), "7 data-parallel ranks do not divide"),
        ("transformer_340M", 3, ("--training.tensor_parallel_degree=3", "--training.seq_len=2049"), "num_heads = 16"),
        ("transformer_340M", 25, (PP2.replace("2", "25"), TWICE.replace("2", "25")), "25 stages of 24 blocks"),
        ("transformer_340M", 4, ("--experimental.pipeline_parallel_degree=4",), "1 micro-batches only"),
        ("transformer_340M", 2, (PP2, TWICE, "--experimental.pipeline_parallel_schedule=2F2B"), "must be one of 1F1B"),
        ("transformer_340M", 2, (PP2, TWICE, "--training.enable_cpu_offload"), "does not go with"),
        ("transformer_340M", 2, (CP2, "--model.attention_backend=flex"), "takes as many queries as keys"),
        ("transformer_340M", 1, ("--activation_checkpoint.mode=selective",
                                 "--activation_checkpoint.selective_ac_option=some"), "must be op, norm, or n"),
    ],
)  # fmt: skip
def test_what_would_fail_is_refused(plan, model, world_size, options, message):
    with pytest.raises(UserError, match=message):
        plan(model, world_size, *options)
