"""Timers of the benches: the median of the replays of one call, captured in a CUDA graph and timed by events.

A graph leaves the host out: the host needs tens of microseconds to issue a Python call, which would be added to kernels
that take a hundred. Other timers measure the host on its own.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise

import torch
from torch import Tensor

WARMUP, REPEATS = 10, 60


def device_ms(call: Callable[[], object], *, warmup: int = WARMUP, repeats: int = REPEATS) -> tuple[float, list[float]]:
    """Return the median milliseconds of one call on the current CUDA device, and every reading."""
    call()  # compiles and probes, which a capture cannot contain
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


def copy_ms(source: Tensor) -> tuple[float, list[float]]:
    """Return `device_ms` of a copy of this tensor: by the copy engine or by a kernel that changes signs on the way,
    whichever is faster. Either is on some machine by a third."""
    target = torch.empty_like(source)
    ways: tuple[Callable[[], object], ...] = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    return min(device_ms(way) for way in ways)


def host_us(call: Callable[[], object], *, repeats: int = REPEATS) -> float:
    """Return the median microseconds that the host takes to issue one call, without waiting for the device."""
    readings = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        readings.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(readings)


def hosts_us(call: Callable[[], object], *, repeats: int = REPEATS) -> dict[str, float]:
    """Return `host_us` of a step three times: as it is, with backward on the calling thread, and with all threads on
    one core."""
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
    """Pin all threads of this process to one of its cores inside the block (Linux)."""
    everywhere = os.sched_getaffinity(0)
    before: dict[int, set[int]] = {}
    try:
        for thread in _threads():
            with suppress(ProcessLookupError):  # the thread has ended
                before[thread] = os.sched_getaffinity(thread)
            _place(thread, {max(everywhere)})
        yield
    finally:
        for thread in _threads():  # some may be new
            _place(thread, before.get(thread, everywhere))


def _place(thread: int, cores: set[int]) -> None:
    with suppress(ProcessLookupError):  # the thread has ended
        os.sched_setaffinity(thread, cores)


def _threads() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def eager_ms(call: Callable[[], object], *, warmup: int = WARMUP, repeats: int = REPEATS) -> tuple[float, list[float]]:
    """Return the median milliseconds between the starts of successive calls on the device, and every reading. Calls
    are issued without waiting, so this is the device's time, or the host's where that is longer."""
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
