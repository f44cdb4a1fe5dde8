"""Keep what other libraries say at start-up out of the console."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Said by the tested versions (torch 2.11 and 2.13, torchao, fla 0.6, transformers 5) in every healthy run:
# Python warnings, by the beginning of their text ...
KNOWN_WARNINGS = (
    "Triton is not supported on current platform",  # fla on a CPU; the reference operators are used there
    "The pynvml package is deprecated",
    "Warning: Profiler clears events at the end of each cycle",  # wanted: one trace a cycle
    "`past_key_values` is deprecated",  # fla's models still use the older name of the cache
    "Both `past_key_values` and `cache` are set",
)
# ... and log records below ERROR: logger -> parts of their texts.
KNOWN_RECORDS: dict[str, tuple[str, ...]] = {
    "torchao": ("Failed to load", "Skipping import of cpp extensions"),  # optional kernels built for other systems
    "torch.utils._pytree": ("natively supported by torch.compile",),  # torchao's registration of its enums
    "transformers.utils.generic": ("`past_key_values`/`cache_params` are deprecated",),  # fla's models, as above
}


@contextmanager
def quiet_third_party() -> Iterator[None]:
    """Silence warnings and log records below ERROR while third-party modules are imported.

    Errors and exceptions pass. flame's own modules are not expected to log inside; what they would say is lost too.
    """
    disabled_before = logging.root.manager.disable
    logging.disable(max(disabled_before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled_before)


def silence_known_noise() -> None:
    """Silence ``KNOWN_WARNINGS`` and ``KNOWN_RECORDS`` for the rest of the process; everything else stays visible."""
    for text in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=text)
    for name, texts in KNOWN_RECORDS.items():
        logger = logging.getLogger(name)
        if not any(isinstance(old, DropRecords) for old in logger.filters):
            logger.addFilter(DropRecords(texts))


class DropRecords(logging.Filter):
    """Drop records below ERROR that contain one of ``texts``."""

    def __init__(self, texts: tuple[str, ...]):
        super().__init__()
        self.texts = texts

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or not any(text in record.getMessage() for text in self.texts)
