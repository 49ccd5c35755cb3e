"""How a bench times: device events around each call, after a warm-up, and the median of many."""

import statistics
from collections.abc import Callable

import torch

WARMUP, REPEATS = 10, 60


def median_ms(call: Callable[[], object], *, warmup: int = WARMUP, repeats: int = REPEATS) -> tuple[float, list[float]]:
    """Median milliseconds of one call on the current CUDA device, and every reading."""
    for _ in range(warmup):
        call()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda.synchronize()
    for start, end in marks:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    readings = [start.elapsed_time(end) for start, end in marks]
    return statistics.median(readings), readings
