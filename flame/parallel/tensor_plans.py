"""What each family's modules share under tensor parallelism, and a whole model shared by it."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flame.errors import UserError
from flame.models.blocks import find_blocks
from flame.models.loss import HeadLoss, head_loss
from flame.parallel.tensor import Split, keep_module, share_module
from flame.parallel.vocabulary import keep_embedding, keep_head, share_embedding, share_head

_CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
_HEADS = ("q_proj", "k_proj", "v_proj", "g_proj", *_CONVOLUTIONS)
_DIMENSIONS = ("num_heads", "num_kv_heads", "num_v_heads", "key_dim", "value_dim")

# Class of a mixer or MLP -> how ranks share it. Every other parameter in it is whole on each rank, whose gradient is
# its own heads' part. Blocks may otherwise hold norms only.
SPLITS: dict[str, Split] = {
    "Attention": Split(rows=_HEADS, columns=("o_proj",), counts=("num_heads", "num_kv_heads")),
    "GatedLinearAttention": Split(
        rows=(*_HEADS, "gk_proj.1"),
        columns=("o_proj",),
        counts=(*_DIMENSIONS, "key_dim_per_group", "value_dim_per_group"),
    ),
    "DeltaNet": Split(rows=(*_HEADS, "b_proj"), columns=("o_proj",), counts=_DIMENSIONS),
    "GatedDeltaNet": Split(
        rows=(*_HEADS, "a_proj", "b_proj", "A_log", "dt_bias"), columns=("o_proj",), counts=_DIMENSIONS
    ),
    "GatedMLP": Split(rows=("gate_proj", "up_proj"), columns=("down_proj",), counts=("intermediate_size",)),
}


def share_model(model: nn.Module, mesh: DeviceMesh, *, loss_parallel: bool = True) -> HeadLoss | None:
    """Let the ranks of ``mesh`` (1-D) share a model on the meta device, or a stage of a pipeline.

    Args:
        loss_parallel: share the vocabulary; else embedding and output projection are whole on every rank.

    Returns:
        The loss, for ``attach_training_forward``; None of a stage without output projection.

    Raises:
        UserError: a module that this does not know, or a number of heads or rows that the degree does not divide.
    """
    degree = f"training.tensor_parallel_degree = {mesh.size()}"
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    has_embedding, has_head = (isinstance(each, (nn.Embedding, nn.Linear)) for each in (embedding, head))
    is_tied = has_embedding and has_head and head.weight is embedding.weight
    blocks = find_blocks(model)
    for name, block in blocks:
        _share_block(name, block, mesh, degree)
    if has_embedding:
        place_embedding = share_embedding if loss_parallel else keep_embedding
        place_embedding(names[embedding], embedding, mesh)
    if is_tied:
        head.weight = embedding.weight
    loss = None
    if has_head:
        loss = share_head(names[head], head, mesh) if loss_parallel else keep_head(head, mesh, head_loss(model))
    done = {id(module) for _, block in blocks for module in block.modules()} | {id(embedding), id(head)}
    for name, module in model.named_modules():
        if id(module) not in done and next(module.parameters(recurse=False), None) is not None:
            _keep_norm(name, module, mesh, degree)
    return loss


def _share_block(name: str, block: nn.Module, mesh: DeviceMesh, degree: str) -> None:
    own = [each for each, _ in block.named_parameters(recurse=False)]
    if own:
        raise UserError(
            f"{degree}: {type(block).__name__} has parameters of its own ({', '.join(own)}), not known here"
        )
    for child_name, child in block.named_children():
        if type(child).__name__ in SPLITS:
            share_module(f"{name}.{child_name}", child, SPLITS[type(child).__name__], mesh)
        elif next(child.parameters(), None) is not None:
            _keep_norm(f"{name}.{child_name}", child, mesh, degree)


def _keep_norm(name: str, module: nn.Module, mesh: DeviceMesh, degree: str) -> None:
    if "Norm" not in type(module).__name__:
        raise UserError(
            f"{degree}: it is not known how to share {name} ({type(module).__name__}); "
            f"known are {', '.join(sorted(SPLITS))} and norms. Use another kind of parallelism"
        )
    keep_module(module, mesh)
