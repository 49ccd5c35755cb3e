"""NVFP4's cast in several tiles and strips, checked against the reference first. On a GPU:

python3 -m benchmarks.nvfp4_casts

Kernels are compiled and checked by a process for each case and tile, all at once; the times that follow are one
process's.
"""

import subprocess
import sys

import torch

from octavo.cli.timing import copy_ms, device_ms
from octavo.quant import NVFP4, QTensor, TensorProto
from octavo.quant.nvfp4 import reference
from octavo.quant.nvfp4 import triton as kernel
from octavo.quant.quantizer import CastArgs
from octavo.quant.tile import Config

TILES = (Config(64, 64, 4), Config(64, 128, 4), Config(64, 128, 8), Config(128, 64, 8))
PROGRAMS = (1 << 30, 2048, 1024)  # the fewest programs of a launch: strips of 1, 8 and more tiles
CASES = {
    "weights": (NVFP4(square=True), NVFP4(square=True)),
    "activations": (NVFP4(), NVFP4(rht=True)),
    "gradients": (NVFP4(stochastic=True), NVFP4(rht=True, stochastic=True)),
}
SEED = (0x1234_5678_9ABC, 7)
SHAPE = 16384, 8192


def outputs(pair, x) -> tuple[QTensor, QTensor]:
    like = TensorProto.of(x)
    return pair[0].proto(like).empty(), pair[1].proto(like, 0).empty()


def differing(pair, x, config) -> list[int]:
    """How many bytes of each output differ from the reference's."""
    found = []
    for module in (reference, kernel):
        extra = {"config": config} if module is kernel else {}
        row, column = outputs(pair, x)
        amax = module.amax(x, *pair, None, **extra)
        module.cast(x, row, column, CastArgs(amax=amax, seed=torch.tensor(SEED, device="cuda")), **extra)
        found.append([t.reshape(-1).view(torch.uint8) for q in (row, column) for t in q.tensors()])
    return [int((a != b).sum()) for a, b in zip(*found, strict=True)]


def strips(config):
    """Sets every strip in turn, and forgets launches of the one before."""
    for programs in PROGRAMS if config == TILES[0] else PROGRAMS[1:2]:
        kernel.PROGRAMS = programs
        kernel._amax_launch.cache_clear()
        kernel._cast_launch.cache_clear()
        yield kernel._strip(SHAPE, config)


def check(name: str, config: Config) -> None:
    pair = CASES[name]
    small = torch.randn(300, 520, device="cuda").mul(torch.randn(300, 1, device="cuda").exp2()).bfloat16()
    small[7], small[5, 3], small[100, 9], small[3::11] = 0, float("inf"), float("nan"), small[3::11] * 1e-38
    finite = small.nan_to_num(1.0, 1.0, 1.0)
    huge = (finite.float() * 3e37).bfloat16().nan_to_num(1.0, 1.0, 1.0)
    inputs = [small, finite, huge] + ([finite.float(), finite.half()] if config == TILES[0] else [])
    found = [differing(pair, x, config) for x in inputs]
    x = torch.randn(*SHAPE, device="cuda", dtype=torch.bfloat16)
    for _ in strips(config):
        amax = kernel.amax(x, *pair, None, config=config)
        kernel.cast(x, *outputs(pair, x), CastArgs(amax=amax, seed=torch.tensor(SEED, device="cuda")), config=config)
    torch.cuda.synchronize()
    print(name, tuple(config), "bytes that differ:", found)


def times() -> None:
    x = torch.randn(*SHAPE, device="cuda", dtype=torch.bfloat16)
    copied, _ = copy_ms(x)
    rate = 2 * x.numel() * 2 / copied
    print(f"copy {copied:.4f} ms")
    for name, pair in CASES.items():
        row, column = outputs(pair, x)
        moved = x.numel() * 2 + row.nbytes() + column.nbytes()
        seed = torch.tensor(SEED, device="cuda")
        for config in TILES:
            for strip in strips(config):
                args = CastArgs(amax=kernel.amax(x, *pair, None, config=config), seed=seed)
                first, _ = device_ms(lambda c=config, p=pair: kernel.amax(x, *p, None, config=c), repeats=30)
                second, _ = device_ms(
                    lambda c=config, a=args, r=row, o=column: kernel.cast(x, r, o, a, config=c), repeats=30
                )
                share = moved / (first + second) / rate
                tile = f"{config.rows}x{config.columns}, {config.warps} warps, strips of {strip}"
                print(f"{name:12} {tile:32} amax {first:.4f} cast {second:.4f} ms, of copy {share:.3f}", flush=True)


def main() -> None:
    if len(sys.argv) > 1:
        check(sys.argv[1], TILES[int(sys.argv[2])])
        return
    command = [sys.executable, "-m", "benchmarks.nvfp4_casts"]
    jobs = [(name, str(i)) for name in CASES for i in range(len(TILES))]
    running = [subprocess.Popen([*command, *job], stderr=subprocess.PIPE, text=True) for job in jobs]
    for job, process in zip(jobs, running, strict=True):
        _, said = process.communicate()
        if process.returncode:
            print(job, "failed:", said[-1500:])
    times()


if __name__ == "__main__":
    main()
