"""Time a step of FSDP2 with one rank, values gathered against codes, and the memory at its peak: eager, with compiled
blocks, and captured whole in a CUDA graph.

    python3 -m benchmarks.fsdp_codes --json benchmarks/results/fsdp-codes-h200.json
    python3 -m benchmarks.fsdp_codes --device cpu --small

A model of linear layers with float32 parameters, gathered and multiplied in bfloat16, gradients reduced in float32,
torch's fused AdamW. Over one rank nothing is sent: what is timed is the work of the hooks, casts and copies. A step is
forward, backward, optimizer and `octavo.step`; `--microbatches` repeats the first two.

peak is torch's largest allocation in a step, with one model alive. Then both models take turns, `ROUNDS` times, so that
clocks and temperature are the same for both: ms is that of a step among `TIMED`, the median of the rounds, ratio codes
to values.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import octavo
from benchmarks import study
from octavo.cli import machine
from octavo.distributed import gather_codes
from octavo.text import table

RECIPES, WAYS = ("fp8-current", "fp8-delayed", "fp8-block"), ("eager", "compiled", "captured")
WARM, ROUNDS, TIMED = 3, 6, 8
BAR = 1.03  # how much longer a step may take than with values
SHOWN = 14  # kernels of a profile


class Block(nn.Module):
    """A linear layer that FSDP2 shards by itself."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def built(plan: argparse.Namespace, recipe: str, codes: bool, way: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(plan.width, device) for _ in range(plan.layers)])
    octavo.convert(model, recipe)
    if codes:
        gather_codes(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (1,))
    for block in model:
        if way == "compiled":
            block.compile(backend="inductor" if device.type == "cuda" else "aot_eager")
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def stepping(plan: argparse.Namespace, recipe: str, codes: bool, way: str, device: torch.device) -> Callable[[], None]:
    """Return a training step of a new model, warmed up."""
    model = built(plan, recipe, codes, way, device)
    fused = {"fused": True, "capturable": True} if device.type == "cuda" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **fused)
    x = torch.randn(plan.tokens, plan.width, device=device, dtype=torch.bfloat16)

    def step() -> None:
        for _ in range(plan.microbatches):
            model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        octavo.step(model, dist.group.WORLD)

    if way == "captured":
        return captured(step)
    for _ in range(WARM):
        step()
    return step


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Return a replay of a step."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()

    def replay(model_and_optimizer: object = step) -> None:  # a graph writes to their memory, and does not keep it
        graph.replay()

    replay()
    return replay


def timed(step: Callable[[], None], synchronize: Callable[[], None]) -> float:
    """Milliseconds of a step among several, one after another: the host runs ahead, as in training."""
    synchronize()
    begin = time.perf_counter()
    for _ in range(TIMED):
        step()
    synchronize()
    return 1000 * (time.perf_counter() - begin) / TIMED


def collected() -> None:
    """Free a model, whose FSDP2 modules refer to themselves, and its graphs."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_of(plan: argparse.Namespace, recipe: str, codes: bool, way: str, device: torch.device) -> float | None:
    """MiB at the peak of a step, of a model that is alone."""
    collected()
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    step = stepping(plan, recipe, codes, way, device)
    torch.cuda.synchronize()
    if way != "captured":  # of a graph, the memory of its pool is taken while it is captured
        torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before) / 2**20


def profile(step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of the longest kernels of one step, by name."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        step()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
    kernels = [row for row in rows if row.device_type == torch.autograd.DeviceType.CUDA][:SHOWN]
    return {f"{row.key[:60]} x{row.count}": round(row.self_device_time_total / 1000, 3) for row in kernels}


def compared(plan: argparse.Namespace, recipe: str, way: str, device: torch.device) -> dict[str, Any]:
    row: dict[str, Any] = {"recipe": recipe, "way": way}
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    try:
        peaks = [peak_of(plan, recipe, codes, way, device) for codes in (False, True)]
        steps = [stepping(plan, recipe, codes, way, device) for codes in (False, True)]
        readings: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for own, step in zip(readings, steps, strict=True):
                step()  # the first after the other model
                own.append(timed(step, synchronize))
        values, codes = (statistics.median(own) for own in readings)
        row |= {"values_ms": values, "codes_ms": codes, "ratio": codes / values, "readings": readings}
        row |= {"values_peak": peaks[0], "codes_peak": peaks[1], "within": codes <= BAR * values}
        if plan.profile and device.type == "cuda":
            row["kernels"] = {name: profile(step) for name, step in zip(("values", "codes"), steps, strict=True)}
    except Exception as error:
        row |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:1000]}
    return row


def measure(plan: argparse.Namespace, device: torch.device) -> study.Report:
    if plan.small:
        plan.layers, plan.width, plan.tokens = 2, 256, 64
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    facts = ("layers", "width", "tokens", "microbatches")
    report = {"machine": machine.describe(device), "plan": {name: getattr(plan, name) for name in facts}, "results": []}
    ways = [way for way in plan.way if way != "captured" or device.type == "cuda"]
    for way in ways:
        for recipe in plan.recipe:
            report["results"].append(compared(plan, recipe, way, device))
            collected()
            print(line(report["results"][-1]), flush=True)
            study.write(report, plan.json)
    dist.destroy_process_group()
    return report


def line(row: dict[str, Any]) -> str:
    return " ".join(cells(row)) + "".join(
        f"\n  {name}: {kernel} {ms} ms" for name, own in row.get("kernels", {}).items() for kernel, ms in own.items()
    )


def cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["recipe"], row["way"], row["error"], "", "", "", ""]
    peaks = ["" if row[name] is None else f"{row[name]:.0f}" for name in ("values_peak", "codes_peak")]
    times = [f"{row['values_ms']:.2f}", f"{row['codes_ms']:.2f}", f"{row['ratio']:.3f}"]
    return [row["recipe"], row["way"], *times, *peaks]


def render(report: study.Report) -> str:
    plan = report["plan"]
    what = f"{plan['layers']} layers of {plan['width']}, {plan['tokens']} tokens x {plan['microbatches']}, one rank"
    head = ("recipe", "way", "values ms", "codes ms", "ratio", "values MiB", "codes MiB")
    return f"{study.heading(report, what)}\n\n{table(head, [cells(row) for row in report['results']])}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = study.parser_of("fsdp_codes", __doc__)
    parser.add_argument("--recipe", nargs="+", default=list(RECIPES))
    parser.add_argument("--way", nargs="+", default=list(WAYS), choices=WAYS, help="captured needs a GPU")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="also list the longest kernels of a step")
    parser.add_argument("--small", action="store_true", help="two narrow layers, to see that it runs")
    return study.run(parser, argv, measure, render)


if __name__ == "__main__":
    sys.exit(main())
