"""Checkpoints of two processes: one spawned pair for all of them, since starting it takes most of the time."""

import errno
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from flame.checkpoint import manager as manager_module
from flame.checkpoint.initial import load_initial
from flame.checkpoint.manager import CheckpointManager
from flame.checkpoint.names import create_optimizer_state, model_tensors, optimizer_tensors
from flame.checkpoint.ranks import Ranks
from flame.checkpoint.writer import SaveError
from flame.errors import UserError

from .tiny import assert_equal, make_model, make_state, train


def sharded_state(seed, trained):
    """Tensors of a model sharded over all ranks, and of its optimizer."""
    model = make_model(seed)
    fully_shard(model.block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if trained:
        train(model, optimizer)
    else:
        create_optimizer_state(optimizer)
    return model_tensors(model) | optimizer_tensors(model, optimizer)


def full(tensors):
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def two_to_one(rank, root):
    """Saved by two ranks, each its part; the parent loads it into one process."""
    state = sharded_state(seed=0, trained=True)
    CheckpointManager(root / "from2", keep_latest_k=1).save(4, state, {"step": 4})
    whole = full(state)
    if rank == 0:
        torch.save(whole, root / "expected.pt")


def one_to_two(rank, root):
    """Saved by the parent as one process, loaded into shards."""
    state = sharded_state(seed=1, trained=False)
    checkpoints = CheckpointManager(root / "from1")
    assert checkpoints.latest() == 3
    assert checkpoints.load(3, state) == {"step": 3}
    assert_equal(full(state), make_state(seed=0))


def weights_only_in_bfloat16(rank, root):
    state = sharded_state(seed=0, trained=True)
    expected = {name: tensor.bfloat16() for name, tensor in full(state).items()}
    checkpoints = CheckpointManager(root / "weights")
    checkpoints.save(1, state, {}, weights_only=True, export_dtype="bfloat16")
    other = sharded_state(seed=1, trained=False)
    checkpoints.load(1, other)
    for name, tensor in full(other).items():
        assert not name.startswith("model.") or torch.equal(tensor, expected[name].float())


def hugging_face_slices(rank, root):
    """A source with fewer rows than the run: the first rows are filled, on whichever rank they lie."""
    source = torch.load(root / "hf.pt")
    state = {name: t for name, t in sharded_state(seed=1, trained=False).items() if name.startswith("model.")}
    before = {name: tensor.clone() for name, tensor in full(state).items()}
    load_initial(root / "hf", state)
    for name, tensor in full(state).items():
        rows = source[name.removeprefix("model.")]
        assert torch.equal(tensor[: len(rows)], rows), name
        assert torch.equal(tensor[len(rows) :], before[name][len(rows) :]), name


def a_rank_that_cannot_write(rank, root):
    """A full disk on one rank is an error on both, and what was there stays."""
    checkpoints = CheckpointManager(root / "full")
    state = sharded_state(seed=0, trained=True)
    checkpoints.save(1, state, {})
    original = os.fsync

    def refuse(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.fsync = refuse if rank == 1 else original
    try:
        with pytest.raises(SaveError, match=r"rank 1: OSError: .*No space left on device"):
            checkpoints.save(2, state, {})
    finally:
        os.fsync = original
    assert checkpoints.steps() == [1]
    if rank == 0:
        assert os.listdir(root / "full") == ["step-1"]
    checkpoints.save(3, state, {})
    assert checkpoints.latest() == 3


def a_folder_that_is_not_shared(rank, root):
    """Each node with a disk of its own: found out at the first save."""
    checkpoints = CheckpointManager(root / "unshared" / str(rank))
    local = manager_module.folders.start_writing
    checkpoints.ranks.on_main = lambda function: _on_main_elsewhere(rank, root, function)
    with pytest.raises(UserError, match=r"rank 1: .* is not shared between the nodes"):
        checkpoints.save(1, {"model.a": torch.zeros(2)}, {})
    assert manager_module.folders.start_writing is local


def _on_main_elsewhere(rank, root, function):
    value = function() if rank == 0 else None
    return value or root / "unshared" / "0" / f"missing-on-{rank}"


def a_part_on_each_rank(rank, root):
    """Stages of a pipeline hold different tensors: what a stage lacks is no surplus, what no stage has is one."""
    state = {"model.a": torch.full((2,), 1.0), "model.b": torch.full((2,), 2.0)}
    own = {name: state[name] for name in [sorted(state)[rank]]}
    checkpoints = CheckpointManager(root / "parts")
    checkpoints.save(1, own, {})
    for load in (lambda t: checkpoints.load(1, t), lambda t: load_initial(root / "parts", t, weights_only=False)):
        loaded = {name: torch.zeros(2) for name in own}
        load(loaded)
        assert_equal(loaded, own)
        with pytest.raises(UserError, match=r"1 unexpected \(model.b\)"):
            load({"model.a": torch.zeros(2)})


def decisions(rank, root):
    """Values and errors of one rank reach both."""
    ranks = Ranks()
    assert ranks.on_main(lambda: "main" if rank == 0 else "other") == "main"
    assert ranks.gather(rank) == [0, 1]
    assert ranks.union(["a", "b"]) == {"a", "b"}
    assert ranks.union(["shared", str(rank)]) == {"shared", "0", "1"}
    with pytest.raises(UserError, match="only rank 0 knows"):
        ranks.on_main(lambda: raise_(UserError("only rank 0 knows")))
    with pytest.raises(RuntimeError, match=r"rank 1: ValueError: odd"):
        ranks.together(lambda: raise_(ValueError("odd")) if rank == 1 else 0)
    with pytest.raises(UserError, match=r"no such step in .*; steps there are: 3"):
        CheckpointManager(root / "from1").find_step(999)
    alone = Ranks(alone=True)
    assert (alone.size, alone.on_main(lambda: rank)) == (1, rank)


def raise_(error):
    raise error


CASES = [
    decisions,
    two_to_one,
    one_to_two,
    weights_only_in_bfloat16,
    hugging_face_slices,
    a_rank_that_cannot_write,
    a_folder_that_is_not_shared,
    a_part_on_each_rank,
]


def worker(rank, root):
    torch.set_num_threads(1)
    store = f"file://{root}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    for case in CASES:
        error = None
        try:
            case(rank, root)
        except BaseException as caught:  # pytest.raises fails with a BaseException
            error = f"{type(caught).__name__}: {caught}"
        (root / f"{case.__name__}.{rank}").write_text(error or "passed")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder in which two processes have run all cases."""
    root: Path = tmp_path_factory.mktemp("two_ranks")
    CheckpointManager(root / "from1").save(3, make_state(seed=0), {"step": 3})
    (root / "hf").mkdir()
    source = {name: t.contiguous() for name, t in make_model(seed=5, vocab_size=4).state_dict().items()}
    save_file(source, root / "hf" / "model.safetensors")
    (root / "hf" / "config.json").write_text('{"vocab_size": 4}')
    torch.save(source, root / "hf.pt")
    mp.spawn(worker, args=(root,), nprocs=2)
    return root


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks(root, case):
    assert [(root / f"{case.__name__}.{rank}").read_text() for rank in (0, 1)] == ["passed", "passed"]


def test_saved_by_two_loaded_by_one(root):
    loaded = make_state(seed=1, trained=False)
    checkpoints = CheckpointManager(root / "from2")
    assert checkpoints.load(4, loaded) == {"step": 4}
    assert_equal(loaded, torch.load(root / "expected.pt"))
    assert len(list((root / "from2" / "step-4").glob("*.distcp"))) == 2
