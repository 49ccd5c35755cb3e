"""Compile every Triton and Gluon kernel for SM90 and SM100 where there is no GPU, and read what ptxas says of it.

    python -m tests.offline            compile everything and rewrite tests/offline.json, the record of Triton 3.6
    python -m tests.offline --only X   compile the configurations whose name has X, and rewrite their lines alone
    python -m tests.offline --matrix   compile one configuration of each kernel for SM90 with the installed Triton, and
                                       write benchmarks/results/kernels-triton-<version>.json
    python -m tests.offline --every    compile every configuration for SM90, and add those that fail or spill to it

Arguments carry the divisibility that a real launch would give them: without it every load is a byte wide and every
kernel spills, so that the check would read a kernel that no launch compiles. Kernels are found by name, as jitted
functions that end in `_kernel`; functions `variants()` list their configurations, beside them or in
tests/kernel_variants.
"""

import argparse
import collections
import contextlib
import importlib
import io
import json
import multiprocessing
import pkgutil
import re
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

import octavo

PACKAGE = Path(octavo.__file__).parent
RESULTS = PACKAGE.parent / "benchmarks" / "results"
ARCHITECTURES = (90, 100)
RECORD = Path(__file__).with_suffix(".json")
RECORDED = "3.6.0"  # the Triton that the record is of
TENSOR_CORE = {90: "wgmma.mma_async", 100: "tcgen05.mma"}


