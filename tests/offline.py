"""Compile every Triton and Gluon kernel for SM90 and SM100 where there is no GPU, and read what ptxas says of it.

    python -m tests.offline        compile everything and rewrite tests/offline.json, the record that the tests hold to

Arguments carry the divisibility a real launch would give them: without it every load is a byte wide and every kernel
spills, so that the check would read a kernel nobody runs.
"""

import collections
import importlib
import json
import multiprocessing
import re
import subprocess
import tempfile
from pathlib import Path

MODULES = (
    "octavo.quant.tile",
    "octavo.quant.groups.triton",
    "octavo.quant.byte_transpose.triton",
    "octavo.quant.tensorwise.triton",
    "octavo.quant.rowwise.triton",
    "octavo.quant.block.triton",
    "octavo.quant.mx.triton",
    "octavo.quant.nvfp4.triton",
    "octavo.kernels.decode.triton",
    "octavo.kernels.gemm.triton",
    "octavo.kernels.column_sums.triton",
    "octavo.kernels.rotary.triton",
    "octavo.kernels.rotary_quantize.triton",
    "octavo.kernels.activation.triton",
    "octavo.kernels.norm.triton",
    "octavo.kernels.activation_quantize.triton",
    "octavo.kernels.norm_quantize.triton",
    "octavo.kernels.permute.triton",
)
ARCHITECTURES = (90, 100)
RECORD = Path(__file__).with_suffix(".json")
TENSOR_CORE = {90: "wgmma.mma_async", 100: "tcgen05.mma"}


def variants() -> list:
    """Every configuration as it stands, for rows in groups and for rows that are gathered, and each kernel once in
    every other way it may be called."""
    found = [v for name in MODULES for v in importlib.import_module(name).variants()]
    first = {v.kernel.fn.__module__ + v.kernel.fn.__name__: v for v in reversed(found)}
    others = [other for v in first.values() for other in called_otherwise(v)]
    grouped = [in_groups(v) for v in found if follows_groups(v)]
    return found + grouped + [gathering(v) for v in found if gathers(v)] + others + grouped_gemms()


def grouped_gemms() -> list:
    """What the grouped GEMMs launch."""
    return [*grouped_for_hopper(), *decoded_for_hopper(), *grouped_emulated(), *grouped_plain(), *grouped_around()]


BIASES = (("", None, None), (", bias", "*bf16", None), (", scaled bias", "*bf16", "*fp32"))
LEVEL1 = dict.fromkeys(("a_global", "b_global"))  # no global scales
WHERE = dict.fromkeys(("owner", "block", "source", "live"), "*i32")


def some(pointers: dict) -> tuple[dict, dict]:
    """(signature, constants) of pointers that may be missing."""
    there = {name: kind for name, kind in pointers.items() if kind is not None}
    return there, {name: None for name, kind in pointers.items() if kind is None}


