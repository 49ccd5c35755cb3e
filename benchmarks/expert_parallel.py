"""What experts over ranks cost where there is one rank: forward + backward of an octavo.MoE on one GPU, in ms.

    python -m benchmarks.expert_parallel [--tokens 8192] [--repeat 10] [--small]

It compares the layer of one process, which copies no row to its expert, `ep_group` of one rank, which is the same
layer, and the dispatcher itself: with exact numbers of rows, as values and as codes, and with a fixed number, captured.
Nothing is sent: what is measured are sorts, copies and casts around the experts.
"""

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator

import torch

import octavo
from octavo import moe

SHAPES = {"8 of 2, 4096x14336": (4096, 14336, 8, 2), "128 of 8, 4096x1536": (4096, 1536, 128, 8)}
SMALL = {"8 of 2, 128x256": (128, 256, 8, 2)}


def mixture(shape: tuple[int, int, int, int], recipe: str, **settings: object) -> octavo.MoE:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return octavo.MoE(*shape, recipe=recipe, device=device, dtype=torch.bfloat16, **settings)  # type: ignore[arg-type]


def cases(shape: tuple[int, int, int, int], recipe: str) -> Iterator[tuple[str, octavo.MoE, bool]]:
    """Names, layers, and whether a step is captured."""
    yield "one process", mixture(shape, recipe), False
    yield "ep_group of one rank", mixture(shape, recipe, ep_group=""), False
    yield "a dispatcher within the process", mixture(shape, recipe, dispatcher=moe.LocalDispatch()), False
    for payload in ("values", "auto"):
        yield f"all-to-all, {payload}", mixture(shape, recipe, dispatcher=moe.ExpertParallel(payload=payload)), False
    capacity = moe.ExpertParallel(engine="padded")
    yield "padded, captured", mixture(shape, recipe, dispatcher=capacity), True
    yield "one process, captured", mixture(shape, recipe), True


def step(model: octavo.MoE, x: torch.Tensor, dy: torch.Tensor) -> None:
    for p in (x, *model.parameters()):
        p.grad = None
    model(x).backward(dy)


def captured(call: Callable[[], None]) -> Callable[[], None]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def times(call: Callable[[], None], repeat: int) -> list[float]:
    """Returns milliseconds of each call."""
    found = []
    for _ in range(3):
        call()
    for _ in range(repeat):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        call()
        events[1].record()
        torch.cuda.synchronize()
        found.append(events[0].elapsed_time(events[1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--recipe", default="fp8-block")
    parser.add_argument("--small", action="store_true", help="one small layer, on a CPU too, without times")
    given = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    for title, shape in (SMALL if given.small else SHAPES).items():
        print(f"{given.recipe}, {given.tokens} tokens, {title}")
        x, dy = (torch.randn(given.tokens, shape[0], device="cuda" if has_gpu else "cpu").bfloat16() for _ in range(2))
        x.requires_grad_()
        for name, model, captures in cases(shape, given.recipe):
            call = functools.partial(step, model, x, dy)
            if not has_gpu:
                call()
                print(f"  {name:34} ran")
                continue
            found = times(captured(call) if captures else call, given.repeat)
            print(
                f"  {name:34} {statistics.median(found):8.3f} ms   ({min(found):.3f} to {max(found):.3f})", flush=True
            )
            model.zero_grad()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
