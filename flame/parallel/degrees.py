"""How many ways a job is split, and along what: the parallel degrees and a rank's place among them."""

from __future__ import annotations

from dataclasses import dataclass

from flame.config import JobConfig
from flame.errors import UserError

PIPELINE_DEGREE = "experimental.pipeline_parallel_degree"
CONTEXT_DEGREE = "experimental.context_parallel_degree"
TENSOR_DEGREE = "training.tensor_parallel_degree"
AXES = ("pipeline", "replicate", "shard", "context", "tensor")  # outermost first


@dataclass(frozen=True)
class Degrees:
    """Ranks along each axis; their product is the number of processes.

    Ranks are numbered with tensor parallelism innermost, whose collectives are the most frequent and want the fastest
    links, then context, sharding and replication; pipeline stages lie furthest apart.

    Attributes:
        pipeline: stages, each with a part of the blocks.
        replicate: copies of the sharded model (HSDP; with ``shard`` 1 plain data parallelism).
        shard: ranks that the parameters are sharded over (FSDP), each with sequences of its own.
        context: ranks that each hold a piece of every sequence; parameters are sharded over them too.
        tensor: ranks that share every matrix product.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def data(self) -> int:
        """Ranks that have sequences of their own."""
        return self.replicate * self.shard

    @property
    def fsdp(self) -> int:
        """Ranks over which FSDP shards the parameters."""
        return self.shard * self.context

    @property
    def model(self) -> int:
        """Ranks that work on one sequence together."""
        return self.pipeline * self.context * self.tensor

    @property
    def world(self) -> int:
        """All ranks."""
        return self.data * self.model

    def data_rank(self, rank: int) -> int:
        """Which of the ``data`` shares of the sequences a rank works on."""
        return rank // (self.context * self.tensor) % self.data

    def is_data_leader(self, rank: int) -> bool:
        """Whether a rank is the first of those that work on its share of the sequences."""
        return rank == self.data_rank(rank) * self.context * self.tensor

    def describe(self) -> str:
        """The axes that are split, such as ``pipeline 2 x shard 4``."""
        split = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return " x ".join(split) or "one device"


def resolve_degrees(config: JobConfig, world_size: int) -> Degrees:
    """The degrees that a job asks for, ``data_parallel_shard_degree`` −1 filled in.

    Raises:
        UserError: their product is not the number of processes, or the data cannot be dealt to so many.
    """
    training, experimental = config.training, config.experimental
    others = {
        "training.data_parallel_replicate_degree": training.data_parallel_replicate_degree,
        TENSOR_DEGREE: training.tensor_parallel_degree,
        PIPELINE_DEGREE: experimental.pipeline_parallel_degree,
        CONTEXT_DEGREE: experimental.context_parallel_degree,
    }
    replicate, tensor, pipeline, context = others.values()
    shard, product = training.data_parallel_shard_degree, replicate * tensor * pipeline * context
    if shard == -1 and world_size % product == 0:
        shard = world_size // product
    if shard * product != world_size:
        given = [f"{name} = {degree}" for name, degree in others.items() if degree > 1]
        given += [f"training.data_parallel_shard_degree = {shard}"] * (shard > 1)
        if shard == -1:
            advice = f"they come to {product:,}, which leaves no whole number for data_parallel_shard_degree"
        else:
            advice = f"they come to {shard * product:,}; data_parallel_shard_degree = -1 takes what the others leave"
        raise UserError(
            f"{', '.join(given) or 'training.data_parallel_shard_degree = 1'}: the degrees must multiply to the "
            f"{world_size} processes that there are (NNODE * NGPU, in a dry run job.world_size); {advice}"
        )
    degrees = Degrees(pipeline, replicate, shard, context, tensor)
    check_data_ranks(training.num_streams, degrees.data)
    return degrees


def check_data_ranks(num_streams: int, num_ranks: int) -> None:
    """Refuse a number of data-parallel ranks that the streams cannot be dealt to evenly.

    Raises:
        UserError: names the numbers that can.
    """
    if num_streams % num_ranks:
        divisors = [str(size) for size in range(1, num_streams + 1) if num_streams % size == 0]
        raise UserError(
            f"{num_ranks} data-parallel ranks do not divide --training.num_streams {num_streams}; "
            f"numbers that do: {', '.join(divisors)}"
        )
