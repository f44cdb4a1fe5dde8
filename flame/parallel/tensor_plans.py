"""What each family's modules share under tensor parallelism, and a whole model shared by it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flame.errors import UserError
from flame.models.blocks import find_blocks
from flame.models.loss import HeadLoss, head_loss
from flame.parallel.tensor import Split, keep_module, share_module
from flame.parallel.tensor_operators import correct_norm, install_tensor_parallel
from flame.parallel.vocabulary import keep_embedding, keep_head, share_embedding, share_head

_QKV = ("q_proj", "k_proj", "v_proj")
_CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
_HEADS = (*_QKV, "g_proj", *_CONVOLUTIONS)
_DIMENSIONS = ("num_heads", "num_kv_heads", "num_v_heads", "key_dim", "value_dim")


def _part(start: int, length: int, rank: int, size: int) -> Tensor:
    """Indices of a rank's part of ``length`` rows from ``start`` on."""
    return torch.arange(start, start + length).chunk(size)[rank]


def _mamba_rows(module: nn.Module, rank: int, size: int) -> Tensor:
    """Rows of Mamba's in_proj: channels, then their gates."""
    width = module.intermediate_size
    return torch.cat([_part(start, width, rank, size) for start in (0, width)])


def _mamba2_channels(module: nn.Module, rank: int, size: int) -> Tensor:
    """Channels of Mamba-2's convolution: x of every head, then B and C of every group; a lone group is everyone's."""
    width, states = module.intermediate_size, module.n_groups * module.ssm_state_size
    shares = size if module.n_groups > 1 else 1
    starts = (width, width + states)
    return torch.cat([_part(0, width, rank, size), *(_part(start, states, rank % shares, shares) for start in starts)])


def _mamba2_rows(module: nn.Module, rank: int, size: int) -> Tensor:
    """Rows of Mamba-2's in_proj: gates, the convolution's channels, and dt of every head."""
    width = module.intermediate_size
    channels = width + _mamba2_channels(module, rank, size)
    heads = _part(width + module.conv_dim, module.num_heads, rank, size)
    return torch.cat([_part(0, width, rank, size), channels, heads])