def grouped_for_hopper() -> list:
    """Matrices come as tensor descriptors, whose type names their layout."""
    from octavo.kernels.grouped_gemm.hopper import contraction, fast_row_groups, plain, row_groups, wgrad
    from octavo.kernels.grouped_gemm.hopper.tiles import HALF_TILE, TILE
    from octavo.quant.tile import Variant

    found = []
    sizes = dict.fromkeys(("G", "N", "K"), "i32")

    def tiles(kind: str, down: int = 128) -> str:
        return f"tensordesc<{kind}[{down}, 128],{TILE!r}>"

    def add(name: str, kernel, pointers: dict, numbers: dict, **constants) -> None:
        signature, missing = some(pointers)
        found.append(Variant(name, kernel, signature | numbers, missing | constants, 4, is_matmul=True))

    for left, right, out in (
        ("fp8e4nv", "fp8e4nv", "bf16"),
        ("fp8e5", "fp8e4nv", "fp16"),
        ("fp8e4nv", "fp8e4nv", "fp32"),
    ):
        codes, name = {"a": tiles(left), "b": tiles(right), "out": f"*{out}"}, f"{left} by {right} to {out}"
        scales, apart = {"a_scale": "*fp32", "b_scale": "*fp32"}, dict.fromkeys(("group_rows", "group_columns"), "i32")
        steps = dict.fromkeys(("a_scale_step", "b_scale_row"), "i32")
        groups = {"a_scale_group": "i32", "b_scale_group": "i32"}
        half = f"tensordesc<{out}[64, 128],{HALF_TILE!r}>"
        for way, bias, scaled in BIASES:
            whole = None if out == "fp32" else half
            pointers = {**codes, "whole": whole, "bias": bias, "scales": scaled, **scales, **WHERE}
            add(f"grouped rows {name}{way}", row_groups.rows_kernel, pointers, sizes | steps | apart, b_scale_step=1)
            for each in (False, True):
                kind, own = ("rowwise" if each else "tensorwise"), {"A_EACH": each, "B_EACH": each}
                numbers = sizes | groups | apart
                add(f"grouped {kind} rows {name}{way}", row_groups.whole_rows_kernel, pointers, numbers, **own)
                for across, stages in ((256, 4), (128, 6)):
                    fast = f"grouped fast {kind} rows {name}, 128x{across}{way}"
                    wide = pointers | {"b": tiles(right, across)}
                    add(fast, fast_row_groups.fast_rows_kernel, wide, numbers, COUNT=stages, **own)
        for way, adds, whole in (("", False, None), (", added", True, None), (", by halves", False, half)):
            if whole is None or out != "fp32":
                for kind, of in (("", wgrad.NARROW), (" wide", wgrad.WIDE)):
                    lines = {
                        f"{n}_lines": f"tensordesc<fp32[1, {c}],{wgrad.LINE!r}>"
                        for n, c in (("a", 128), ("b", of.across))
                    }
                    part = None if whole is None else f"tensordesc<{out}[64, {of.part}],{of.layout!r}>"
                    pointers = {**codes, "b": tiles(right, of.across), **lines, "whole": part, "block": "*i32"}
                    add(f"grouped{kind} depth {name}{way}", of.kernel, pointers, sizes | {"span": "i32"}, ADD=adds)
                pointers = {**codes, "whole": whole, **scales, "block": "*i32"}
                for each in (False, True):
                    kind, own = ("rowwise" if each else "tensorwise"), {"A_EACH": each, "B_EACH": each}
                    kernel, numbers = contraction.whole_depth_kernel, sizes | groups | {"span": "i32"}
                    add(f"grouped {kind} depth {name}{way}", kernel, pointers, numbers, ADD=adds, **own)
    for kind, out, across, stages in (("bf16", "bf16", 256, 4), ("fp16", "fp16", 128, 6), ("bf16", "fp32", 128, 6)):
        for turned in (False, True):
            shapes = {"a": [128, 64], "b": [64, across] if turned else [across, 64]}
            matrices = {n: f"tensordesc<{kind}{s},{plain.plain_layout(s)!r}>" for n, s in shapes.items()}
            for way, bias, scaled in BIASES:
                name = f"grouped plain rows {kind} to {out}, 128x{across}{', turned' if turned else ''}{way}"
                pointers = {**matrices, "out": f"*{out}", "bias": bias, "scales": scaled, **LEVEL1, **WHERE}
                numbers = sizes | dict.fromkeys(("group_rows", "group_columns"), "i32")
                add(name, plain.plain_rows_kernel, pointers, numbers, TURNED=turned, COUNT=stages)
    return found


