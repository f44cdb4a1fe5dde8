"""How Triton's autotuner tries the candidates of a kernel: all compiled at once, then each timed for a short while.

Left alone it compiles a candidate, times it for an eighth of a second, compiles the next: minutes in a first step.
How it chooses and where it keeps the result stay Triton's. ``compile_ahead`` does the compiling before there is a
first step, for kernels whose launches are known.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

logger = logging.getLogger(__name__)

# Milliseconds; Triton's own are 25 and 100. Kernels of a training step run for 0.05 to 5 ms.
WARMUP_MS, TIMED_MS = 5, 20
NEVER = [float("inf")] * 3  # a candidate's time, when it cannot run
# A thread has 255 registers; more elements than this of two float32 operands spill, and take up to 20 s to compile.
MOST_ELEMENTS = 64
_ELEMENTWISE = "fla.modules.activations."


def bench_compiled(original: Callable) -> Callable:
    """``Autotuner._bench`` that has all candidates of a kernel compiled when the first of them is to be timed."""

    def _bench(tuner: Any, *args: Any, config: Any, **options: Any) -> list[float]:
        candidates = tuner.prune_configs(options)
        if config is candidates[0]:
            _time_shortly(tuner)
            try:
                compile_candidates(tuner.fn, args, options, [each for each in candidates if not spills(tuner, each)])
            except Exception:  # Triton compiles them one by one then, and says what is wrong with one that it needs
                logger.debug("candidates of %s were not compiled together", tuner.base_fn.__name__, exc_info=True)
        return NEVER if spills(tuner, config) else original(tuner, *args, config=config, **options)

    return _bench


def keep_plain_results(original: Callable) -> Callable:
    """``Autotuner.check_disk_cache`` that keeps no result which JSON cannot hold, such as a key with a data type in it:
    Triton would raise a TypeError. Kernels that do not ask for their results to be kept may have such keys."""

    def check_disk_cache(tuner: Any, tuning_key: tuple, candidates: list[Any], bench: Callable[[], None]) -> bool:
        try:
            json.dumps([tuning_key, [each.__dict__ for each in candidates]])
        except TypeError:
            bench()
            return False
        return original(tuner, tuning_key, candidates, bench)

    return check_disk_cache


def compile_candidates(kernel: Any, args: tuple, options: dict[str, Any], candidates: list[Any]) -> None:
    """Compile a kernel for each of its candidates, several at a time, into Triton's cache; nothing is launched.

    What cannot be compiled is left for the autotuner to find out.

    Args:
        kernel: what the autotuner launches.
        args: positional arguments of the launch.
        options: the others, ``grid`` among them.
        candidates: ``triton.Config`` of each. Those with a hook, which may change the arguments, are left out.
    """
    import triton

    with (
        _no_collection(),
        ThreadPoolExecutor(num_compilers()) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        for config in candidates:
            if config.pre_hook is None:
                kernel.run(*args, **(options | {"warmup": True}), **config.all_kwargs())


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage meanwhile.

    A collection in the middle of parsing lets another thread parse, and Python takes the depth of one tree for that of
    the other: SystemError, "AST constructor recursion depth mismatch" (CPython issue 106905, in 3.11.7).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def spills(tuner: Any, config: Any) -> bool:
    """Whether a candidate of FLA's elementwise kernels gives each thread more elements than its registers hold."""
    if not tuner.base_fn.__module__.startswith(_ELEMENTWISE):
        return False
    return config.kwargs["B"] > MOST_ELEMENTS * 32 * config.num_warps


@dataclass(frozen=True)
class Task:
    """One kernel to compile: what ``kernel.run`` takes, without a launch.

    Attributes:
        name: of the kernel's function.
        is_tuned: whether it is a candidate that the autotuner will time.
    """

    name: str
    kernel: Any
    args: tuple
    options: dict[str, Any]
    is_tuned: bool

    @property
    def key(self) -> tuple:
        """Tells it from tasks that compile to another kernel."""
        given = (*enumerate(self.args), *self.options.items())
        return (id(self.kernel), *((name, repr(getattr(value, "dtype", value))) for name, value in given))


