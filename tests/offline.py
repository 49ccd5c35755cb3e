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
    return found + [other for v in first.values() for other in called_otherwise(v)]


def called_otherwise(variant):
    """With a skip flag, with a given amax, with strided x, and for one orientation alone."""

    def with_pointers(what: str, names: list[str], pointer: str):
        constants = {k: c for k, c in variant.constants.items() if k not in names}
        signature = variant.signature | dict.fromkeys(names, pointer)
        return variant._replace(name=f"{variant.name}, {what}", signature=signature, constants=constants)

    absent = [name for name, value in variant.constants.items() if value is None]
    if "skip" in absent:
        yield with_pointers("skip", ["skip"], "*fp32")
    if given := [name for name in absent if name.endswith("amax")]:
        yield with_pointers("given amax", given, "*fp32")
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
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in variant.signature},
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
    jobs = [(i, architecture) for i in range(len(variants())) for architecture in ARCHITECTURES]
    with multiprocessing.get_context("spawn").Pool() as pool:
        return pool.map(compile_one, jobs, chunksize=4)


def record(results: list[dict]) -> dict[str, dict[str, list[int]]]:
    table: dict[str, dict[str, list[int]]] = {}
    for r in results:
        table.setdefault(r["name"], {})[f"sm{r['architecture']}"] = [r["registers"], r["spilled"]]
    return table


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(compile_all()), indent=1) + "\n")
