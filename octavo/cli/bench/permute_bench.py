"""Time the kernels that move tokens to their experts and back, beside a plain copy.

A router prefers some experts: the largest gets about three times the tokens of the smallest. With K assignments a token
has K rows among those of the experts.

sort             which row each assignment gets, by expert; layout: the blocks of the experts, and the token of each row
permute          copy each token to its rows; backward sums the gradients of its rows
unpermute        sum the rows of each token, weighted; backward writes gradients of rows and weights, or of rows alone
cast-permute     quantize the rows of the experts to FP8, read from the tokens directly: with one scale that is known
                 beforehand, as in fp8-delayed, or with a scale for each 1x128 block; for matrix products over a row,
                 over a column, or both
index_select     torch's own permute, without the sort

ms               time on the GPU, from CUDA graphs
MB, GB/s         bytes that must be moved, and their rate: every input is read and every result written. Tokens are
                 counted once if all of them fit into 50 MB, the GPU's cache, and otherwise once for each of their rows.
                 Indices, weights and padding are not counted
of copy          that rate / the rate of a plain copy of 1 GiB, timed in the same run
read once        the same, with every token counted once in any case. A kernel that reads tokens in the order of the
                 experts may have to read a token several times
0.8              "yes": it reaches 0.8 of a copy with every token counted once; "gathers": only in "of copy"; or "no"

example: octavo bench permute --shape 8192,128,8,4096
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.cli import machine, options
from octavo.cli.bench import cases
from octavo.cli.timing import copy_ms, device_ms
from octavo.kernels import permute as moves
from octavo.kernels.permute import Assignments
from octavo.moe.permutation import Permutation, sort
from octavo.quant import Block1D, Quantizer, Tensorwise
from octavo.quant.grouped import quantize_groups
from octavo.quant.groups import BLOCK, Groups, split
from octavo.quant.quantizer import CastArgs

SHAPES = ((8192, 8, 2, 4096), (8192, 128, 8, 4096), (16384, 64, 6, 2048))
CACHE = 50_000_000  # bytes of a Hopper GPU's L2 cache
COPY = 2**30  # bytes of the tensor that is copied: far more than the cache
BAR = 0.8  # of a copy
FACTS = {"method": cases.REPLAYS, "cache_bytes": CACHE, "bar": BAR}
COLUMNS = (
    ("ms", "ms", ".4f"), ("MB", "mb", ".0f"), ("GB/s", "gb_per_s", ".0f"), ("of copy", "of_copy", ".2f"),
    ("read once", "of_copy_once", ".2f"), (f"{BAR}", "reaches_bar", ""),
)  # fmt: skip

Shape = tuple[int, int, int, int]


class Case(NamedTuple):
    """A call, and the bytes that it must move: None if only its time is of interest."""

    call: Callable[[], object]
    once: int | None = None  # with every token read once
    each: int | None = None  # with a token read once for each of its rows
    bar: bool = False  # whether it is to reach 0.8 of a copy


def add_arguments(parser: ArgumentParser) -> None:
    options.add_shapes(parser, cases.SHAPES["permute"], SHAPES)


def measure(arguments: Namespace, report: dict[str, Any]) -> None:
    device = machine.parse_device("cuda")
    report |= {"copy": cases.attempt("copy", partial(_copy, device)), "shapes": []}
    for shape in arguments.shape or SHAPES:
        _measure_shape(shape, device, report)
    after = cases.attempt("copy", partial(_copy, device))
    report["copy"]["ms_after"] = after.get("ms")


def _copy(device: torch.device) -> dict[str, Any]:
    ms, readings = copy_ms(torch.empty(COPY // 2, dtype=torch.bfloat16, device=device))
    return {"ms": ms, "bytes": 2 * COPY, "gb_per_s": 2 * COPY / ms / 1e6, "ms_after": None, "readings_ms": readings}


def _measure_shape(shape: Shape, device: torch.device, report: dict[str, Any]) -> None:
    tokens, _, assignments, hidden = shape
    once = 2 * tokens * hidden <= CACHE
    results: list[dict[str, Any]] = []
    entry: dict[str, Any] = {"shape": list(shape), "rows": tokens * assignments, "tokens_counted_once": once}
    report["shapes"].append(entry | {"sizes": [], "padded_rows": None, "results": results})
    entry = report["shapes"][-1]
    found: dict[str, Case] = {}

    def prepare() -> dict[str, Any]:
        inputs = Inputs.of(shape, device)
        found.update(calls(inputs))
        entry["sizes"] = inputs.permutation.sizes.tolist()
        entry["padded_rows"] = sum(-(-size // BLOCK) * BLOCK for size in entry["sizes"])
        return {}

    if "error" in (row := cases.attempt("inputs", prepare)):
        results.append(row)
    for name, case in found.items():
        results.append(cases.attempt(name, partial(_timed, case, once, report["copy"].get("gb_per_s"))))


def _timed(case: Case, once: bool, copy: float | None) -> dict[str, Any]:
    for _ in range(3):
        case.call()  # the sort is a layer, which is recorded at its third call: not while a graph is captured
    ms, readings = device_ms(case.call)
    return {"ms": ms, **rates(case, ms, once, copy), "readings_ms": readings}


def rates(case: Case, ms: float, once: bool, copy: float | None) -> dict[str, Any]:
    """Return the bytes of a case and their rates, also as fractions of a copy's if that is known. `once` says how
    tokens are counted in "bytes"; both ways are in the result."""
    if case.once is None or case.each is None:
        return {}
    counted = case.once if once else case.each
    found: dict[str, Any] = {
        "bytes": counted,
        "bytes_tokens_once": case.once,
        "bytes_tokens_each": case.each,
        "gb_per_s": counted / ms / 1e6,
    }
    if copy is not None:
        found |= {"of_copy": counted / ms / 1e6 / copy, "of_copy_once": case.once / ms / 1e6 / copy}
        if case.bar:
            strict, loose = found["of_copy_once"] >= BAR, found["of_copy"] >= BAR
            found["reaches_bar"] = "yes" if strict else "gathers" if loose else "no"
    return found


# -- the kernels -----------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """The tensors that the kernels of one shape read."""

    routing: Tensor  # [T, K]: the experts of each token
    probs: Tensor  # [T, K]
    permutation: Permutation
    source: Tensor  # [rows]: the token of each row
    groups: Groups
    x: Tensor  # [T, D]: tokens, or their gradients
    rows: Tensor  # [T * K, D]: rows of experts, or their gradients

    @staticmethod
    def of(shape: Shape, device: torch.device) -> "Inputs":
        tokens, experts, assignments, hidden = shape
        torch.manual_seed(0)
        preference = torch.rand(experts, device=device, dtype=torch.float32) - 0.5
        logits = torch.randn(tokens, experts, device=device, dtype=torch.float32) + preference
        probs, routing = logits.softmax(-1).topk(assignments)
        permutation = sort(routing, experts)
        x, rows = (torch.randn(n, hidden, device=device, dtype=torch.bfloat16) for n in (tokens, tokens * assignments))
        source = moves.tokens(permutation.assignments, permutation.positions)
        return Inputs(routing, probs, permutation, source, split(permutation.sizes, tokens * assignments), x, rows)


def calls(inputs: Inputs) -> dict[str, Case]:
    """Return the cases of a shape."""
    routing, probs, permutation, source, _, x, rows = inputs
    sizes, positions, sources, _ = permutation
    experts, of_token = len(sizes), Assignments(positions)
    token, row = x.nbytes, rows.nbytes
    return {
        "sort": Case(lambda: sort(routing, experts)),
        "layout": Case(lambda: (split(sizes, len(rows)), moves.tokens(sources, positions))),
        "permute": Case(lambda: moves.scatter(x, positions, sources, True), token + row, row + row, bar=True),
        "unpermute": Case(lambda: moves.combine(rows, of_token, probs), row + token, row + token, bar=True),
        **_casts(inputs),
        "permute backward": Case(lambda: moves.combine(rows, of_token, None), row + token, row + token),
        "unpermute backward": Case(
            lambda: moves.combine_backward(x, rows, of_token, sources, probs, True, True), token + 2 * row, 3 * row
        ),
        "unpermute backward, rows alone": Case(
            lambda: moves.combine_backward(x, None, of_token, sources, probs, True, True), token + row, 2 * row
        ),
        "index_select": Case(lambda: x.index_select(0, source), token + row, 2 * row),
    }


def _casts(inputs: Inputs) -> dict[str, Case]:
    one = torch.ones(inputs.groups.number, device=inputs.x.device, dtype=torch.float32)
    known = CastArgs(inverse_scale=one, running_amax=torch.zeros_like(one), source=inputs.source)
    measured = CastArgs(source=inputs.source)
    return {
        f"cast-permute{title}, {way}": _cast(inputs, spec, way, cast_args)
        for title, spec, cast_args in (("", Tensorwise(), known), (" 1x128", Block1D(), measured))
        for way in ("row", "row and column", "column")
    }


def _cast(inputs: Inputs, spec: Quantizer, way: str, cast_args: CastArgs) -> Case:
    row, column = spec if "row" in way else None, spec if "column" in way else None
    x, (count, hidden) = inputs.x, inputs.rows.shape
    if row is None:  # made again in backward, which measures nothing
        cast_args = cast_args._replace(running_amax=None)
    written = count * hidden * ((row is not None) + (column is not None))
    if spec.block[1] is not None:  # a float32 for each block
        written += 4 * count * -(-hidden // spec.block[1]) if row is not None else 0
        written += 4 * hidden * -(-count // spec.block[1]) if column is not None else 0
    return Case(
        lambda: quantize_groups(x, row, column, inputs.groups, cast_args),
        x.nbytes + written, inputs.rows.nbytes + written, bar=True,
    )  # fmt: skip


# -- as text ---------------------------------------------------------------------------------------------------------


def render(report: dict[str, Any]) -> str:
    parts = [f"{cases.heading(report, 'bfloat16')}\n{_copy_line(report['copy'])}"]
    for entry in filter(lambda entry: entry["results"], report["shapes"]):
        rows = [r | {"mb": r["bytes"] / 1e6} if "bytes" in r else r for r in entry["results"]]
        parts.append(f"{_title(entry)}\n{cases.render(COLUMNS, rows)}")
    return "\n\n".join(parts)


def _copy_line(copy: dict[str, Any]) -> str:
    if "error" in copy:
        return f"plain copy  failed: {copy['error']}"
    after = "" if copy["ms_after"] is None else f" (at the end: {copy['ms_after']:.3f} ms)"
    return f"plain copy of {copy['bytes'] / 2**31:.0f} GiB: {copy['ms']:.3f} ms, {copy['gb_per_s']:.0f} GB/s{after}"


def _title(entry: dict[str, Any]) -> str:
    tokens, experts, assignments, hidden = entry["shape"]
    sizes, counted = entry["sizes"], "once" if entry["tokens_counted_once"] else "once for each of their rows"
    spread = f" of {min(sizes)} to {max(sizes)} rows" if sizes else ""
    return (
        f"{tokens} tokens, {experts} experts{spread}, {assignments} assignments, {hidden} hidden: "
        f"{entry['rows']} rows; "
        f"tokens are {2 * tokens * hidden / 1e6:.0f} MB, counted {counted}"
    )
