"""Find a model's repeated transformer blocks, whatever its author called them."""

from __future__ import annotations

from torch import nn

from flame.errors import UserError


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks of ``model`` as (name, module), in the order in which the model holds them.

    A block is an entry of a ``ModuleList`` or ``ModuleDict`` that lies inside no other block. Among the lists of a
    model the one with the most parameters is taken, together with every other list whose entries are of the same
    classes (an encoder and a decoder, or a backbone that is split in two). Classes named in ``_no_split_modules``,
    where Hugging Face models list their blocks, are preferred.

    Raises:
        UserError: no such list exists.
    """
    lists = _outermost_lists(model)
    hinted = {name: entries for name, entries in lists.items() if _classes(entries) <= _declared_blocks(model)}
    candidates = hinted or lists
    if not candidates:
        raise UserError(
            f"{type(model).__name__} has no repeated blocks: no nn.ModuleList or nn.ModuleDict with parameters was "
            "found; keep its layers in one so that they can be sharded, checkpointed and compiled one by one"
        )
    largest = max(candidates.values(), key=_num_parameters)
    chosen = [entries for entries in candidates.values() if _classes(entries) & _classes(largest)]
    return [block for entries in chosen for block in entries]


def _outermost_lists(model: nn.Module) -> dict[str, list[tuple[str, nn.Module]]]:
    """Name of each list that lies in no other list -> its named entries; lists without parameters are left out."""
    lists: dict[str, list[tuple[str, nn.Module]]] = {}

    def visit(module: nn.Module, name: str) -> None:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            entries = [(f"{name}.{key}", child) for key, child in module.named_children()]
            if any(_has_parameters(child) for _, child in entries):
                lists[name] = entries
            return
        for key, child in module.named_children():
            visit(child, f"{name}.{key}" if name else key)

    visit(model, "")
    return lists


def _declared_blocks(model: nn.Module) -> set[str]:
    return {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}


def _classes(entries: list[tuple[str, nn.Module]]) -> set[str]:
    return {type(block).__name__ for _, block in entries}


def _num_parameters(entries: list[tuple[str, nn.Module]]) -> int:
    return sum(parameter.numel() for _, block in entries for parameter in block.parameters())


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
