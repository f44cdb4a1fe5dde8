"""Which stages a pipeline has: the balanced split, split points, schedules, CSV files, and what is refused."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flame.config import Experimental
from flame.errors import UserError
from flame.parallel.pipeline_plan import balanced_starts, check_microbatches, check_whole_backward, plan_pipeline


class Tiny(nn.Module):
    """A model of equal blocks."""

    def __init__(self, num_blocks: int = 8, vocab_size: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(num_blocks))
        self.head = nn.Linear(4, vocab_size, bias=False)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def options(degree: int = 2, schedule: str = "1F1B", points: tuple[str, ...] = (), **more) -> Experimental:
    return Experimental(
        pipeline_parallel_degree=degree,
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_split_points=list(points),
        **{f"pipeline_parallel_{key}": value for key, value in more.items()},
    )


def most_work(work: list[int], starts: tuple[int, ...]) -> int:
    return max(sum(work[start:stop]) for start, stop in zip(starts, [*starts[1:], len(work)], strict=True))


@settings(deadline=None)
@given(st.data())
def test_no_split_is_better_than_the_balanced_one(data):
    work = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=7))
    num_stages = data.draw(st.integers(1, len(work)))
    starts = balanced_starts(work, num_stages)
    splits = [(0, *cuts) for cuts in combinations(range(1, len(work)), num_stages - 1)]
    assert tuple(starts) in splits
    assert most_work(work, tuple(starts)) == min(most_work(work, split) for split in splits)


def test_the_output_projection_makes_the_last_stage_shorter():
    assert [len(stage) for stage in plan_pipeline(Tiny(8), options()).stages] == [4, 4]
    assert [len(stage) for stage in plan_pipeline(Tiny(8, vocab_size=20), options()).stages] == [6, 2]


@pytest.mark.parametrize(
    ("schedule", "degree", "owners"),
    [
        ("1F1B", 2, [0, 1]),
        ("GPipe", 4, [0, 1, 2, 3]),
        ("Interleaved1F1B", 2, [0, 1, 0, 1]),
        ("ZBVZeroBubble", 2, [0, 1, 1, 0]),
        ("ZBVZeroBubble", 4, [0, 1, 2, 3, 3, 2, 1, 0]),
    ],
)
def test_the_schedule_lays_the_stages(schedule, degree, owners):
    plan = plan_pipeline(Tiny(), options(degree, schedule))
    assert plan.owners == owners
    assert [block for stage in plan.stages for block in stage] == list(range(8))
    assert plan.of_rank(0) == [stage for stage, owner in enumerate(owners) if owner == 0]
    assert plan.is_first(0) and plan.is_last(len(owners) - 1)


def test_split_points_name_the_first_block_of_a_stage():
    assert plan_pipeline(Tiny(), options(points=("layers.3",))).stages == [range(3), range(3, 8)]
    plan = plan_pipeline(Tiny(), options(2, "Interleaved1F1B", tuple(f"layers.{i}" for i in (1, 2, 3, 4, 5))))
    assert plan.owners == [0, 1, 0, 1, 0, 1]
    assert plan.stages[-1] == range(5, 8)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (options(degree=9), "9 stages of 8 blocks"),
        (options(degree=5, schedule="ZBVZeroBubble"), "10 stages of 8 blocks"),
        (options(points=("layers.9",)), r"layers\.9 is no block; they are layers\.0 to layers\.7"),
        (options(points=("layers.0",)), "later and later blocks, and not the first"),
        (options(3, points=("layers.4", "layers.2")), "later and later blocks"),
        (options(points=("layers.2", "layers.4")), "makes 3 stages; 1F1B on 2 ranks takes 2"),
        (options(schedule="Interleaved1F1B", points=("layers.2",)), "a multiple of 2, from 4 on"),
        (options(schedule="Interleaved1F1B", points=("layers.1", "layers.2", "layers.3", "layers.4")), "5 stages"),
        (options(schedule="ZBVZeroBubble", points=("layers.2",)), "on 2 ranks takes 4"),
        (options(schedule_csv="nowhere.csv"), r"schedule_csv = nowhere\.csv: no such file"),
    ],
)
def test_what_makes_no_pipeline_is_named(choice, message):
    with pytest.raises(UserError, match=message):
        plan_pipeline(Tiny(), choice)


def plan_csv(folder, text: str, degree: int = 2) -> list[int]:
    path = folder / "schedule.csv"
    path.write_text(text)
    return plan_pipeline(Tiny(), options(degree, schedule_csv=str(path))).owners


def test_a_csv_file_lays_the_stages_as_its_rows_say(tmp_path):
    assert plan_csv(tmp_path, "0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n") == [0, 1]
    assert plan_csv(tmp_path, "0F0,0B0\n\n1F0,1B0\n\n") == [0, 1]
    assert plan_csv(tmp_path, "0F0,3F0,3I0,3W0,0I0,0W0\n1F0,2F0,2B0,1B0\n") == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n", "has 1 rows; .*pipeline_parallel_degree = 2"),
        ("0F0,0X0\n1F0,1B0\n", "0X0 is no action"),
        ("0F0,1B0\n1F0,0B0\n", "stage 1 stands in the rows of ranks 0 and 1"),
        ("0F0,0B0\n2F0,2B0\n", "without a gap"),
        ("0F0,0B0\n1F0,1B0,1F0\n", "1F0 stands more than once"),
    ],
)
def test_what_is_wrong_in_a_csv_file_is_named(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        plan_csv(tmp_path, text)


def test_a_csv_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\n")
    with pytest.raises(UserError, match=r"binary\.csv: no text"):
        plan_pipeline(Tiny(), options(schedule_csv=str(tmp_path / "binary.csv")))
    with pytest.raises(UserError, match="no such file"):
        check_whole_backward(Experimental(pipeline_parallel_schedule_csv="nowhere.csv"), "", "")


def test_microbatches_are_the_sequences_of_a_step_or_divide_them():
    assert check_microbatches(options(), 8) == 8
    assert check_microbatches(options(microbatches=4), 8) == 4
    with pytest.raises(UserError, match=r"microbatches = 3 does not divide a rank's 8 sequences"):
        check_microbatches(options(microbatches=3), 8)
    with pytest.raises(UserError, match="pipeline_parallel_degree = 4: a step has 2 micro-batches only"):
        check_microbatches(options(4), 2)


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV"])
def test_schedules_that_split_the_backward_are_refused(schedule):
    with pytest.raises(UserError, match=rf"^a = 1 and .*schedule = {schedule} do not go together.*because; use 1F1B"):
        check_whole_backward(Experimental(pipeline_parallel_schedule=schedule), "a = 1", "because")


def test_schedule_files_that_split_the_backward_are_refused(tmp_path):
    whole, split = tmp_path / "whole.csv", tmp_path / "split.csv"
    whole.write_text("0F0,0B0\n1F0,1B0\n")
    split.write_text("0F0,0I0,0W0\n1F0,1I0,1W0\n")
    check_whole_backward(Experimental(pipeline_parallel_schedule_csv=str(whole)), "", "")
    check_whole_backward(Experimental(pipeline_parallel_schedule="1F1B"), "", "")
    with pytest.raises(UserError, match=r"schedule_csv = .*split\.csv do not go together"):
        check_whole_backward(Experimental(pipeline_parallel_schedule_csv=str(split)), "", "")
