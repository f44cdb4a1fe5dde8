"""Which of a run's tensors a source (a checkpoint, a Hugging Face folder) fills, and what does not fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from flame.checkpoint.names import MODEL, OPTIMIZER, check_exclusions, is_excluded
from flame.errors import UserError


def match_names(
    wanted: Mapping[str, torch.Size],
    stored: Mapping[str, torch.Size],
    source: str,
    exclude: Sequence[str] = (),
    strict: bool = True,
    stored_vocab: int | None = None,
    ignore: Collection[str] = (),
) -> list[str]:
    """The names of the tensors that a source fills.

    A source without any optimizer state fills the model alone, and nothing is missing of a parameter for which the
    source's optimizer kept nothing, as it does until the first gradient. When only the model is wanted, the source's
    optimizer state is no surplus.

    Args:
        wanted: sizes of the run's tensors by checkpoint name.
        stored: sizes of the source's tensors by the same names.
        source: what to call the source in messages.
        exclude: entries of ``checkpoint.exclude_from_loading``.
        strict: refuse names that only one side has.
        stored_vocab: vocabulary size of the source; a tensor with that many rows may fill one with more.
        ignore: names of the source that need no counterpart: tied weights, and what other ranks load (a pipeline's
            stages hold a part of the model each).

    Raises:
        UserError: names or shapes do not match, or an exclusion matches nothing.
    """
    check_exclusions(exclude, [*wanted, *stored])
    with_optimizer = _has_optimizer(wanted) and _has_optimizer(stored)

    def counts(name: str) -> bool:
        return not is_excluded(name, exclude) and (with_optimizer or not name.startswith(OPTIMIZER))

    names = [name for name in wanted if counts(name)]
    stateless = {name.removeprefix(MODEL) for name in stored} - {_owner(name) for name in stored}
    missing = [name for name in names if name not in stored and _owner(name) not in stateless]
    surplus = [name for name in stored if name not in wanted and name not in ignore and counts(name)]
    if strict and (missing or surplus):
        only_optimizer = all(name.startswith(OPTIMIZER) for name in missing + surplus)
        advice = (
            "it was trained with another optimizer: --checkpoint.exclude_from_loading optimizer starts it afresh"
            if only_optimizer
            else "use the model config it was made with, or name what to leave out in checkpoint.exclude_from_loading"
        )
        raise UserError(
            f"{source} does not fit this model: {_count(missing, 'missing')}; {_count(surplus, 'unexpected')}; {advice}"
        )
    names = [name for name in names if name in stored]
    unfit = [name for name in names if not _fits(wanted[name], stored[name], stored_vocab)]
    if unfit:
        shapes = [f"{name} is {list(stored[name])} there and {list(wanted[name])} here" for name in unfit[:4]]
        raise UserError(f"{source} does not fit this model: {len(unfit)} shapes differ: {'; '.join(shapes)}")
    return names


def sizes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    """Global sizes of tensors, plain or DTensor."""
    return {name: tensor.size() for name, tensor in tensors.items()}


def _fits(size: torch.Size, stored: torch.Size, stored_vocab: int | None) -> bool:
    if size == stored:
        return True
    same_columns = len(size) == len(stored) > 0 and size[1:] == stored[1:]
    return same_columns and stored_vocab is not None and stored[0] == stored_vocab and size[0] > stored_vocab


def _has_optimizer(names: Mapping[str, object]) -> bool:
    return any(name.startswith(OPTIMIZER) for name in names)


def _owner(name: str) -> str | None:
    """The parameter that an entry ``optimizer.<fqn>.<slot>`` belongs to; None for another entry."""
    return name.removeprefix(OPTIMIZER).rpartition(".")[0] if name.startswith(OPTIMIZER) else None


def _count(names: list[str], what: str) -> str:
    listed = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
    return f"{len(names)} {what}" + (f" ({listed})" if names else "")
