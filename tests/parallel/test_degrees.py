import pytest

from flame.cli.parse import parse_args
from flame.errors import UserError
from flame.parallel.degrees import Degrees, resolve_degrees

JOB = [
    "--model.config",
    "configs/debug/gla.json",
    "--model.tokenizer_path",
    "configs/tokenizer",
    "--training.dataset",
    "x",
]


def resolve(world_size: int, **options: int) -> Degrees:
    config = parse_args(JOB)
    for name, value in options.items():
        section = config.experimental if name.startswith(("pipeline", "context")) else config.training
        setattr(section, f"{name}_degree", value)
    return resolve_degrees(config, world_size)


def test_sharding_takes_what_the_others_leave():
    assert resolve(8) == Degrees(shard=8)
    assert resolve(8, data_parallel_replicate=2) == Degrees(replicate=2, shard=4)
    degrees = resolve(16, tensor_parallel=2, pipeline_parallel=2, context_parallel=2)
    assert degrees == Degrees(pipeline=2, shard=2, context=2, tensor=2)
    assert (degrees.data, degrees.fsdp, degrees.model, degrees.world) == (2, 4, 8, 16)


@pytest.mark.parametrize(
    "options", [{"data_parallel_shard": 3}, {"tensor_parallel": 3}, {"data_parallel_replicate": 16}]
)
def test_degrees_that_do_not_make_up_the_processes_are_named(options):
    name = next(iter(options))
    with pytest.raises(UserError, match=rf"{name}_degree = .*8 processes"):
        resolve(8, **options)


def test_every_rank_has_its_place():
    degrees = Degrees(pipeline=2, replicate=2, shard=2, context=2, tensor=2)
    places = [degrees.data_rank(rank) for rank in range(degrees.world)]
    assert places == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4 + [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert [rank for rank in range(degrees.world) if degrees.is_data_leader(rank)] == [0, 4, 8, 12]
    assert degrees.describe() == "pipeline 2 x replicate 2 x shard 2 x context 2 x tensor 2"
    assert Degrees().describe() == "one device"


def test_the_refusal_says_what_the_degrees_come_to():
    with pytest.raises(UserError, match="; they come to 12; data_parallel_shard_degree = -1 takes"):
        resolve(8, data_parallel_shard=4, tensor_parallel=3)
    with pytest.raises(UserError, match="; they come to 12, which leaves no whole number for data_parallel_shard"):
        resolve(500, pipeline_parallel=4, tensor_parallel=3)