def _mamba2_split(module: nn.Module) -> Split:
    one_group = module.n_groups == 1
    return Split(
        rows=("norm", "A_log", "D", "dt_bias"),
        columns=("out_proj",),
        counts=("intermediate_size", "num_heads", *(() if one_group else ("n_groups", "conv_dim"))),
        changed={
            "conv_dim": lambda module, size: module.intermediate_size // size + 2 * module.ssm_state_size,
            **({"norm.group_size": lambda module, size: module.intermediate_size // size} if module.rmsnorm else {}),
        }
        if one_group
        else {},
        sliced={
            "in_proj.weight": _mamba2_rows,
            "in_proj.bias": _mamba2_rows,
            "conv1d.weight": _mamba2_channels,
            "conv1d.bias": _mamba2_channels,
        },
        norms=("norm",) if one_group and module.rmsnorm else (),
    )


_TRANSFORMERS_ATTENTION = Split(
    rows=_QKV, columns=("o_proj",), divisible=("config.num_attention_heads", "config.num_key_value_heads")
)
_GATED_MLP = Split(rows=("gate_proj", "up_proj"), columns=("down_proj",), counts=("intermediate_size",))

# Package and class of a mixer or MLP -> how ranks share it. Every other parameter in it is whole on each rank, whose
# gradient is its own heads' part. Blocks may otherwise hold norms only.
SPLITS: dict[str, Split | Callable[[nn.Module], Split]] = {
    "fla.Attention": Split(rows=_HEADS, columns=("o_proj",), counts=("num_heads", "num_kv_heads")),
    "fla.GatedLinearAttention": Split(
        rows=(*_HEADS, "gk_proj.1"),
        columns=("o_proj",),
        counts=(*_DIMENSIONS, "key_dim_per_group", "value_dim_per_group"),
    ),
    "fla.DeltaNet": Split(rows=(*_HEADS, "b_proj"), columns=("o_proj",), counts=_DIMENSIONS),
    "fla.GatedDeltaNet": Split(
        rows=(*_HEADS, "a_proj", "b_proj", "A_log", "dt_bias"), columns=("o_proj",), counts=_DIMENSIONS
    ),
    "fla.GatedSlotAttention": Split(
        rows=(*_HEADS, "f_proj", "g_norm"),
        columns=("o_proj",),
        counts=(*_DIMENSIONS, "key_dim_per_group", "value_dim_per_group"),
        norms=("g_norm",),
    ),
    "fla.HGRN2Attention": Split(
        rows=("q_proj", "f_proj", "i_proj", "q_conv1d", "f_conv1d", "i_conv1d", "g_norm"),
        columns=("o_proj",),
        counts=("num_heads", "forget_dim", "input_dim"),
        norms=("g_norm",),
        arguments=("lower_bound",),
    ),
    "fla.MultiScaleRetention": Split(
        rows=_HEADS, columns=("o_proj",), counts=(*_DIMENSIONS, "key_dim_per_group", "value_dim_per_group")
    ),
    "fla.KimiDeltaAttention": Split(
        rows=(*_QKV, *_CONVOLUTIONS, "f_proj.1", "g_proj.1", "b_proj", "A_log", "dt_bias"),
        columns=("o_proj",),
        counts=(*_DIMENSIONS, "gate_dim"),
    ),
    "fla.RWKV7Attention": Split(
        rows=(
            *("r_proj", "k_proj", "v_proj", "k_k", "k_a", "r_k", "g_norm"),
            *(f"{each}_lora.lora.2" for each in "wvag"),
        ),
        columns=("o_proj",),
        counts=("num_heads", "key_dim", "value_dim", "g_norm.num_groups", "g_norm.num_channels"),
    ),
    "fla.RWKV7FeedForward": Split(rows=("key",), columns=("value",), counts=("intermediate_size",)),
    "fla.Mamba": Split(
        rows=("conv1d", "dt_proj", "A_log", "D"),
        columns=("x_proj", "out_proj"),
        summed=("x_proj",),
        counts=("intermediate_size",),
        sliced={"in_proj.weight": _mamba_rows, "in_proj.bias": _mamba_rows},
    ),
    "fla.Mamba2": _mamba2_split,
    "fla.StickBreakingAttention": Split(rows=_QKV, columns=("o_proj",), counts=("num_heads", "num_kv_heads")),
    "fla.GatedMLP": _GATED_MLP,
    "custom_models.SBAAttention": Split(rows=_QKV, columns=("o_proj",), counts=("num_heads",)),
    "custom_models.SBAMLP": _GATED_MLP,
    "transformers.LlamaAttention": _TRANSFORMERS_ATTENTION,
    "transformers.LlamaMLP": _GATED_MLP,
    "transformers.Qwen3Attention": _TRANSFORMERS_ATTENTION,
    "transformers.Qwen3MLP": _GATED_MLP,
}
# Parameters of a decoder itself that are whole on each rank.
KEPT = {"fla.HGRN2Model": {"lower_bounds"}}


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
    install_tensor_parallel()
    _give_positions(model, mesh, degree)
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
        own = {each for each, _ in module.named_parameters(recurse=False)}
        if own and id(module) not in done:
            if own <= KEPT.get(_kind(module), set()):
                keep_module(module, mesh, recurse=False)
            else:
                _keep_norm(name, module, mesh, degree)
    return loss


def _kind(module: nn.Module) -> str:
    """Package and class: classes of other packages may have the same name and do something else."""
    return f"{type(module).__module__.partition('.')[0]}.{type(module).__name__}"


def _give_positions(model: nn.Module, mesh: DeviceMesh, degree: str) -> None:
    """Tell decoders of transformers the positions of the whole sequence; they would count those of a piece.

    Raises:
        UserError: layers with a window, for which they build a mask of a piece.
    """
    if not type(model).__module__.startswith("transformers."):
        return
    if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
        raise UserError(f"{degree}: {type(model).__name__} with sliding_attention layers is not known here")

    def add_positions(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if kwargs.get("position_ids") is None:
            ids, piece = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
            length, device = (piece.shape[1] * mesh.size(), piece.device) if ids is None else (ids.shape[1], ids.device)
            kwargs["position_ids"] = torch.arange(length, device=device)[None]
        return args, kwargs

    model.get_decoder().register_forward_pre_hook(add_positions, with_kwargs=True)


def _share_block(name: str, block: nn.Module, mesh: DeviceMesh, degree: str) -> None:
    own = [each for each, _ in block.named_parameters(recurse=False)]
    if own:
        raise UserError(
            f"{degree}: {type(block).__name__} has parameters of its own ({', '.join(own)}), not known here"
        )
    for child_name, child in block.named_children():
        if _kind(child) in SPLITS:
            split = SPLITS[_kind(child)]
            split = split if isinstance(split, Split) else split(child)
            share_module(f"{name}.{child_name}", child, split, mesh)
            for each in split.norms:
                correct_norm(child.get_submodule(each))
        elif next(child.parameters(), None) is not None:
            _keep_norm(f"{name}.{child_name}", child, mesh, degree)


def _keep_norm(name: str, module: nn.Module, mesh: DeviceMesh, degree: str) -> None:
    if "Norm" not in type(module).__name__:
        raise UserError(
            f"{degree}: it is not known how to share {name} ({type(module).__name__}); "
            f"known are {', '.join(sorted(SPLITS))} and norms. Use another kind of parallelism"
        )
    keep_module(module, mesh)
