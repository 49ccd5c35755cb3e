"""Time what the host does in a step, forward and backward: of one tiny layer, of a stack, and of one layer at size.

eager, compiled    microseconds of a step; compiled by torch.compile(fullgraph=True) in its default mode
over               the same minus nn.Linear's, eager and compiled: what Octavo adds

layer              one layer of 32 x 256 -> 256: the time until the host has started a step
of a stack         the same for each of 16 such layers in one model, which torch.compile takes as one graph
at size            one layer of 8192 x 4096 -> 4096: the time from step to step, of the device or of the host

split over one rank    the first two recipes with parallel_mode="column", in a group of one rank; and its time as a part
                       of the plain layer's, next to that of a second plain layer, which shows how exact the timing is

The cases take turns, there and back, so that a host that becomes slower does so for all of them, and none always runs
after the same one. torchao is timed compiled, if it is installed.

example: octavo bench host --recipes fp8-delayed
"""

import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from octavo._torch.compilation import any_number_of_graphs, reset
from octavo.cli import options
from octavo.cli.bench import cases, linear_bench, peers
from octavo.cli.bench.training_steps import batch, calibrated_step, compiled, training_step
from octavo.cli.timing import WARMUP, eager_ms, host_us
from octavo.text import table

RECIPES = ("bf16", "fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block")
TINY, AT_SIZE = (32, 256, 256), (8192, 4096, 4096)
STACK = 16
COLUMN, SECOND = "split over one rank", "a second layer"
ROUNDS = 12
FACTS = {"bias": False, "method": {"rounds": ROUNDS, "statistic": "median of rounds"}}
SUBJECTS = {"layer": (1, TINY), "of a stack": (STACK, TINY), "at size": (1, AT_SIZE)}

Step = Callable[[], None]


def add_arguments(parser: ArgumentParser) -> None:
    options.add_recipes(parser, RECIPES)
    options.add_no_peers(parser)


def measure(arguments: Namespace, report: dict[str, Any]) -> None:
    makers: linear_bench.Makers = {"nn.Linear": linear_bench.stock}
    for place, name in enumerate(arguments.recipes):
        makers[f"octavo {name}"] = partial(linear_bench.low, recipe=name)
        if place < 2:  # next to the layer that they are compared to
            makers[f"octavo {name}, {COLUMN}"] = partial(linear_bench.low, recipe=name, parallel_mode="column")
            makers[f"octavo {name}, {SECOND}"] = partial(linear_bench.low, recipe=name)
    conversions = {} if arguments.no_peers else peers.conversions()
    report["subjects"] = {}
    for subject, (layers, shape) in SUBJECTS.items():
        reset()
        with any_number_of_graphs(), _one_rank():
            steps = {name: _steps(_stack(make, layers, shape), shape) for name, make in makers.items()}
            for name, conversion in conversions.items():
                steps[name] = {"compiled": _steps(_converted(conversion, layers, shape), shape)["compiled"]}
            report["subjects"][subject] = _readings(steps, layers, at_size=shape == AT_SIZE)
        del steps
        torch.cuda.empty_cache()


@contextmanager
def _one_rank() -> Iterator[None]:
    """Make this process the one rank of the default group inside the block, if it is not in one yet."""
    if not dist.is_available() or dist.is_initialized():
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _stack(make: Callable[[int, int], nn.Module], layers: int, shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(*[make(shape[1], shape[2]) for _ in range(layers)])


def _converted(conversion: Callable[[nn.Module], None], layers: int, shape: tuple[int, int, int]) -> nn.Module:
    model = _stack(linear_bench.stock, layers, shape)
    conversion(model)
    return model


def _steps(model: nn.Module, shape: tuple[int, int, int]) -> dict[str, Step]:
    """Return the steps of a model and of its compiled form, both warmed up."""
    x, dy = batch(*shape)
    steps = {"eager": calibrated_step(model, x, dy)}
    steps["compiled"] = training_step(model, x, dy, compiled(model, x.device))
    for step in steps.values():
        for _ in range(WARMUP):
            step()
    return steps


def _readings(steps: dict[str, dict[str, Step]], layers: int, *, at_size: bool) -> dict[str, Any]:
    """Return the microseconds of a layer in each round, for each case and mode."""
    found: dict[str, Any] = {case: {mode: [] for mode in modes} for case, modes in steps.items()}
    cases = list(steps.items())
    for _ in range(ROUNDS):
        cases.reverse()
        for case, modes in cases:
            for mode, step in modes.items():
                us = eager_ms(step, warmup=5, repeats=20)[0] * 1e3 if at_size else host_us(step, repeats=20)
                found[case][mode].append(us / layers)
    return found


def render(report: dict[str, Any]) -> str:
    parts = [cases.heading(report, cases.LAYER)]
    for subject, found in report["subjects"].items():
        layers, (tokens, k, n) = SUBJECTS[subject]
        title = f"{subject}: us of a layer of {tokens} x {k} -> {n}" + (f", {layers} in a stack" if layers > 1 else "")
        medians = {case: {mode: statistics.median(us) for mode, us in modes.items()} for case, modes in found.items()}
        rows = [[case, *_cells(median, medians["nn.Linear"])] for case, median in medians.items()]
        text = table(("case", "eager", "compiled", "over, eager", "over, compiled"), rows)
        parts.append("\n".join(filter(None, [title, text, _beside_plain(found)])))
    return "\n\n".join(parts)


def _cells(median: dict[str, float], stock: dict[str, float]) -> list[str]:
    """Return the microseconds of each mode, then how far they are above those of nn.Linear."""
    return [
        *[f"{median[mode]:.0f}" if mode in median else "-" for mode in stock],
        *[f"{median[mode] - stock[mode]:+.0f}" if mode in median else "-" for mode in stock],
    ]


def _beside_plain(found: dict[str, Any]) -> str:
    """Return the time of a layer that is split over one rank as a part of the plain layer's, and of a second plain
    layer's: the median of the ratios of each round."""
    lines = []
    for case, modes in found.items():
        name, _, kind = case.partition(", ")
        if kind not in (COLUMN, SECOND) or name not in found:
            continue
        ratios = {mode: [a / b for a, b in zip(us, found[name][mode], strict=False)] for mode, us in modes.items()}
        of_modes = [f"{statistics.median(parts):.3f} {mode}" for mode, parts in ratios.items() if parts]
        lines += [f"{case}: {', '.join(of_modes)}, of {name}"] if of_modes else []
    return "\n".join(lines)
