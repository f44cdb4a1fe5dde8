"""Which of a run's tensors a source (a checkpoint, a Hugging Face folder) fills, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flame.checkpoint.names import OPTIMIZER, check_exclusions, is_excluded
from flame.errors import UserError


def match_names(
    tensors: Mapping[str, torch.Tensor],
    stored: Mapping[str, torch.Size],
    exclude: Sequence[str] = (),
    strict: bool = True,
    source: str = "the checkpoint",
    stored_vocab: int | None = None,
    ignore: Sequence[str] = (),
) -> dict[str, torch.Tensor]:
    """The tensors that a source fills.

    A source without any optimizer state fills the model alone. When only the model is wanted, the source's optimizer
    state is no surplus.

    Args:
        tensors: the run's tensors by checkpoint name.
        stored: sizes of the source's tensors by the same names.
        exclude: entries of ``checkpoint.exclude_from_loading``.
        strict: refuse names that only one side has.
        source: what to call the source in messages.
        stored_vocab: vocabulary size of the source; a tensor with that many rows may fill one with more.
        ignore: names of the source that need no counterpart (tied weights).

    Raises:
        UserError: names or shapes do not match, or an exclusion matches nothing.
    """
    check_exclusions(exclude, [*tensors, *stored])
    with_optimizer = _has_optimizer(tensors) and _has_optimizer(stored)
    wanted = {
        name: tensor
        for name, tensor in tensors.items()
        if not is_excluded(name, exclude) and (with_optimizer or not name.startswith(OPTIMIZER))
    }
    surplus = [
        name
        for name in stored
        if name not in tensors
        and name not in ignore
        and not is_excluded(name, exclude)
        and (with_optimizer or not name.startswith(OPTIMIZER))
    ]
    missing = [name for name in wanted if name not in stored]
    if strict and (missing or surplus):
        raise UserError(
            f"{source} does not fit this model: {_count(missing, 'missing')}; {_count(surplus, 'unexpected')}; "
            "use the model config it was made with, or name what to leave out in checkpoint.exclude_from_loading"
        )
    filled = {name: tensor for name, tensor in wanted.items() if name in stored}
    unfit = [
        f"{name} is {list(stored[name])} there and {list(tensor.size())} here"
        for name, tensor in filled.items()
        if not _fits(tensor.size(), stored[name], stored_vocab)
    ]
    if unfit:
        raise UserError(f"{source} does not fit this model: {len(unfit)} shapes differ: {'; '.join(unfit[:4])}")
    return filled


def grown_rows(tensors: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Size]) -> list[str]:
    """Names of tensors that have more rows than the source gives them."""
    return [name for name, tensor in tensors.items() if tensor.ndim and tensor.size(0) > stored[name][0]]


def _fits(size: torch.Size, stored: torch.Size, stored_vocab: int | None) -> bool:
    if size == stored:
        return True
    same_columns = len(size) == len(stored) > 0 and size[1:] == stored[1:]
    return same_columns and stored_vocab is not None and stored[0] == stored_vocab and size[0] > stored_vocab


def _has_optimizer(names: Mapping[str, object]) -> bool:
    return any(name.startswith(OPTIMIZER) for name in names)


def _count(names: list[str], what: str) -> str:
    listed = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
    return f"{len(names)} {what}" + (f" ({listed})" if names else "")
