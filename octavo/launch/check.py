"""Two small kernels that prove a direct launch (`octavo.launch`): what the device must compute is known."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from octavo._torch.triton import async_load
from octavo.launch import Launch, TiledLaunch, Tiles, Variant

COUNT, SIZE = 1000, 256
TILE = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)


class Case(NamedTuple):
    """A launch, its arguments, the one that it writes to, and what it must write there."""

    what: str
    launch: Launch
    arguments: tuple[Tensor | Tiles | None, ...]
    out: Tensor
    want: Tensor


@triton.jit
def _shift_kernel(x, out, missing, far, N, unused, SHIFT: tl.constexpr, SIZE: tl.constexpr):
    """Compute out = x + SHIFT + 1, + 1 more if `missing` is there; `far` is read at an odd address."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    v = tl.load(x + at, mask=at < N, other=0.0) + tl.load(far) + SHIFT
    if missing is not None:
        v += 1.0
    tl.store(out + at, v, mask=at < N)


@gluon.jit
def _tile_kernel(x, out, SIZE: gl.constexpr):
    """Copy the second tile of x down, and the first across, by TMA."""
    room = gl.allocate_shared_memory(x.dtype, x.block_shape, x.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, x.block_type.nbytes)
    async_load(x, [SIZE, 0], bar, room)
    mbarrier.wait(bar, 0)
    mbarrier.invalidate(bar)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, SIZE, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))
    gl.store(out + rows[:, None] * SIZE + columns[None, :], room.load(layout))


def cases(device: torch.device) -> Iterator[Case]:
    x = torch.arange(COUNT, dtype=torch.float32, device=device)
    ones, out = torch.ones(3, dtype=torch.float32, device=device), torch.zeros_like(x)
    launch = Launch(_shift_kernel, 4, (COUNT, None), num_warps=4, SHIFT=2.0, SIZE=SIZE)
    yield Case("pointers, a size, a constant and Nones", launch, (x, out, None, ones[1:]), out, x + 3.0)
    if torch.cuda.get_device_capability(device)[0] == 9:
        y = torch.arange(128 * 64, dtype=torch.float32, device=device).view(128, 64).to(torch.bfloat16)
        got, tiled = torch.zeros(64, 64, dtype=torch.bfloat16, device=device), Tiles(y, [64, 64], TILE)
        yield Case(
            "a matrix by tiles", TiledLaunch(_tile_kernel, 1, (), num_warps=4, SIZE=64), (tiled, got), got, y[64:]
        )


def variants() -> list[Variant]:
    shift = {"x": "*fp32", "out": "*fp32", "far": "*fp32", "N": "i32"}
    tile = {"x": f"tensordesc<bf16[64, 64],{TILE!r}>", "out": "*bf16"}
    constants = {"missing": None, "unused": None, "SHIFT": 2.0, "SIZE": SIZE}
    return [
        Variant("launch check", _shift_kernel, shift, constants, 4),
        Variant("launch check by tiles", _tile_kernel, tile, {"SIZE": 64}, 4),
    ]
