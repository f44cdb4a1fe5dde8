"""What auto comes to, by plans of made-up sizes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flame.cli.parse import parse_args
from flame.dry_run.capacity import GIB, Capacity
from flame.dry_run.fit import FULL, KEEP_OPERATORS, NONE, Fit, fit_job
from flame.errors import UserError

JOB = (
    *("--model.config", "configs/debug/gla.json", "--model.tokenizer_path", "configs/tokenizer"),
    *("--training.dataset", "builtin:stdlib", "--training.varlen"),
)
MODE, BATCH = "--activation_checkpoint.mode=auto", "--training.batch_size=auto"
SIZES = {"none": 10, "selective": 6, "full": 2}  # GiB for each sequence


class Plans:
    """Plans of a job that takes 1 GiB and so many for each sequence; remembers what was planned."""

    def __init__(self, only_attention: bool = True, at_step: int = 0, one_takes: int = 1):
        self.only_attention, self.at_step, self.one_takes = only_attention, at_step, one_takes
        self.made: list[tuple[str, int]] = []

    def __call__(self, config):
        mode, batch_size = config.activation_checkpoint.mode, config.training.batch_size
        if mode == "selective":
            assert config.activation_checkpoint.selective_ac_option == "op"
        self.made.append((mode, batch_size))
        activations = SIZES[mode] * max(batch_size, self.one_takes) * GIB
        memory = SimpleNamespace(peak=max(GIB + activations, self.at_step * GIB), activations=activations)
        return SimpleNamespace(heaviest=SimpleNamespace(memory=memory), only_attention=self.only_attention)


def fit(gib: float, *options: str, plans: Plans | None = None, kept: int | None = None) -> Fit:
    config = parse_args([*JOB, *options])
    return fit_job(config, Capacity(int(gib * GIB), "on this card"), plans or Plans(), kept)


@pytest.mark.parametrize(("gib", "mode", "num_tried"), [(13, NONE, 1), (12, KEEP_OPERATORS, 2), (7, FULL, 3)])
def test_the_fastest_mode_that_fits_with_a_margin(gib, mode, num_tried):
    plans = Plans()
    assert fit(gib, MODE, plans=plans).mode == mode
    assert len(plans.made) == num_tried  # none is tried after the first that fits


def test_kept_operators_are_no_choice_for_other_mixers_than_attention():
    plans = Plans(only_attention=False)
    assert fit(12, MODE, plans=plans).mode == FULL
    assert plans.made == [("none", 1), ("full", 1)]


def test_kept_operators_are_no_choice_for_a_split_backward():
    plans = Plans()
    pipeline = ("--experimental.pipeline_parallel_degree=2", "--training.gradient_accumulation_steps=4")
    assert fit(12, MODE, *pipeline, "--experimental.pipeline_parallel_schedule=ZBVZeroBubble", plans=plans).mode == FULL


def test_the_last_mode_may_use_the_margin():
    tight = fit(3.1, MODE)
    assert tight.mode == FULL and tight.is_tight
    assert not fit(13, MODE).is_tight
    with pytest.raises(UserError) as refusal:
        fit(2.9, MODE)
    assert "does not fit the 2.90 GiB on this card: 1 x 2048 tokens" in str(refusal.value)
    assert "none 11.00, selective op 7.00, full 3.00 GiB" in str(refusal.value)


@pytest.mark.parametrize("gib", [12.5, 23, 24, 46, 100, 500, 1000])
def test_the_largest_power_of_two(gib):
    plans = Plans()
    size = fit(gib, BATCH, plans=plans).batch_size
    assert size & (size - 1) == 0
    assert 1 + 10 * size <= 0.9 * gib < 1 + 10 * 2 * size
    assert len(plans.made) <= 4


def test_small_batches_may_take_no_more_than_the_optimizer():
    assert fit(100, BATCH, plans=Plans(at_step=60)).batch_size == 8


def test_a_few_short_sequences_may_take_no_more_than_one():
    plans = Plans(one_takes=4)
    assert fit(100, BATCH, plans=plans).batch_size == 8
    assert len(plans.made) <= 6
    assert max(size for _, size in plans.made) <= 128


def test_what_would_take_less_is_what_there_is():
    with pytest.raises(UserError, match=r"GiB; a smaller training\.seq_len, more devices .* or training\.enable_cpu"):
        fit(2, MODE, BATCH)
    with pytest.raises(UserError, match=r"shard over or activation_checkpoint\.mode auto take less"):
        fit(2, BATCH, "--training.enable_cpu_offload")


def test_rows_have_a_longest_length():
    assert fit(10**6, BATCH, "--training.seq_len=1048576").batch_size == 1024
    assert fit(10**6, BATCH, "--training.seq_len=2147483647").batch_size == 1


def test_of_both_the_mode_is_chosen_first():
    assert fit(100, MODE, BATCH).mode == NONE
    small = fit(12, MODE, BATCH)
    assert (small.mode, small.batch_size) == (KEEP_OPERATORS, 1)
    small = fit(6, MODE, BATCH)
    assert (small.mode, small.batch_size) == (FULL, 2)


def test_a_given_mode_stays():
    full = fit(100, BATCH, "--activation_checkpoint.mode=full")
    assert full.batch_size == 32
    config = parse_args([*JOB, BATCH, "--activation_checkpoint.mode=selective"])
    Fit(["training.batch_size"], ("selective", "2"), 32, [], None).apply(config)
    assert (config.activation_checkpoint.mode, config.activation_checkpoint.selective_ac_option) == ("selective", "2")


def test_a_batch_that_was_trained_with_stays():
    plans = Plans()
    kept = fit(100, MODE, BATCH, plans=plans, kept=16)
    assert (kept.mode, kept.batch_size) == (FULL, 16)
    assert {size for _, size in plans.made} == {16}
    assert "16, which keeps the tokens a step of the checkpoint" in kept.lines()[1]
    with pytest.raises(UserError, match=r"16 x 2048 tokens a micro-batch .* gradient_accumulation_steps"):
        fit(20, MODE, BATCH, kept=16)


def test_memory_that_is_not_known():
    config = parse_args([*JOB, MODE])
    unknown = fit_job(config, None, Plans())
    assert (unknown.mode, unknown.tried) == (NONE, [])
    assert unknown.lines() == [
        "activation_checkpoint.mode = auto: none; this machine does not say how much memory it has"
    ]
    with pytest.raises(UserError, match="give a number"):
        fit_job(parse_args([*JOB, BATCH]), None, Plans())
    assert fit_job(parse_args([*JOB, BATCH]), None, Plans(), kept_batch_size=3).batch_size == 3


def test_what_is_chosen_is_written_into_the_job():
    config = parse_args([*JOB, MODE, BATCH, "--job.device_memory_gib=12"])
    chosen = fit(12, MODE, BATCH)
    chosen.apply(config)
    assert config.activation_checkpoint.mode == "selective"
    assert config.activation_checkpoint.selective_ac_option == "op"
    assert config.training.batch_size == 1
    assert config.job.device_memory_gib == 0
    assert chosen.lines() == [
        "activation_checkpoint.mode = auto: selective op; planned none 11.00, selective op 7.00 of 10.80 GiB usable "
        "(12.00 on this card, 10% kept back)",
        "training.batch_size = auto: 1; planned 1: 7.00, 2: 13.00 of 10.80 GiB usable (12.00 on this card, 10% kept "
        "back)",
    ]
