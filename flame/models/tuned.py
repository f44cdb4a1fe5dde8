"""Tuning results that ship with flame: which candidate of a Triton kernel is the fastest on a kind of GPU.

``tuning_results/sm_90.json`` beside this file holds those of Hopper GPUs for some of the shipped model configs;
``utils/collect_tuning.py`` writes it. A result counts for the arguments that it was measured with, and only while the
kernel still has the candidate: after an upgrade that changes it, the kernel is tuned as any other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from flame.errors import UserError

FOLDER = Path(__file__).parent / "tuning_results"
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")  # of a candidate, beside its keyword arguments


class _FoundError(Exception):
    """A result ships with flame, and this machine has none of its own."""


def use_shipped_results(original: Callable) -> Callable:
    """``Autotuner.check_disk_cache`` that takes a result that ships with flame where this machine has measured none."""

    def check_disk_cache(tuner: Any, tuning_key: tuple, candidates: list[Any], bench: Callable[[], None]) -> bool:
        shipped = shipped_choice(tuner.base_fn.__name__, tuning_key, candidates)
        if shipped is None:
            return original(tuner, tuning_key, candidates, bench)

        def leave() -> None:
            raise _FoundError  # nothing was measured here that could be kept

        try:
            return original(tuner, tuning_key, candidates, leave)
        except _FoundError:
            tuner.cache[tuning_key] = shipped
            tuner.configs_timings = {}
            return True

    return check_disk_cache


def shipped_choice(kernel: str, tuning_key: Iterable[Any], candidates: list[Any]) -> Any | None:
    """The candidate (a ``triton.Config``) that ships for these arguments and the GPU in use, if there is one.

    Args:
        kernel: name of its function.
        tuning_key: what Triton tells its launches apart by.
        candidates: those that the kernel has now.
    """
    from triton.runtime import driver

    target = driver.active.get_current_target()
    if target.backend != "cuda":
        return None
    results = read_results(FOLDER / f"sm_{target.arch}.json")
    chosen = results.get((kernel, key_text(tuning_key)))
    return next((each for each in candidates if chosen == describe(each) and each.pre_hook is None), None)


@cache
def read_results(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What a file holds: (kernel, ``key_text``) -> ``describe`` of the fastest candidate; empty without the file.

    Raises:
        UserError: it holds something else.
    """
    if not path.is_file():
        return {}
    try:
        kernels = json.loads(path.read_text(encoding="utf-8"))["kernels"]
        found = {name: {key_text(each["key"]): each["fastest"] for each in kernels[name]} for name in kernels}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} holds no tuning results ({type(error).__name__}: {error}); restore the file, or set "
            "--job.no-shipped_tuning"
        ) from error
    return {(name, key): fastest for name, results in found.items() for key, fastest in results.items()}


def key_text(tuning_key: Iterable[Any]) -> str:
    """A tuning key as text; of one that JSON cannot hold, no two are alike."""
    return json.dumps(list(tuning_key), default=lambda value: f"{type(value).__name__} {id(value)}")


def describe(candidate: Any) -> dict[str, Any]:
    """A ``triton.Config`` as plain data, without what every candidate has."""
    options = {name: getattr(candidate, name, None) for name in OPTIONS}
    return dict(candidate.kwargs) | {name: value for name, value in options.items() if value is not None}
