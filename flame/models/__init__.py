"""Models: build, initialise, describe."""

from flame.models.blocks import find_blocks
from flame.models.build import BuiltModel, build_model, check_positions, no_decay_names
from flame.models.init import init_weights
from flame.models.model_config import load_model_config

__all__ = [
    "BuiltModel",
    "build_model",
    "check_positions",
    "find_blocks",
    "init_weights",
    "load_model_config",
    "no_decay_names",
]