class _UnknownError(Exception):
    """There is no result of an earlier tuning."""


def tasks_of(kernel: Any, args: tuple, options: dict[str, Any]) -> Iterator[Task]:
    """What a launch of ``kernel`` has Triton compile: all candidates, or the one that an earlier tuning chose."""
    from triton.runtime.autotuner import Autotuner, Heuristics

    names, options = kernel.arg_names, options | {"grid": (1,), "warmup": True}
    while isinstance(kernel, Heuristics):
        named = dict(zip(names, args, strict=False)) | options
        options |= {name: choose(named) for name, choose in kernel.values.items()}
        kernel = kernel.fn
    if not isinstance(kernel, Autotuner):
        yield Task(kernel.__name__, kernel, args, options, False)
        return
    kernel.nargs = dict(zip(names, args, strict=False))
    candidates = kernel.prune_configs(options)
    candidates = [each for each in candidates if each.pre_hook is None and not spills(kernel, each)]
    if kernel.cache_results and len(candidates) > 1:
        candidates = _chosen_before(kernel, kernel.nargs | options, kernel.prune_configs(options)) or candidates
    kernel.nargs = None
    for config in candidates:
        yield Task(kernel.base_fn.__name__, kernel.fn, args, options | config.all_kwargs(), len(candidates) > 1)


def _chosen_before(tuner: Any, named: dict[str, Any], candidates: list[Any]) -> list[Any]:
    """What is kept on the disk for these arguments; the key is put together as ``Autotuner.run`` does it."""
    given = {name: value for name, value in named.items() if name in tuner.arg_names}
    key = [given[name] for name in tuner.keys if name in given]
    key += [str(value.dtype) for value in given.values() if hasattr(value, "dtype")]

    def unknown() -> None:
        raise _UnknownError

    try:
        tuner.check_disk_cache(tuple(key), candidates, unknown)
    except _UnknownError:
        return []
    return [tuner.cache[tuple(key)]]


def compile_ahead(tasks: list[Task], num_processes: int) -> None:
    """Compile kernels into Triton's cache in processes of their own, which share no interpreter lock.

    The processes are forked, so that they know the kernels, and ask the GPU for nothing. A kernel that cannot be
    compiled is left for the run to find out.
    """
    from triton.runtime import driver

    target, device = driver.active.get_current_target(), driver.active.get_current_device()
    make_launcher = getattr(driver.active, "launcher_cls", None)  # compiles C code, once for each kernel
    first = {task.kernel: number for number, task in reversed([*enumerate(tasks)])}
    forked = multiprocessing.get_context("fork")
    next_task = forked.Value("i", 0)
    parent = os.getpid()

    def work() -> None:
        driver.set_active(
            SimpleNamespace(
                get_current_target=lambda: target,
                get_current_device=lambda: device,
                get_current_stream=lambda device: 0,
            )
        )
        while os.getppid() == parent:
            with next_task.get_lock():
                number = next_task.value
                next_task.value += 1
            if number >= len(tasks):
                return
            task = tasks[number]
            try:
                compiled = task.kernel.run(*task.args, **task.options)
                if make_launcher is not None and first[task.kernel] == number:
                    make_launcher(compiled.src, compiled.metadata)
            except Exception:
                continue

    processes = [forked.Process(target=work) for _ in range(min(num_processes, len(tasks)))]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def num_compilers() -> int:
    """How many kernels this process may compile at a time: its share of the cores that it may run on."""
    return max(len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def _time_shortly(tuner: Any) -> None:
    from triton.testing import do_bench

    def short_bench(launch: Callable[[], None], quantiles: tuple[float, ...]) -> list[float]:
        return do_bench(launch, warmup=WARMUP_MS, rep=TIMED_MS, quantiles=quantiles)

    if tuner._do_bench is None:  # the kernel brings no way of its own to be timed
        tuner.do_bench = short_bench
