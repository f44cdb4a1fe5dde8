"""Names of parameters and modules, whatever wraps the model."""

from __future__ import annotations

import re

# Module names that torch.compile and checkpoint_wrapper insert into the path of what they wrap, and those under which
# a rank keeps its stages of a pipeline, each with the names of the whole model.
WRAPPERS = re.compile(r"_orig_mod|_checkpoint_wrapped_module|pipeline_stage_\d+")
STAGE = "pipeline_stage_{}"


def clean_fqn(fqn: str) -> str:
    """The name a module or parameter has without wrappers: ``layers.0._orig_mod.mlp`` gives ``layers.0.mlp``."""
    return ".".join(part for part in fqn.split(".") if not WRAPPERS.fullmatch(part))
