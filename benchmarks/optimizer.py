"""Time octavo.optim.AdamW on weights that are codes, and count the bytes that its step must move.

    python -m benchmarks.optimizer [--tiles] [--experts] [--brief] [--out FILE]

A row is one matrix of 8192 x 8192: the update alone and the whole step, which also casts the master values into codes,
beside torch's fused AdamW on a bf16 parameter and a copy of as many bytes. With --experts it is the two stacked weights
and the router of a mixture, at the shapes of `octavo bench moe`: a step between others ("ms"), the time until the host
has issued it ("host"), and the kernels and copies of one step. --brief times them in fewer settings.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

import octavo
from octavo.cli import timing
from octavo.cli.bench.moe_bench import SHAPES
from octavo.cli.bench.training_steps import kernels_ms
from octavo.kernels.adamw import Moments, adamw
from octavo.kernels.adamw import triton as kernels

SIZE = 8192


def median(work: Any) -> float:
    return float(triton.testing.do_bench(work, warmup=25, rep=200, return_mode="median"))


def update_row(states: str, master: torch.dtype) -> dict[str, Any]:
    n = SIZE * SIZE
    values = torch.randn(n, device="cuda").to(master)
    grad = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    moments = Moments.zeros(values, states)
    settings = torch.tensor([0.999, 1e-3, 0.5, 0.1, 0.999, 0.001, 1e-8, 1.0, 0.0], device="cuda")
    seed = None if master == torch.float32 else torch.tensor([1, 1], device="cuda")
    moved = 2 * (values.nbytes + sum(t.nbytes for t in moments if t is not None)) + grad.nbytes
    ms = median(lambda: adamw(values, grad, moments, settings, seed=seed))
    return {"what": f"update, {master}, states {states}".replace("torch.", ""), "ms": ms, "bytes": moved}


def step_row(recipe: str, states: str) -> dict[str, Any]:
    layer = octavo.Linear(SIZE, SIZE, bias=False, recipe=recipe, device="cuda", dtype=torch.bfloat16)
    octavo.quantize_weights(layer, trainable=True)
    layer.weight.grad = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    optimizer = octavo.optim.AdamW(layer.parameters(), states=states)
    optimizer.step()
    state = optimizer.state[layer.weight]
    moved = 2 * sum(t.nbytes for name, t in state.items() if isinstance(t, torch.Tensor) and name != "step")
    moved += layer.weight.grad.nbytes + sum(t.nbytes for t in layer.weight.tensors().values())
    return {"what": f"step, {recipe}, states {states}", "ms": median(optimizer.step), "bytes": moved}


def torchs_row() -> dict[str, Any]:
    p = torch.nn.Parameter(torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16))
    p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW([p], fused=True)
    optimizer.step()
    return {"what": "torch fused AdamW, bf16 parameter and states", "ms": median(optimizer.step), "bytes": 7 * p.nbytes}


def mixture_rows(shape: Any, brief: bool) -> list[dict[str, Any]]:
    _, experts, _, hidden, ffn = shape
    sizes = ((experts, 2 * ffn, hidden), (experts, hidden, ffn))
    rows = [experts_row("torch fused", sizes, None, "", "", False)]
    formats = (("bfloat16", "bfloat16"), ("float32", "float32"), ("bfloat16", "8bit"))
    for recipe, (master, states) in product(("fp8-delayed", "fp8-block"), formats[: 1 if brief else 3]):
        for columns in (False, True):
            rows.append(experts_row(f"{recipe}, {master}, {states}", sizes, recipe, master, states, columns))
    return rows


def experts_row(what: str, sizes: Any, recipe: str | None, master: str, states: str, columns: bool) -> dict[str, Any]:
    """Time the step of two stacked weights and a router, without forward and backward around it."""
    router = torch.nn.Parameter(torch.randn(sizes[0][0], sizes[0][2], device="cuda", dtype=torch.bfloat16))
    parameters: list[torch.nn.Parameter] = [router]
    for groups, n, k in sizes:
        where = {"device": "cuda", "dtype": torch.bfloat16}
        if recipe is None:
            parameters.append(torch.nn.Parameter(torch.randn(groups, n, k, **where)))
            continue
        layer = octavo.GroupedLinear(groups, k, n, bias=False, recipe=recipe, **where)
        octavo.quantize_weights(layer, trainable=True, keep_columns=columns)
        parameters.append(layer.weight)
    for p in parameters:
        p.grad = torch.randn(p.shape, device="cuda", dtype=torch.bfloat16)
    optimizer = (
        torch.optim.AdamW(parameters, fused=True) if recipe is None
        else octavo.optim.AdamW(parameters, master=master, states=states)
    )  # fmt: skip
    optimizer.step()
    state = [t for one in optimizer.state.values() for name, t in one.items() if name not in ("step", "version")]
    written = [t for p in parameters[1:] for t in (p.tensors().values() if recipe else (p, p))]
    masters = [one["master"] for one in list(optimizer.state.values())[1:]] if recipe else []  # which the cast reads
    moved = 2 * sum(t.nbytes for t in state) + sum(t.nbytes for t in (*written, *masters, router))
    moved += sum(p.grad.nbytes for p in parameters if p.grad is not None)
    ms, _ = timing.eager_ms(optimizer.step, warmup=3, repeats=10)
    host = timing.host_us(optimizer.step, repeats=10)
    kernels = {row["kernel"][:60]: [round(row["calls"], 1), round(row["ms"], 4)] for row in kernels_ms(optimizer.step)}
    title = f"{sizes[0][0]} experts, {what}" + ", columns" * columns
    return {"what": title, "ms": ms, "bytes": moved, "host_us": host, "kernels": kernels}


def copy_row() -> dict[str, Any]:
    x = torch.empty(SIZE * SIZE, device="cuda", dtype=torch.float32)
    y = torch.empty_like(x)
    return {"what": "copy", "ms": median(lambda: y.copy_(x)), "bytes": 2 * x.nbytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiles", action="store_true", help="time the update in several tiles, too")
    parser.add_argument("--experts", action="store_true", help="time the weights of mixtures, instead of a matrix")
    parser.add_argument("--brief", action="store_true", help="with --experts: masters and states in bfloat16 alone")
    given = parser.parse_args()
    rows = [copy_row(), torchs_row()]
    if given.experts:
        for shape in SHAPES:
            rows += mixture_rows(shape, given.brief)
    elif given.tiles:
        for tile, warps in ((4, 4), (8, 4), (16, 4), (8, 8), (16, 8), (32, 8)):
            kernels.ROWS, kernels.WARPS = tile, warps
            kernels._launch.cache_clear()
            row = update_row("float32", torch.float32)
            rows.append({**row, "what": f"{row['what']}, {tile} rows, {warps} warps"})
            row = update_row("8bit", torch.float32)
            rows.append({**row, "what": f"{row['what']}, {tile} rows, {warps} warps"})
    else:
        for states in ("float32", "bfloat16", "8bit"):
            rows += [update_row(states, torch.float32), update_row(states, torch.bfloat16)]
        for recipe in ("fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"):
            rows.append(step_row(recipe, "float32"))
    bandwidth = rows[0]["bytes"] / rows[0]["ms"]
    for row in rows:
        row["of copy"] = row["bytes"] / row["ms"] / bandwidth
        print(f"{row['what']:60} {row['ms']:8.3f} ms  {row['bytes'] / row['ms'] / 1e6:7.0f} GB/s  {row['of copy']:.2f}")
        if "kernels" in row:
            print(f"    host {row['host_us']:.0f} us; calls and ms: {row['kernels']}")
    if given.out:
        given.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
