"""The walk: how many of Octavo's own Python functions one forward and one backward call, layer by layer.

    python benchmarks/walk.py [--device cpu] [--files]

A call is counted by `sys.setprofile` when its code lies in the package; comprehensions are not counted, since later
Pythons inline them. x is random, and three steps come before the one that is counted: delayed scaling measures its
operands in the first. On a CPU nothing is replayed, so that every function on the way is seen; `--device cuda` counts
the calls of a hit of the call cache. The last column is the number of files that forward and backward run through;
`--files` lists them. Counts are the same on every machine; times are not measured.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import octavo

PACKAGE = str(Path(octavo.__file__).parent) + "/"
ROWS, WIDTH, GROUPS = 32, 64, 4
STEPS = {"cpu": 3, "cuda": 8}  # before the one that is counted: a call is recorded, and found by its key, before a hit


def layers(device: str, recipe: str) -> dict[str, tuple[nn.Module, Callable[..., Any]]]:
    """Each layer and its call, eager or compiled without code generation."""
    where: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "recipe": recipe}
    linear, compiled = octavo.Linear(WIDTH, WIDTH, **where), octavo.Linear(WIDTH, WIDTH, **where)
    mlp = octavo.LayerNormMLP(WIDTH, 2 * WIDTH, **where)
    grouped = octavo.GroupedLinear(GROUPS, WIDTH, WIDTH, **where)
    moe = octavo.MoE(WIDTH, 2 * WIDTH, GROUPS, 2, **where)
    sizes = torch.full((GROUPS,), ROWS // GROUPS, device=device)
    return {
        "Linear, eager": (linear, linear),
        "Linear, compiled": (compiled, torch.compile(compiled, backend="aot_eager", fullgraph=True)),
        "LayerNormMLP, eager": (mlp, mlp),
        f"GroupedLinear of {GROUPS}, eager": (grouped, lambda x: grouped(x, sizes)),
        f"MoE of {GROUPS}, eager": (moe, moe),
    }


def counted(work: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """Return the result of `work`, and how many functions of each file it called."""
    calls: Counter[str] = Counter()

    def seen(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            calls[code.co_filename.removeprefix(PACKAGE)] += 1

    sys.setprofile(seen)
    try:
        return work(), calls
    finally:
        sys.setprofile(None)


def walk(module: nn.Module, call: Callable[..., Any], device: str) -> tuple[Counter[str], Counter[str]]:
    """Return the calls of a forward and of a backward, in a step like the one before."""

    def random() -> torch.Tensor:
        return torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16)

    with torch.autograd.set_multithreading_enabled(False):  # a profile is of one thread
        for _ in range(STEPS[device]):
            call(random().requires_grad_()).backward(random())
            octavo.step(module)
        x, dy = random().requires_grad_(), random()
        y, forward = counted(lambda: call(x))
        _, backward = counted(lambda: y.backward(dy))
    return forward, backward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=STEPS, help="cpu (default) or cuda")
    parser.add_argument("--recipe", default="fp8-delayed", help="a recipe, default fp8-delayed")
    parser.add_argument("--files", action="store_true", help="also list the calls by file")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"{'calls of ' + arguments.recipe:32} forward  backward  files")
    for name, (module, call) in layers(arguments.device, arguments.recipe).items():
        forward, backward = walk(module, call, arguments.device)
        print(f"{name:32} {forward.total():7}  {backward.total():8}  {len(forward | backward):5}")
        if arguments.files:
            for file in sorted(forward | backward):
                print(f"  {file:30} {forward[file]:7}  {backward[file]:8}")


if __name__ == "__main__":
    main()
