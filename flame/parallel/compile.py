"""torch.compile, block by block.

Blocks repeat, so that one graph serves all of a kind. A block's ``forward`` is compiled in place: no module is wrapped
and parameters keep their names; the hooks that sharding hangs on the block stay outside, and so does activation
checkpointing, which runs the compiled forward a second time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from flame.models.compiled import prepare_operators_for_compile

logger = logging.getLogger(__name__)

# Names of what differs between steps or blocks, as patterns: compiled once for any number of documents and any block.
_DYNAMIC = (r".*cu_seqlens.*", r".*layer_idx.*")


def compile_blocks(blocks: Iterable[tuple[str, nn.Module]], *, shared: bool = False, exact_casts: bool = False) -> None:
    """Compile each block's forward in place; call after tensor parallelism, before checkpointing and sharding.

    Args:
        blocks: (name, module).
        shared: ranks share the modules of a block by tensor parallelism. Their hooks gather and scatter the sequence
            around each mixer and MLP, which are then compiled one by one.
        exact_casts: round wherever the code casts, which fused kernels leave out; scales of float8 rows need it, as
            the forward and the backward compute them in different kernels (pytorch issue 150859).
    """
    prepare_operators_for_compile()
    blocks = list(blocks)
    units = [unit for _, block in blocks for unit in (_units(block) if shared else (block,))]
    # One graph for each kind of block and, where a mixer looks at its own number, for each block.
    limit = 8 * (len(blocks) + 1)
    torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, limit)
    torch.compiler.config.dynamic_sources = ",".join(_DYNAMIC)
    options = {"emulate_precision_casts": True} if exact_casts else None
    for unit in units:
        unit.forward = torch.compile(unit.forward, options=options)
    mixers = f"{len(units)} mixers and MLPs of " if shared else ""
    logger.info("torch.compile: %s%d blocks", mixers, len(blocks))


def _units(block: nn.Module) -> Iterator[nn.Module]:
    return (child for child in block.children() if next(child.children(), None) is not None)
