"""How much of a step's time is spent inside kernels; the rest is Python's.

| path | counted as kernels | the rest holds, so it is a ceiling |
|---|---|---|
| native | calls into the kernels' library | torch's small operations too |
| torch | torch's operations as Python calls them, dispatch included | the cost of timing each of them too |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode

from engine.native.kernels import NativeKernels

PREFIX = "kernels_"  # of every function in the library


def share_outside_kernels(run: Callable[[], object], kernels: NativeKernels | None) -> float:
    """Of the time that `run` takes; it may be run twice.

    kernels: any of this process, as all share one library; None: there are none.
    """
    clock = Clock()
    if kernels is not None:
        with timed_library(kernels, clock):
            run_s = _seconds(run)
        if clock.elapsed_s > 0:  # else `run` keeps to torch although this machine has the kernels
            return 1 - clock.elapsed_s / run_s
    with _TimedTorch(clock):
        run_s = _seconds(run)
    return 1 - clock.elapsed_s / run_s


class Clock:
    def __init__(self) -> None:
        self.elapsed_s = 0.0

    def timing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            self.elapsed_s += time.perf_counter() - start
            return result

        return timed


@contextmanager
def timed_library(kernels: NativeKernels, clock: Clock) -> Iterator[None]:
    """Every call of every NativeKernels is timed meanwhile. Reaches into it, so that no step pays for a switch."""
    library = kernels._library
    functions = {name: function for name, function in vars(library).items() if name.startswith(PREFIX)}
    for name, function in functions.items():
        setattr(library, name, clock.timing(function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(library, name, function)


class _TimedTorch(TorchFunctionMode):
    """Sees the outermost calls alone: torch leaves the mode while one runs."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        start = time.perf_counter()
        result = function(*arguments, **(keywords or {}))
        self._clock.elapsed_s += time.perf_counter() - start
        return result


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
