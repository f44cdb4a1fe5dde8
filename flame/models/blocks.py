"""Find a model's repeated transformer blocks, whatever its author called them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from typing import Any

from torch import Tensor, nn

from flame.errors import UserError

# A list of modules holds blocks when it has at least this share of the parameters of the largest such list.
_MIN_SHARE = 0.2


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks of ``model`` as (name, module), in the order in which the model holds them.

    A block is an entry of an ``nn.ModuleList`` or ``nn.ModuleDict`` that lies inside no other block and has submodules
    of its own (a list of plain linear layers or embeddings is none: their weights may be used without calling them).
    Where Hugging Face's ``_no_split_modules`` names the block classes, lists of those are taken. Otherwise it is the
    list with the most parameters, and any other that comes near it, since a backbone may be split in two.

    Raises:
        UserError: no such list exists.
    """
    lists = _outermost_lists(model)
    declared = _declared_blocks(model)
    chosen = [entries for entries in lists.values() if all(_class_names(block) & declared for _, block in entries)]
    if not chosen:
        largest = max(map(_num_parameters, lists.values()), default=0)
        chosen = [entries for entries in lists.values() if _num_parameters(entries) >= _MIN_SHARE * largest]
    if not chosen:
        raise UserError(
            f"{type(model).__name__} has no repeated blocks: no nn.ModuleList or nn.ModuleDict of layers was found; "
            "keep the layers in one, so that they can be sharded, checkpointed and compiled one by one"
        )
    return [block for entries in chosen for block in entries]


def independent_blocks(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Those of ``blocks`` that share no parameter with anything outside them, and so can be sharded on their own.

    Raises:
        UserError: every block shares some.
    """
    holders: dict[int, set[str]] = defaultdict(set)  # of each parameter: the blocks that hold it, "" for the rest
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = next((block for block, _ in blocks if name.startswith(f"{block}.")), "")
        holders[id(parameter)].add(block)
    independent = [entry for entry in blocks if all(len(holders[id(p)]) == 1 for p in entry[1].parameters())]
    if not independent:
        raise UserError(
            f"every block of {type(model).__name__} shares weights with another, so that none can be sharded on its own"
        )
    return independent


class KeptBlocks(nn.ModuleList):
    """Some of a list's blocks under the names that they have in the whole list."""

    def __init__(self, blocks: dict[str, nn.Module]):
        super().__init__()
        for name, block in blocks.items():
            self.add_module(name, block)

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()

    def __getitem__(self, index: int | slice) -> nn.Module | list[nn.Module]:
        return list(self.children())[index]


class SkippedBlock(nn.Module):
    """Stands in a list for a block that is left out, in models that count their blocks; hands on what it is given.

    Args:
        returns: names of what the model's blocks return in a tuple after the hidden states, None where they return
            the hidden states alone.
    """

    def __init__(self, returns: tuple[str, ...] | None = None):
        super().__init__()
        self.returns = returns

    def forward(self, hidden_states: Tensor, *_args: Any, **given: Any) -> Tensor | tuple:
        if self.returns is None:
            return hidden_states
        return hidden_states, *(given.get(name) for name in self.returns)


def keep_blocks(
    model: nn.Module, numbers: Container[int], stand_in: Callable[[int], SkippedBlock] | None = None
) -> None:
    """Leave out all blocks but those with these numbers, in the order of ``find_blocks``; names stay as they are.

    Args:
        stand_in: what takes the place of the block of a number, for models that look up what belongs to block i; None
            for no places.
    """
    names = [name for name, _ in find_blocks(model)]
    numbers_of = {name: number for number, name in enumerate(names)}
    for list_name in {name.rpartition(".")[0]: None for name in names}:
        parent_name, _, attribute = list_name.rpartition(".")
        parent, whole = model.get_submodule(parent_name), model.get_submodule(list_name)
        entries: dict[str, nn.Module] = {}
        for key, block in whole.named_children():
            number = numbers_of.get(f"{list_name}.{key}")
            if number is None or number in numbers:  # None: left out before
                entries[key] = block
            elif stand_in is not None:
                entries[key] = stand_in(number)
        if stand_in is None:
            kept: nn.Module = KeptBlocks(entries)
        else:
            kept = nn.ModuleDict(entries) if isinstance(whole, nn.ModuleDict) else nn.ModuleList(entries.values())
        setattr(parent, attribute, kept)


def _outermost_lists(model: nn.Module) -> dict[str, list[tuple[str, nn.Module]]]:
    """Name of each candidate list that lies in no other -> its named entries."""
    lists: dict[str, list[tuple[str, nn.Module]]] = {}

    def visit(module: nn.Module, name: str) -> None:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            children = [item for item in module.named_children() if not isinstance(item[1], SkippedBlock)]
            entries = [(f"{name}.{key}", child) for key, child in children]
            if entries and all(_is_composite(child) for _, child in entries):
                lists[name] = entries
                return
        for key, child in module.named_children():
            visit(child, f"{name}.{key}" if name else key)

    visit(model, "")
    return lists


def _declared_blocks(model: nn.Module) -> set[str]:
    return {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}


def _class_names(module: nn.Module) -> set[str]:
    # With those of the base classes, since sharding puts a class of its own in front.
    return {cls.__name__ for cls in type(module).__mro__}


def _num_parameters(entries: list[tuple[str, nn.Module]]) -> int:
    return sum(parameter.numel() for _, block in entries for parameter in block.parameters())


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None
