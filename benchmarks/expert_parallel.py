"""What experts over ranks cost where there is one rank, and whether several processes on one GPU compute its bits.

    python -m benchmarks.expert_parallel [--tokens 8192] [--repeat 10] [--recipe fp8-block] [--small] [--json FILE]
    python -m benchmarks.expert_parallel --processes 2 [--recipes bf16,fp8-block] [--small] [--json FILE]

The first form times forward + backward of an octavo.MoE on one GPU, in ms: the layer of one process, which copies no
row to its expert; `ep_group` of one rank, which is the same layer, eager, compiled and captured; and the dispatcher
itself by each engine. Nothing is sent: what is measured are sorts, copies and casts around the experts. The first two
take turns, so that both see the chip in one state. It also runs the engines that read nothing on the host while CUDA
raises where a host waits. The exit code is 1 if `ep_group` of one rank takes more than 1.05 of the local layer, or one
waits.

The second form is `benchmarks.expert_processes`. Both run on a CPU with --small.
"""

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import octavo
from benchmarks import expert_processes
from octavo import moe

SHAPES = {"8 of 2, 4096x14336": (4096, 14336, 8, 2), "128 of 8, 4096x1536": (4096, 1536, 128, 8)}
SMALL = {"8 of 2, 128x256": (128, 256, 8, 2)}
BAR = 1.05  # of the local layer's time, for ep_group of one rank
WAYS = ("eager", "captured", "compiled", "compiled and captured")
OWN = ("one process", "ep_group of one rank")  # the two that the bar compares
Call = Callable[[], None]


def mixture(shape: tuple[int, int, int, int], recipe: str, **settings: Any) -> octavo.MoE:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return octavo.MoE(*shape, recipe=recipe, device=device, dtype=torch.bfloat16, **settings)


def cases() -> dict[str, tuple[dict[str, Any], tuple[str, ...]]]:
    """Settings of the layer, and the ways in which it runs, by title."""

    def over(**settings: Any) -> dict[str, Any]:
        return {"dispatcher": moe.ExpertParallel(**settings)}

    return {
        OWN[0]: ({}, WAYS),
        OWN[1]: ({"ep_group": ""}, WAYS),
        "a dispatcher within the process": ({"dispatcher": moe.LocalDispatch()}, ("eager", "captured")),
        "all-to-all, values": (over(payload="values"), ("eager",)),
        "all-to-all, auto": (over(), ("eager",)),
        "padded": (over(engine="padded"), ("eager", "captured", "compiled and captured")),
        "symmetric, values": (over(engine="symmetric", payload="values"), ("eager", "captured")),
        "symmetric, auto": (over(engine="symmetric"), ("eager", "captured")),
    }


def step(call: Callable[..., Any], leaves: list[torch.Tensor], dy: torch.Tensor) -> None:
    for leaf in leaves:
        leaf.grad = None
    call(leaves[0]).backward(dy)


def captured(call: Call) -> Call:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def built(title: str, shape: tuple[int, int, int, int], given: argparse.Namespace) -> dict[tuple[str, str], Call]:
    """Return a call of a step of a case, in each way."""
    settings, ways = cases()[title]
    has_gpu = torch.cuda.is_available()
    device = "cuda" if has_gpu else "cpu"
    x, dy = (torch.randn(given.tokens, shape[0], device=device, dtype=torch.bfloat16) for _ in range(2))
    model = mixture(shape, given.recipe, **settings)
    compiled = torch.compile(model, fullgraph=True, backend="inductor" if has_gpu else "aot_eager")
    leaves = [x.requires_grad_(), *model.parameters()]
    found = {}
    for way in ways if has_gpu else [way for way in ways if "captured" not in way]:
        call = functools.partial(step, compiled if "compiled" in way else model, leaves, dy)
        found[title, way] = captured(call) if "captured" in way else call
    return found