def decoded_for_hopper() -> list:
    """Decoded codes, with and without global scales: rows in groups, dense products and dW."""
    from octavo.kernels.gemm import hopper
    from octavo.kernels.grouped_gemm.hopper import plain
    from octavo.quant.tile import Variant

    found = []

    def add(name: str, kernel, pointers: dict, numbers: tuple, **constants) -> None:
        signature, missing = some(pointers)
        signature |= dict.fromkeys(numbers, "i32")
        found.append(Variant(name, kernel, signature, missing | constants, 4, is_matmul=True))

    for out, across, stages in (("bf16", 256, 4), ("bf16", 128, 6), ("fp16", 256, 4), ("fp32", 128, 6)):
        shapes = {"a": [128, 64], "b": [across, 64]}
        matrices = {n: f"tensordesc<bf16{s},{plain.plain_layout(s)!r}>" for n, s in shapes.items()}
        for levels, level2 in (("", LEVEL1), (", two levels", dict.fromkeys(LEVEL1, "*fp32"))):
            name, common = f"to {out}, 128x{across}{levels}", {**matrices, "out": f"*{out}", **level2}
            for way, bias, scaled in BIASES:
                if levels:
                    pointers, numbers = {**common, "bias": bias, "scales": scaled, **WHERE}, ("G", "N", "K")
                    numbers += ("group_rows", "group_columns")
                    kernel = plain.plain_rows_kernel
                    add(f"decoded rows {name}{way}", kernel, pointers, numbers, TURNED=False, COUNT=stages)
                if scaled is None:
                    pointers = {**common, "bias": bias, "block": None}
                    constants = {"G": 1, "ADD": False, "COUNT": stages}
                    add(f"decoded gemm {name}{way}", hopper.product_kernel, pointers, ("M", "N", "K"), **constants)
            for adds in (False, True):
                pointers, numbers = {**common, "bias": None, "block": "*i32"}, ("G", "M", "N", "K")
                constants = {"ADD": adds, "COUNT": stages}
                kind = f"decoded wgrad {name}{', added' if adds else ''}"
                add(kind, hopper.product_kernel, pointers, numbers, **constants)
    return found


def grouped_emulated() -> list:
    from octavo.kernels.grouped_gemm import emulated
    from octavo.quant.tile import Variant

    found = []
    where = {name: "*i32" for name in ("owner", "source", "live")}
    strides = dict.fromkeys(("N", "K", "a_stride", "b_stride"), "i32") | {
        f"{side}_scale_{step}": "i32" for side in "ab" for step in ("group", "row", "block")
    }
    for reach, left, right, scale, kind, tall in (  # tall: rows of b's blocks
        (0, "fp8e4nv", "fp8e5", "fp32", "float32", 1),
        (128, "fp8e4nv", "fp8e4nv", "fp32", "float32", 128),
        (32, "fp8e4nv", "fp8e4nv", "u8", "e8m0", 32),
        (16, "u8", "u8", "u8", "e4m3", 16),
    ):
        bm, bn, bk, warps, stages = emulated.CODES[reach]
        level2 = "*fp32" if reach == 16 else None
        operands = {
            "a": f"*{left}", "b": f"*{right}", "a_scale": f"*{scale}", "b_scale": f"*{scale}",
            "a_global": level2, "b_global": level2,
        }  # fmt: skip
        for out in ("bf16", "fp32"):
            for part in ("rows", "depth"):
                kernel = emulated._rows_kernel if part == "rows" else emulated._depth_kernel
                signature, missing = some(
                    {**operands, "out": f"*{out}", "bias": "*bf16", "scales": "*fp32", **where}
                    if part == "rows"
                    else {**operands, "out": f"*{out}", "start": "*i32", "block": "*i32"}
                )
                constants = missing | {
                    "REACH": reach, "A_ROWS": 1, "B_ROWS": tall if part == "rows" else 1, "KIND": kind,
                    "PACKED": reach == 16, "BM": bm, "BN": bn, "BK": bk, "SIZE": 128,
                }  # fmt: skip
                signature |= strides | ({"apart": "i32"} if part == "rows" else {})
                constants |= {} if part == "rows" else {"ADD": out == "fp32"}
                name = f"grouped emulated {part} reach={reach} {kind} to {out}"
                found.append(Variant(name, kernel, signature, constants, warps, stages, is_matmul=True))
    return found


