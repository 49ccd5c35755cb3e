"""Compile every Triton and Gluon kernel for SM90 and SM100 where there is no GPU, and read what ptxas says of it.

    python -m tests.offline        compile everything and rewrite tests/offline.json, the record that the tests hold to

Arguments carry the divisibility a real launch would give them: without it every load is a byte wide and every kernel
spills, so that the check would read a kernel nobody runs.
"""

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
    "octavo.quant.tensorwise.triton",
    "octavo.quant.rowwise.triton",
    "octavo.quant.block.triton",
    "octavo.quant.mx.triton",
    "octavo.quant.nvfp4.triton",
    "octavo.kernels.gemm.triton",
)
ARCHITECTURES = (90, 100)
RECORD = Path(__file__).with_suffix(".json")
TENSOR_CORE = {90: "wgmma.mma_async", 100: "tcgen05.mma"}


def variants() -> list:
    """Every configuration as it stands, and each kernel once in every other way it may be called."""
    found = [v for name in MODULES for v in importlib.import_module(name).variants()]
    first = {v.kernel.fn.__module__ + v.kernel.fn.__name__: v for v in reversed(found)}
    return found + [other for v in first.values() for other in called_otherwise(v)] + grouped_gemms()


def grouped_gemms() -> list:
    """What the grouped GEMMs launch. Matrices of codes come as tensor descriptors, whose type names their layout."""
    from octavo.kernels.grouped_gemm import triton as module
    from octavo.quant.tile import Variant

    def tiles(kind: str) -> str:
        return f"tensordesc<{kind}[128, 128],{module._TILE!r}>"

    where, sizes = dict.fromkeys(("owner", "block", "source", "live"), "*i32"), dict.fromkeys(("G", "N", "K"), "i32")
    found = []
    for left, right, out in (
        ("fp8e4nv", "fp8e4nv", "bf16"),
        ("fp8e5", "fp8e4nv", "fp16"),
        ("fp8e4nv", "fp8e4nv", "fp32"),
    ):
        codes, name = {"a": tiles(left), "b": tiles(right)}, f"{left} by {right} to {out}"
        strides = dict.fromkeys(("a_scale_stride", "b_scale_rows", "group_rows", "group_columns"), "i32")
        scales = {"a_scale": "*fp32", "b_scale": "*fp32"}
        for biased in (False, True):
            found.append(
                Variant(
                    f"grouped rows {name}{', bias' if biased else ''}",
                    module._rows_kernel,
                    {**codes, "out": f"*{out}", **scales, **where, **sizes, **strides}
                    | ({"bias": "*bf16"} if biased else {}),
                    {"b_scale_columns": 1} | ({} if biased else {"bias": None}),
                    4,
                    is_matmul=True,
                )
            )
        line, half = (f"tensordesc<fp32[1, 128],{module._LINE!r}>", f"tensordesc<{out}[64, 128],{module._HALF!r}>")
        depth = {**codes, "b_scale": line, "out": f"*{out}", "a_scale": "*fp32", "block": "*i32", **sizes}
        depth["a_scale_stride"] = "i32"
        ways = [("", False, None), (", added", True, None)] + [(", by halves", False, half)] * (out != "fp32")
        for way, add, whole in ways:
            signature = depth if whole is None else depth | {"whole": whole}
            constants = {"ADD": add} if whole else {"ADD": add, "whole": None}
            found.append(
                Variant(f"grouped depth {name}{way}", module._depth_kernel, signature, constants, 4, is_matmul=True)
            )
        found.append(
            Variant(
                f"grouped zero_tail {out}",
                module._zero_tail_kernel,
                {"out": f"*{out}", "block_end": "*i32", "ROWS": "i32", "N": "i32"},
                {"SIZE": 2048},
                4,
            )
        )
    for dy in ("bf16", "fp32"):
        pointers = {"dy": f"*{dy}", "out": "*fp32", "start": "*i32", "N": "i32", "stride_m": "i32"}
        constants = {"stride_n": 1, "ROWS": 32, "COLUMNS": 128}
        found.append(Variant(f"grouped column_sums {dy}", module._column_sums_kernel, pointers, constants, 4))
    return found


def has_descriptors(variant) -> bool:
    return any(kind.startswith("tensordesc") for kind in variant.signature.values())


def jobs() -> list[tuple[int, int]]:
    """(variant, architecture). Kernels that copy tiles by descriptors are written for Hopper alone."""
    found = enumerate(variants())
    return [(i, sm) for i, v in found for sm in ARCHITECTURES if sm == 90 or not has_descriptors(v)]


def called_otherwise(variant):
    """With a skip flag, with a given amax, for rows in groups, with strided x, and for one orientation alone."""

    def with_pointers(what: str, names: list[str], pointer: str):
        constants = {k: c for k, c in variant.constants.items() if k not in names}
        signature = variant.signature | dict.fromkeys(names, pointer)
        return variant._replace(name=f"{variant.name}, {what}", signature=signature, constants=constants)

    absent = [name for name, value in variant.constants.items() if value is None]
    if "skip" in absent:
        yield with_pointers("skip", ["skip"], "*fp32")
    if given := [name for name in absent if name.endswith("amax")]:
        yield with_pointers("given amax", given, "*fp32")
    if "source" in absent:
        yield with_pointers("in groups", ["source", "live"], "*i32")
    if "stride_k" in variant.constants:
        yield with_pointers("strided", ["stride_k"], "i64")
    for side in ("row", "column"):
        gone = {name for name in variant.signature if name == side or name in (f"{side}_scale", f"{side}_global")}
        if side in gone:
            signature = {k: p for k, p in variant.signature.items() if k not in gone}
            constants = variant.constants | dict.fromkeys(gone)
            yield variant._replace(name=f"{variant.name}, no {side}", signature=signature, constants=constants)


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


def ptxas(ptx: str, architecture: int) -> tuple[int, int]:
    """(registers, spilled bytes). Triton's own counters need a driver; the bundled assembler does not."""
    import triton.backends.nvidia

    tools = Path(triton.backends.nvidia.__file__).parent / "bin"
    tool = tools / "ptxas-blackwell" if architecture >= 100 else tools / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(tool), "-v", f"-arch=sm_{architecture}a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    text = said.stderr + said.stdout
    return int(re.findall(r"Used (\d+) registers", text)[0]), int(re.findall(r"(\d+) bytes spill stores", text)[0])


def compile_one(job: tuple[int, int]) -> dict:
    index, architecture = job
    variant = variants()[index]
    ptx = ptx_of(variant, architecture)
    registers, spilled = ptxas(ptx, architecture)
    return {
        "name": variant.name,
        "architecture": architecture,
        "registers": registers,
        "spilled": spilled,
        "is_matmul": variant.is_matmul,
        "tensor_core": TENSOR_CORE[architecture] in ptx,
    }


def compile_all() -> list[dict]:
    """Every variant for every architecture, on every core."""
    with multiprocessing.get_context("spawn").Pool() as pool:
        return pool.map(compile_one, jobs(), chunksize=4)


def record(results: list[dict]) -> dict[str, dict[str, list[int]]]:
    table: dict[str, dict[str, list[int]]] = {}
    for r in results:
        table.setdefault(r["name"], {})[f"sm{r['architecture']}"] = [r["registers"], r["spilled"]]
    return table


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(compile_all()), indent=1) + "\n")
