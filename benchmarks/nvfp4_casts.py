"""NVFP4's cast in several tiles, checked against the reference first. On a GPU:

python3 -m benchmarks.nvfp4_casts [--beside NAME=FILE ...] [--json FILE]

A FILE is another version of octavo/quant/nvfp4/triton.py; it is checked too, and timed in turn with this one. Kernels
are compiled and checked by a process for each case and version, all at once; the times that follow are one process's.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from octavo.cli.timing import copy_ms, device_ms
from octavo.quant import NVFP4, QTensor, TensorProto
from octavo.quant.nvfp4 import reference
from octavo.quant.nvfp4 import triton as kernel
from octavo.quant.quantizer import CastArgs
from octavo.quant.tile import Config

TILES = (Config(64, 64, 4), Config(64, 128, 4), Config(128, 64, 4))
CASES = {
    "weights": (NVFP4(square=True), NVFP4(square=True)),
    "activations": (NVFP4(), NVFP4(rht=True)),
    "gradients": (NVFP4(stochastic=True), NVFP4(rht=True, stochastic=True)),
}
SEED = (0x1234_5678_9ABC, 7)
SHAPE = 16384, 8192
ROUNDS = 3


def version(name: str, path: str):
    """This module of kernels, or another one from a file, which may import others beside it."""
    if not path:
        return kernel
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location(f"nvfp4_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def outputs(pair, x) -> tuple[QTensor, QTensor]:
    like = TensorProto.of(x)
    return pair[0].proto(like).empty(), pair[1].proto(like, 0).empty()


def run(module, pair, x, given=None, **extra) -> list[torch.Tensor]:
    """The bytes of all outputs."""
    row, column = outputs(pair, x)
    amax = given or module.amax(x, *pair, None, **extra)
    module.cast(x, row, column, CastArgs(amax=amax, seed=torch.tensor(SEED, device="cuda")), **extra)
    return [t.reshape(-1).view(torch.uint8) for q in (row, column) for t in q.tensors()]


def differing(found: list[torch.Tensor], others: list[torch.Tensor]) -> int:
    return sum(int((a != b).sum()) for a, b in zip(found, others, strict=True))


def inputs(rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Matrices with everything that a cast may meet."""
    generator = torch.Generator("cuda").manual_seed(1)
    spread = torch.randn(rows, 1, device="cuda", generator=generator).mul(3).exp2()
    x = torch.randn(rows, columns, device="cuda", generator=generator).mul(spread).bfloat16()
    odd = x.clone()
    odd[7], odd[5, 3], odd[100, 9], odd[3::11] = 0, float("inf"), float("nan"), odd[3::11] * 1e-38
    finite = odd.nan_to_num(1.0, 1.0, 1.0)
    steps = torch.randint(-24, 25, (rows, columns), device="cuda", generator=generator) / 4
    steps[0, 0] = 2688 / 2**8  # S_enc is a power of two: ties everywhere
    return {
        "everyday": x,
        "infinite": odd,
        "tiny rows": finite,
        "tiny": (finite.float() * 1e-37).bfloat16(),
        "huge": (finite.float() * 3e37).bfloat16().nan_to_num(1.0, 1.0, 1.0),
        "ties": steps.bfloat16(),
        "an outlier": torch.where(
            torch.arange(columns, device="cuda") == 17, x.float() * 2.0**20, x.float()
        ).bfloat16(),
        "float32": finite.float(),
        "float16": finite.half(),
    }


def check(module, name: str) -> dict[str, int]:
    """How many bytes differ from the reference's where any do, and with other tiles from those of the usual one."""
    pair, found = CASES[name], {}
    for rows, columns in ((320, 512), (300, 520), (128, 256)):
        for what, x in inputs(rows, columns).items():
            if x.dtype == torch.bfloat16 or rows == 300:
                found[f"{rows}x{columns} {what}"] = differing(run(reference, pair, x), run(module, pair, x))
    given = tuple(torch.full((1,), 0.5, device="cuda") for _ in range(2))  # less than there is
    x = inputs(320, 512)["everyday"]
    found["a given amax"] = differing(run(reference, pair, x, given), run(module, pair, x, given))
    x = torch.randn(*SHAPE, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(2))
    usual = run(module, pair, x)
    for config in TILES:  # this also compiles what is timed
        found[f"{tuple(config)}"] = differing(usual, run(module, pair, x, config=config))
    return {what: count for what, count in found.items() if count}


def times(modules: dict) -> dict:
    x = torch.randn(*SHAPE, device="cuda", dtype=torch.bfloat16)
    copied, _ = copy_ms(x)
    rate = 2 * x.numel() * 2 / copied
    print(f"copy {copied:.4f} ms")
    seed, results = torch.tensor(SEED, device="cuda"), []
    for name, pair in CASES.items():
        row, column = outputs(pair, x)
        moved = x.numel() * 2 + row.nbytes() + column.nbytes()
        readings: dict[tuple, list[tuple[float, ...]]] = {}
        for _ in range(ROUNDS):
            for config in TILES:
                for label, module in modules.items():

                    def find(m=module, c=config, p=pair):
                        return m.amax(x, *p, None, config=c)

                    def cast(found, m=module, c=config, r=row, o=column):
                        m.cast(x, r, o, CastArgs(amax=found, seed=seed), config=c)

                    found = find()
                    calls = (
                        find,
                        lambda cast=cast, found=found: cast(found),
                        lambda cast=cast, find=find: cast(find()),
                    )
                    one = tuple(device_ms(call, warmup=3, repeats=20)[0] for call in calls)
                    readings.setdefault((label, config), []).append(one)
        for (label, config), several in readings.items():
            first, second, both = (statistics.median(column) for column in zip(*several, strict=True))
            share = moved / both / rate
            result = {"case": name, "version": label, **config._asdict(), "amax_ms": first, "cast_ms": second}
            results.append(result | {"ms": both, "of_copy": share})
            tile = f"{config.rows}x{config.columns}, {config.warps} warps"
            line = f"{name:12} {label:10} {tile:17} amax {first:.4f} cast {second:.4f} both {both:.4f} ms"
            print(f"{line}, of copy {share:.3f}", flush=True)
    return {"copy_ms": copied, "shape": SHAPE, "results": results}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--beside", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--json")
    parser.add_argument("--check", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    paths = {"new": ""} | dict(one.split("=", 1) for one in arguments.beside)
    if arguments.check:
        label, name = arguments.check
        print(label, name, "bytes that differ:", check(version(label, paths[label]), name) or 0)
        return
    command = [sys.executable, "-m", "benchmarks.nvfp4_casts", *(f"--beside={one}" for one in arguments.beside)]
    jobs = [(label, name) for label in paths for name in CASES]
    running = [
        subprocess.Popen([*command, "--check", *job], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for job in jobs
    ]
    for job, process in zip(jobs, running, strict=True):
        told, said = process.communicate()
        print(told.strip() if process.returncode == 0 else f"{job} failed: {said[-1500:]}", flush=True)
    found = times({label: version(label, path) for label, path in paths.items()})
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