def grouped_plain() -> list:
    import torch

    from octavo.kernels.grouped_gemm import emulated
    from octavo.quant.tile import Variant

    found = []
    where = {name: "*i32" for name in ("owner", "source", "live")}
    for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        bm, bn, bk, warps, stages = emulated.PLAIN[dtype]
        shape = {"BM": bm, "BN": bn, "BK": bk}
        matrices = {"a": f"*{kind}", "b": f"*{kind}", "out": f"*{kind}"}
        sizes = dict.fromkeys(("N", "K", "a_row", "b_row"), "i32")
        for contiguous, other in (("b_k", "b_row"), ("b_row", "b_k")):
            signature = {**matrices, "bias": "*bf16", "scales": "*fp32", **where, **sizes, "b_group": "i32"}
            signature = {k: v for k, v in signature.items() if k != contiguous} | {other: "i32"}
            constants = {"a_k": 1, contiguous: 1, **shape, "SIZE": 128}
            name = f"grouped plain rows in Triton {kind}, {contiguous} = 1"
            kernel = emulated._plain_rows_kernel
            found.append(Variant(name, kernel, signature, constants, warps, stages, is_matmul=kind != "fp32"))
        for out in dict.fromkeys((kind, "fp32")):  # in one order, in every process
            signature = {**matrices, "out": f"*{out}", "start": "*i32", **sizes}
            constants = {"a_column": 1, "b_column": 1, "ADD": out != kind, **shape}
            name = f"grouped plain depth in Triton {kind} to {out}"
            kernel = emulated._plain_depth_kernel
            found.append(Variant(name, kernel, signature, constants, warps, stages, is_matmul=kind != "fp32"))
    return found


def grouped_around() -> list:
    from octavo.kernels.grouped_gemm import triton as module
    from octavo.quant.tile import Variant

    found = []
    for out in ("bf16", "fp16", "fp32"):
        signature = {"out": f"*{out}", "start": "*i32", "ROWS": "i32", "N": "i32", "G": "i32"}
        found.append(Variant(f"grouped zero_tail {out}", module._zero_tail_kernel, signature, {"SIZE": 2048}, 4))
    for dy in ("bf16", "fp32"):
        strides = {"N": "i32", "stride_m": "i32"}
        for way, scales in (("", None), (", scaled", "*fp32")):
            signature, missing = some({"dy": f"*{dy}", "out": "*fp32", "start": "*i32", "scales": scales})
            constants = missing | {"stride_n": 1, "ROWS": 32, "COLUMNS": 128}
            kernel = module._column_sums_kernel
            found.append(Variant(f"grouped column_sums {dy}{way}", kernel, signature | strides, constants, 4))
        signature = {"dy": f"*{dy}", "bias": "*bf16", "out": "*fp32"} | strides
        signature |= {name: "*i32" for name in ("owner", "source", "live")}
        constants = {"stride_n": 1, "ROWS": 16, "COLUMNS": 256, "SIZE": 128}
        found.append(Variant(f"grouped bias_products {dy}", module._bias_products_kernel, signature, constants, 4))
    return found


def has_descriptors(variant) -> bool:
    return any(kind.startswith("tensordesc") for kind in variant.signature.values())


def jobs() -> list[tuple[int, int]]:
    """(variant, architecture). Kernels that copy tiles by descriptors are written for Hopper alone."""
    found = enumerate(variants())
    return [(i, sm) for i, v in found for sm in ARCHITECTURES if sm == 90 or not has_descriptors(v)]


def sample() -> list[tuple[int, int]]:
    """A fourth of the jobs: the first of each kernel on each architecture, and every fourth one after it."""
    every, seen = variants(), collections.Counter()
    found = []
    for i, sm in jobs():
        kind = id(every[i].kernel), sm
        if seen[kind] % 4 == 0:
            found.append((i, sm))
        seen[kind] += 1
    return found


def with_pointers(variant, what: str, names: list[str], pointer: str):
    constants = {k: c for k, c in variant.constants.items() if k not in names}
    signature = variant.signature | dict.fromkeys(names, pointer)
    return variant._replace(name=f"{variant.name}, {what}", signature=signature, constants=constants)


def follows_groups(variant) -> bool:
    return "source" in variant.constants