def times(calls: dict[tuple[str, str], Call], repeat: int) -> dict[tuple[str, str], list[float]]:
    """Return milliseconds of each call; calls take turns."""
    found: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for turn in range(repeat + 3):
        for key, call in calls.items():
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            call()
            events[1].record()
            torch.cuda.synchronize()
            if turn >= 3:
                found[key].append(events[0].elapsed_time(events[1]))
    return found


def waiting(recipe: str) -> dict[str, str]:
    """Run a step of the engines that read nothing on the host while CUDA raises where the host waits."""
    found = {}
    shape = next(iter(SMALL.values()))
    for engine, capacity in (("padded", None), ("padded", 200), ("symmetric", None), ("symmetric", 200)):
        for payload in ("values", "codes") if recipe != "bf16" else ("values",):
            dispatcher = moe.ExpertParallel(engine=engine, capacity=capacity, payload=payload)
            model = mixture(shape, recipe, dispatcher=dispatcher)
            x, dy = (torch.randn(300, shape[0], device="cuda", dtype=torch.bfloat16) for _ in range(2))
            leaves = [x.requires_grad_(), *model.parameters()]
            for _ in range(3):
                step(model, leaves, dy)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            title = f"{engine}, capacity {capacity}, {payload}"
            try:
                step(model, leaves, dy)
                found[title] = "waits for nothing"
            except (RuntimeError, octavo.errors.Unsupported) as error:
                found[title] = f"{type(error).__name__}: {error}"
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return found


def report(shape: tuple[int, int, int, int], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Print and return the figures of a shape."""
    results, local = [], {}
    for titles in (OWN, *[(title,) for title in cases() if title not in OWN]):  # few models at a time
        calls = {key: call for title in titles for key, call in built(title, shape, given).items()}
        if not torch.cuda.is_available():
            for (title, way), call in calls.items():
                call()
                print(f"  {title:32} {way:22} ran")
            continue
        for (title, way), readings in times(calls, given.repeat).items():
            ms = statistics.median(readings)
            local[way] = ms if title == OWN[0] else local[way]
            spread = f"({min(readings):.3f} to {max(readings):.3f})"
            print(f"  {title:32} {way:22} {ms:8.3f} ms  {ms / local[way]:6.3f}   {spread}", flush=True)
            figures = {"ms": round(ms, 3), "of the local": round(ms / local[way], 3)}
            results.append({"case": title, "way": way, **figures})
        calls.clear()
        torch.cuda.empty_cache()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--recipe", default="fp8-block")
    parser.add_argument("--shape", default="", help="time the shapes whose titles have this text")
    parser.add_argument("--small", action="store_true", help="one small layer, on a CPU too, where nothing is timed")
    parser.add_argument("--processes", type=int, default=0, metavar="N", help="compare bits of N processes on one GPU")
    parser.add_argument("--recipes", default="bf16,fp8-block", help="with --processes, separated by commas")
    parser.add_argument("--limit", type=int, default=120, metavar="SECONDS", help="with --processes, for all of them")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    given = parser.parse_args()
    found: dict[str, Any] = {"suite": "expert_parallel", "torch": torch.__version__}
    has_gpu = torch.cuda.is_available()
    found["gpu"] = torch.cuda.get_device_name() if has_gpu else None
    if given.processes:
        found |= expert_processes.compared(given.processes, given.recipes.split(","), given.small, given.limit)
        failed = found["failed"]
    else:
        found |= {"recipe": given.recipe, "tokens": given.tokens, "world_size": 1, "shapes": []}
        failed = 0
        for title, shape in (SMALL if given.small else SHAPES).items():
            if given.shape not in title:
                continue
            print(f"{given.recipe}, {given.tokens} tokens, {title}", flush=True)
            results = report(shape, given)
            found["shapes"].append({"shape": title, "results": results})
            over = [r for r in results if r["case"] == OWN[1] and r["of the local"] > BAR]
            failed += 0 if given.small else len(over)
        if has_gpu:
            found["waiting"] = waiting(given.recipe)
            for title, said in found["waiting"].items():
                print(f"  {title:32} {said}")
                failed += said != "waits for nothing"
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
