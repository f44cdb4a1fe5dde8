"""Names of parameters and modules, whatever wraps the model."""

from __future__ import annotations

# Module names that torch.compile and checkpoint_wrapper insert into the path of what they wrap.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def clean_fqn(fqn: str) -> str:
    """The name a module or parameter has without wrappers: ``layers.0._orig_mod.mlp`` gives ``layers.0.mlp``."""
    return ".".join(part for part in fqn.split(".") if part not in WRAPPERS)