@cache
def modules() -> tuple[ModuleType, ...]:
    """Every module of the package that imports Triton, whichever way it then jits functions."""
    files = [
        path for path in sorted(PACKAGE.rglob("*.py")) if re.search(r"^(from|import) triton", path.read_text(), re.M)
    ]
    names = [".".join(("octavo", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in files]
    return tuple(importlib.import_module(name.removesuffix(".__init__")) for name in names)


def jitted() -> dict[str, object]:
    """Every jitted function, by its module and name."""
    return {
        f"{module.__name__}.{name}": value
        for module in modules()
        for name, value in vars(module).items()
        if hasattr(value, "arg_names") and value.fn.__module__ == module.__name__
    }


def kernels() -> set[str]:
    """The jitted functions that are launched, by their names."""
    return {name for name in jitted() if name.endswith("_kernel")}


def kernel_name(variant) -> str:
    return f"{variant.kernel.fn.__module__}.{variant.kernel.fn.__name__}"


def variants() -> list:
    """Every configuration as it stands, for rows in groups and for rows that are gathered, and each kernel once in
    every other way it may be called."""
    import tests.kernel_variants
    from tests.kernel_variants.grouped_gemms import grouped_gemms

    beside = [importlib.import_module(f"tests.kernel_variants.{found.name}")
              for found in pkgutil.iter_modules(tests.kernel_variants.__path__)]  # fmt: skip
    found = [v for module in (*modules(), *beside) if hasattr(module, "variants") for v in module.variants()]
    first = {kernel_name(v): v for v in reversed(found)}
    others = [other for v in first.values() for other in called_otherwise(v)]
    grouped = [in_groups(v) for v in found if follows_groups(v)]
    return found + grouped + [gathering(v) for v in found if gathers(v)] + others + grouped_gemms()


def unsupported_reason(variant) -> str:
    """Why no launch compiles a configuration; "" if one may."""
    from octavo.errors import UnsupportedConfig
    from octavo.launch import rules

    try:
        rules.check_variant(variant)
    except UnsupportedConfig as error:
        return str(error)
    return ""


def has_descriptors(variant) -> bool:
    return any(kind.startswith("tensordesc") for kind in variant.signature.values())


def jobs() -> list[tuple[int, int]]:
    """(variant, architecture). Kernels that copy tiles by descriptors are written for Hopper alone."""
    found = enumerate(variants())
    return [(i, sm) for i, v in found for sm in ARCHITECTURES if sm == 90 or not has_descriptors(v)]


def sample() -> list[tuple[int, int]]:
    """The first job of each kernel on each architecture, and every sixteenth one after it."""
    every, seen = variants(), collections.Counter()
    found = []
    for i, sm in jobs():
        kind = id(every[i].kernel), sm
        if seen[kind] % 16 == 0:
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
    if given := [name for name in absent if name.endswith("amax") and not name.endswith("running_amax")]:
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


def compiled(variant, architecture: int) -> tuple[str, str]:
    """Returns the PTX of a configuration, and what Triton's own run of ptxas printed about it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    from octavo.launch import OPTIONS

    names = variant.kernel.arg_names
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
    options = OPTIONS | {"num_warps": variant.warps, "num_stages": variant.stages}
    printed = io.StringIO()
    # a kernel from the cache was assembled earlier, and nothing is printed about it
    with tempfile.TemporaryDirectory() as folder, triton.knobs.nvidia.scope(), triton.knobs.cache.scope():
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.cache.dir = folder
        with contextlib.redirect_stdout(printed):
            found = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
            return found.asm["ptx"], printed.getvalue()


def resources(variant, architecture: int = 90) -> tuple[int, int]:
    """Returns the registers of a thread and the bytes that it spills."""
    return _resources(compiled(variant, architecture)[1])


def _resources(printed: str) -> tuple[int, int]:
    registers, spilled = (
        re.findall(rf"{what}", printed)[0] for what in (r"Used (\d+) reg", r"(\d+) bytes spill stores")
    )
    return int(registers), int(spilled)


def compile_one(job: tuple[int, int]) -> dict:
    index, architecture = job
    variant = variants()[index]
    facts = {"name": variant.name, "kernel": kernel_name(variant), "architecture": architecture}
    try:
        ptx, printed = compiled(variant, architecture)
    except Exception as error:  # whatever a version of Triton refuses: the caller says for which kernel
        while error.__cause__ is not None:  # the outer ones only say from where the inner one was called
            error = error.__cause__
        return facts | {"error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"}
    registers, spilled = _resources(printed)
    return facts | {
        "registers": registers,
        "spilled": spilled,
        "serialized": "instructions are serialized" in printed,
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


def one_of_each() -> list[tuple[int, int]]:
    """The first configuration of each kernel, for SM90."""
    first: dict[str, int] = {}
    for i, variant in enumerate(variants()):
        first.setdefault(kernel_name(variant), i)
    return [(i, 90) for i in first.values()]


def outcome(r: dict) -> dict:
    """The entry of a result in a matrix."""
    said = {"error": r["error"]} if "error" in r else {"sm90": [r["registers"], r["spilled"]]}
    return {"variant": r["name"]} | said


def matrix_of() -> tuple[Path, dict]:
    """The file of the installed Triton's matrix, and what it holds."""
    import triton

    path = RESULTS / f"kernels-triton-{triton.__version__}.json"
    return path, {"triton": triton.__version__} | (json.loads(path.read_text()) if path.exists() else {})


def known_spills() -> dict[str, int]:
    """The bytes that configurations spill for SM90, by the matrix of the installed Triton."""
    found = matrix_of()[1].get("every", {}).get("fail or spill", [])
    return {one["variant"]: one["sm90"][1] for one in found if "sm90" in one}


def write_matrix(every: bool) -> None:
    path, matrix = matrix_of()
    results = compile_all([job for job in jobs() if job[1] == 90] if every else one_of_each())
    if every:
        notable = [outcome(r) for r in results if "error" in r or r["spilled"]]
        matrix["every"] = {"configurations": len(results), "fail or spill": notable}
    else:
        matrix["kernels"] = {r["kernel"]: outcome(r) for r in results}
    path.write_text(json.dumps(matrix, indent=1) + "\n")


def named(part: str) -> list[tuple[int, int]]:
    """The jobs of the configurations whose name has this part."""
    every = variants()
    return [job for job in jobs() if part in every[job[0]].name]


def updated(on_record: dict, found: dict, part: str) -> dict:
    """The record with new lines in place of those whose name has this part."""
    return {name: line for name, line in on_record.items() if part not in name} | found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.offline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--only", default="", metavar="PART", help="a part of the names of configurations")
    choice.add_argument("--matrix", action="store_true", help="one configuration of each kernel, with this Triton")
    choice.add_argument("--every", action="store_true", help="every configuration, with this Triton")
    given = parser.parse_args(arguments)
    if given.matrix or given.every:
        write_matrix(given.every)
        return 0
    chosen = named(given.only)
    if not chosen:
        print(f"No configuration has {given.only!r} in its name.")
        return 2
    results = compile_all(chosen)
    for failed in (r for r in results if "error" in r):
        print(f"{failed['name']} on SM{failed['architecture']}: {failed['error']}")
    if any("error" in r for r in results):
        return 1
    on_record = json.loads(RECORD.read_text()) if given.only else {}
    RECORD.write_text(json.dumps(updated(on_record, record(results), given.only), indent=1, sort_keys=True) + "\n")
    print(f"{len(results)} compilations are on record.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
