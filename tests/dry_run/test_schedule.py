"""Orders of pipeline schedules, and what follows from them: waiting, micro-batches in flight."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flame.config import Experimental
from flame.dry_run.schedule import Action, most_in_flight, peak_over, rank_actions, waiting_share
from flame.parallel.pipeline_plan import PipelinePlan


def actions_of(schedule: str, num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    plan = PipelinePlan(num_ranks, [range(stage, stage + 1) for stage in range(num_ranks)], list(range(num_ranks)))
    return rank_actions(plan, Experimental(pipeline_parallel_schedule=schedule), num_microbatches, None)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 2), (4, 4), (4, 16)])
def test_one_stage_a_rank_waits_as_the_textbook_says(schedule, num_ranks, num_microbatches):
    actions = actions_of(schedule, num_ranks, num_microbatches)
    share = waiting_share(actions, [1.0] * num_ranks, range(num_ranks))
    assert share == pytest.approx((num_ranks - 1) / (num_microbatches + num_ranks - 1))


def test_one_by_one_keeps_as_many_microbatches_as_ranks_follow():
    assert [most_in_flight(each) for each in actions_of("1F1B", 4, 16)] == [4, 3, 2, 1]
    assert [most_in_flight(each) for each in actions_of("1F1B", 4, 2)] == [2, 2, 2, 1]
    assert [most_in_flight(each) for each in actions_of("GPipe", 4, 16)] == [16] * 4


def test_a_stage_with_more_work_makes_the_others_wait():
    actions = actions_of("1F1B", 2, 8)
    assert waiting_share(actions, [1.0, 2.0], [0, 1]) > waiting_share(actions, [1.0, 1.0], [0, 1])


def test_rows_of_a_file_are_read_cell_by_cell(tmp_path):
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,0F1,,0B0,0B1\n1F0,1I0,1F1,1W0,1B1\n")
    plan = PipelinePlan(2, [range(1), range(1, 2)], [0, 1])
    first, second = rank_actions(plan, Experimental(pipeline_parallel_schedule_csv=str(path)), 2, None)
    assert first == [Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)]
    assert [action.kind for action in second] == ["F", "I", "F", "W", "B"]
    assert most_in_flight(second) == 2  # what the weights' gradients need stays until they are there


def test_torch_says_what_ranks_with_several_stages_do():
    schedule = SimpleNamespace(pipeline_order={0: ["0F0", None, "(3F0;0B0)OVERLAP_F_B"], 1: ["1F0", "2F0"]})
    plan = PipelinePlan(2, [range(i, i + 1) for i in range(4)], [0, 1, 1, 0])
    first, second = rank_actions(plan, Experimental(pipeline_parallel_schedule="DualPipeV"), 1, schedule)
    assert first == [Action("F", 0, 0), Action("F", 3, 0), Action("B", 0, 0)]
    assert second == [Action("F", 1, 0), Action("F", 2, 0)]


def test_the_peak_counts_the_action_at_work():
    actions = [Action("F", 0, 0), Action("F", 1, 0), Action("B", 1, 0), Action("B", 0, 0)]
    seen = []
    peak_over(actions, lambda action, kept: seen.append((action.kind, dict(kept))) or 0)
    assert seen == [("F", {0: 1}), ("F", {0: 1, 1: 1}), ("B", {0: 1, 1: 1}), ("B", {0: 1, 1: 0})]
