"""Measurements of one step on a GPU. On a CPU they only show that the step runs: a few readings by the clock, no
memory, and graphs without generated code."""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from octavo._torch.compilation import fresh_cache
from octavo.cli.bench import timed_step as steps
from octavo.cli.timing import REPEATS, WARMUP, eager_ms

CPU_REPEATS = 3

Step = Callable[[], object]


def compiled(module: nn.Module, device: torch.device, mode: str = "default") -> Callable[..., Any]:
    """Returns the module compiled as a single graph."""
    settings: dict[str, Any] = {"mode": mode} if device.type == "cuda" else {"backend": backend(device)}
    call: Callable[..., Any] = torch.compile(module, fullgraph=True, **settings)
    return call


def backend(device: torch.device) -> str:
    """Returns the name of the compiler behind torch.compile."""
    return "inductor" if device.type == "cuda" else "aot_eager"


def no_caches(device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context in which the compiler reads no results of earlier runs."""
    return fresh_cache() if device.type == "cuda" else nullcontext()


def step_ms(
    step: Step, device: torch.device, *, warmup: int = WARMUP, repeats: int = REPEATS
) -> tuple[float, list[float]]:
    """Returns the median milliseconds from step to step, and every reading."""
    if device.type == "cuda":
        return eager_ms(step, warmup=warmup, repeats=repeats)
    readings = [step_seconds(step, device) * 1e3 for _ in range(CPU_REPEATS)]
    return statistics.median(readings), readings


def step_seconds(step: Step, device: torch.device) -> float:
    """Returns the wall-clock seconds of one step."""
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def step_peak_mib(step: Step, device: torch.device) -> float | None:
    """Returns the most MiB that one step allocates beyond what was allocated before; None on a CPU."""
    return steps.peak_mib(step) if device.type == "cuda" else None


def step_kernels(step: Step, device: torch.device) -> list[dict[str, Any]]:
    """Returns the milliseconds of each GPU kernel in one step, the longest first; nothing on a CPU."""
    return steps.kernels_ms(step) if device.type == "cuda" else []
