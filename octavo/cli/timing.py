"""How a bench times the device: one call captured in a CUDA graph, its replays between events, and their median.

A graph leaves the host out: a Python call takes tens of microseconds to issue, which would be charged to kernels that
take a hundred. What the host takes is measured on its own.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise

import torch

WARMUP, REPEATS = 10, 60


def device_ms(call: Callable[[], object], *, warmup: int = WARMUP, repeats: int = REPEATS) -> tuple[float, list[float]]:
    """Median milliseconds of one call on the current CUDA device, and every reading."""
    call()  # compiles and probes, which a capture cannot hold
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(warmup):
        graph.replay()
    marks = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for start, end in marks:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    readings = [start.elapsed_time(end) for start, end in marks]
    return statistics.median(readings), readings


def host_us(call: Callable[[], object], *, repeats: int = REPEATS) -> float:
    """Median microseconds the host takes to issue one call, the device left behind."""
    readings = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        readings.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(readings)


def hosts_us(call: Callable[[], object], *, repeats: int = REPEATS) -> dict[str, float]:
    """The same of a step: as it is, with backward on the thread that asks for it, and with autograd's thread and
    that one on one core."""
    for _ in range(WARMUP):
        call()
    found = {"as it is": host_us(call, repeats=repeats)}
    with torch.autograd.set_multithreading_enabled(False):
        found["one thread"] = host_us(call, repeats=repeats)
    with on_one_core():
        found["one core"] = host_us(call, repeats=repeats)
    return found


@contextmanager
def on_one_core() -> Iterator[None]:
    """All threads of this process on one of the cores that it may use (Linux)."""
    everywhere = os.sched_getaffinity(0)
    before: dict[int, set[int]] = {}
    try:
        for thread in _threads():
            with suppress(ProcessLookupError):  # it has ended
                before[thread] = os.sched_getaffinity(thread)
            _place(thread, {max(everywhere)})
        yield
    finally:
        for thread in _threads():  # some may have begun
            _place(thread, before.get(thread, everywhere))


def _place(thread: int, cores: set[int]) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.sched_setaffinity(thread, cores)


def _threads() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def eager_ms(call: Callable[[], object], *, warmup: int = WARMUP, repeats: int = REPEATS) -> tuple[float, list[float]]:
    """Median milliseconds from one call's start on the device to the next one's, calls issued without waiting: the
    device's time, or the host's where that is longer; and every reading."""
    for _ in range(warmup):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for mark in marks[:-1]:
        mark.record()
        call()
    marks[-1].record()
    torch.cuda.synchronize()
    readings = [a.elapsed_time(b) for a, b in pairwise(marks)]
    return statistics.median(readings), readings
