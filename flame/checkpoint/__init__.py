"""Save, load, retention and conversion of checkpoints.

``manager`` saves and resumes a run (``writer`` writes, ``background`` and ``snapshot`` while training goes on),
``initial`` starts one from other weights, ``to_hf`` and ``from_hf`` convert.
The rest answers one question each: ``names`` (what a tensor is called), ``matching`` (does a source fit), ``sources``
(what does a path hold), ``dcp`` and ``hf_weights`` (how tensors are stored), ``manifest`` (is a folder complete),
``folders`` (which steps are there), ``ranks`` (do all ranks agree).
"""

from flame.checkpoint.artifacts import save_run_artifacts
from flame.checkpoint.initial import load_initial
from flame.checkpoint.manager import CheckpointManager
from flame.checkpoint.names import clean_fqn, model_tensors, tied_names
from flame.checkpoint.writer import SaveError

__all__ = [
    "CheckpointManager",
    "SaveError",
    "clean_fqn",
    "load_initial",
    "model_tensors",
    "save_run_artifacts",
    "tied_names",
]
