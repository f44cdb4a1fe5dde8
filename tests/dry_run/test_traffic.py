"""Bytes that ranks send: weights gathered, gradients reduced, hidden states handed on."""

from __future__ import annotations

from flame.dry_run.memory import Unit
from flame.dry_run.schedule import Action
from flame.dry_run.traffic import fsdp_traffic, model_traffic, pipeline_traffic
from flame.dry_run.trial import Trial
from flame.parallel.degrees import Degrees

TWO_STEPS = [Action(kind, 0, number) for number in range(2) for kind in "FB"]


def traffic_of(unit: Unit, degrees: Degrees, actions=tuple(TWO_STEPS), reshards=True, is_pipeline=False):
    return fsdp_traffic({0: [unit]}, actions, degrees, compute_bytes=2, reshards=reshards, is_pipeline=is_pipeline)


def test_blocks_are_gathered_for_forward_and_backward_and_the_root_once():
    sent = traffic_of(Unit(80, 10), Degrees(shard=8))
    assert sent["gathered weights"] == 2 * 2 * (2 * 10 * 7)
    assert sent["reduced gradients"] == 2 * (4 * 10 * 7)
    assert not sent["summed gradients of copies"]
    for unit, reshards in ((Unit(80, 10, is_root=True), True), (Unit(80, 10), False)):
        assert traffic_of(unit, Degrees(shard=8), reshards=reshards)["gathered weights"] == 2 * (2 * 10 * 7)


def test_copies_add_up_their_shards():
    sent = traffic_of(Unit(80, 80), Degrees(replicate=4))
    assert (sent["gathered weights"], sent["reduced gradients"]) == (0, 0)
    assert sent["summed gradients of copies"] == 2 * (2 * 4 * 80 * 3 // 4)


def test_pipelines_reduce_once_and_keep_blocks_gathered_from_backward_to_forward():
    one_by_one = [
        Action(kind, 0, number) for kind, number in (("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2))
    ]
    sent = traffic_of(Unit(80, 10), Degrees(pipeline=2, shard=8), one_by_one, is_pipeline=True)
    assert sent["gathered weights"] == 4 * (2 * 10 * 7)  # F 0, F 1, B 0, and B 1 after F 2 gave them back
    assert sent["reduced gradients"] == 4 * 10 * 7


def test_stages_hand_on_to_other_ranks_only():
    actions = [Action("F", 0, 0), Action("F", 3, 0), Action("B", 3, 0), Action("B", 0, 0)]
    assert pipeline_traffic(actions, [0, 1, 1, 0], 0, 100) == 200  # 0 forward, 3 backward
    assert pipeline_traffic([Action("F", 0, 0), Action("F", 1, 0)], [0, 0], 0, 100) == 0


def test_the_models_own_collectives_count_once_a_microbatch():
    trial = Trial(0, 0, 0, {"tensor parallelism": 7})
    assert model_traffic(TWO_STEPS, {0: trial}) == {"tensor parallelism": 14}
