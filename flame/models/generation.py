"""Hand FLA's models their cache when transformers generates.

transformers renamed the models' argument `past_key_values` to `cache` (seen in 5.24, not yet in 5.17). FLA 0.6 still
reads the old name and swallows the new one, so that from the second token on a model sees nothing but the last token.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor


def is_cache_renamed() -> bool:
    """Whether the installed transformers passes the cache under the name that FLA 0.6 does not know."""
    from transformers import GenerationMixin

    return "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters


def prepare_inputs_for_generation(
    self: Any, input_ids: Tensor | None = None, cache: Any = None, past_key_values: Any = None, **kwargs: Any
) -> dict[str, Any]:
    """Model inputs of the next step, the cache under FLA's name."""
    from transformers import GenerationMixin

    cache = past_key_values if cache is None else cache
    inputs = GenerationMixin.prepare_inputs_for_generation(self, input_ids, cache=cache, **kwargs)
    inputs["past_key_values"] = inputs.pop("cache", None)
    return inputs