def in_groups(variant):
    names = [n for n in ("start", "block", "owner", "source", "live") if n in variant.constants]
    constants = variant.constants | ({"GROUPS": 8} if "GROUPS" in variant.constants else {})
    return with_pointers(variant._replace(constants=constants), "in groups", names, "*i32")


def gathers(variant) -> bool:
    return "gather" in variant.constants


def gathering(variant):
    grouped = with_pointers(in_groups(variant), "gathered", ["gather"], "*i32")
    constants = {name: value for name, value in grouped.constants.items() if name != "height"}
    return grouped._replace(signature=grouped.signature | {"height": "i32"}, constants=constants)


def called_otherwise(variant):
    """With a skip flag, with a given amax, with strided x, and for one orientation alone: in groups, and gathered."""
    absent = [name for name, value in variant.constants.items() if value is None]
    if "skip" in absent:
        yield with_pointers(variant, "skip", ["skip"], "*fp32")
    if given := [name for name in absent if name.endswith("amax")]:
        yield with_pointers(variant, "given amax", given, "*fp32")
    if "stride_k" in variant.constants:
        yield with_pointers(variant, "strided", ["stride_k"], "i64")
    for side in ("row", "column"):
        gone = {name for name in variant.signature if name == side or name in (f"{side}_scale", f"{side}_global")}
        if side in gone:
            signature = {k: p for k, p in variant.signature.items() if k not in gone}
            constants = variant.constants | dict.fromkeys(gone)
            alone = variant._replace(name=f"{variant.name}, no {side}", signature=signature, constants=constants)
            yield alone
            if follows_groups(alone):
                yield in_groups(alone)
            if gathers(alone):
                yield gathering(alone)


def ptx_of(variant, architecture: int) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = variant.kernel.arg_names
    missing = [n for n in names if n not in variant.signature and n not in variant.constants]
    assert not missing, f"{variant.name} does not say what {missing} are"
    source = (GluonASTSource if variant.kernel.is_gluon() else ASTSource)(
        fn=variant.kernel,
        signature={n: variant.signature.get(n, "constexpr") for n in names},
        constexprs={n: variant.constants[n] for n in names if n in variant.constants},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if not variant.signature.get(n, "tensordesc").startswith("tensordesc")
        },
    )
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options).asm["ptx"]


def ptxas(ptx: str, architecture: int) -> tuple[int, int, bool]:
    """(registers, spilled bytes, whether products wait for each other). Triton's own counters need a driver; the
    bundled assembler does not."""
    import triton.backends.nvidia

    tools = Path(triton.backends.nvidia.__file__).parent / "bin"
    tool = tools / "ptxas-blackwell" if architecture >= 100 else tools / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(tool), "-v", f"-arch=sm_{architecture}a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    text = said.stderr + said.stdout
    registers, spilled = re.findall(r"Used (\d+) registers", text)[0], re.findall(r"(\d+) bytes spill stores", text)[0]
    return int(registers), int(spilled), "instructions are serialized" in text


def compile_one(job: tuple[int, int]) -> dict:
    index, architecture = job
    variant = variants()[index]
    ptx = ptx_of(variant, architecture)
    registers, spilled, serialized = ptxas(ptx, architecture)
    return {
        "name": variant.name,
        "architecture": architecture,
        "registers": registers,
        "spilled": spilled,
        "serialized": serialized,
        "is_matmul": variant.is_matmul,
        "tensor_core": TENSOR_CORE[architecture] in ptx,
    }


def compile_all(chosen: list[tuple[int, int]]) -> list[dict]:
    """These jobs, on every core."""
    with multiprocessing.get_context("spawn").Pool() as pool:
        return pool.map(compile_one, chosen, chunksize=4)


def record(results: list[dict]) -> dict[str, dict[str, list[int]]]:
    table: dict[str, dict[str, list[int]]] = {}
    for r in results:
        table.setdefault(r["name"], {})[f"sm{r['architecture']}"] = [r["registers"], r["spilled"]]
    return table


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(compile_all(jobs())), indent=1) + "\n")
