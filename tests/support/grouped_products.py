"""The products of a grouped layer: operands by each scheme, the three GEMMs, and their bounds."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from octavo.kernels import grouped_gemm
from octavo.quant import Block1D, Block2D, QTensor
from octavo.quant.grouped import GroupedTensor, member, quantize_groups
from octavo.quant.groups import Groups, equal, split
from octavo.quant.quantizer import Quantizer
from tests.support.ragged_groups import layout, pieces
from tests.support.same_tensors import assert_exact

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}  # half a step, with a bit to spare
SENTINEL = 7.0


def randn(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to(device)


def up(n: int) -> int:
    return -(-n // 128) * 128


class Scheme(NamedTuple):
    """Quantizers of x, w and dy."""

    fine: Quantizer
    coarse: Quantizer
    steep: Quantizer


BLOCKS = Scheme(Block1D(), Block2D(), Block1D())


class Layer(NamedTuple):
    """What the three GEMMs of a grouped layer meet: x and dy in groups, w stacked in matrices of `height` rows."""

    sizes: list[int]
    groups: Groups
    x: torch.Tensor  # [rows, K], NaN in the tail
    dy: torch.Tensor  # [rows, N], likewise
    w: torch.Tensor  # [G, N, K]
    height: int
    x_both: tuple[GroupedTensor, GroupedTensor]
    dy_both: tuple[GroupedTensor, GroupedTensor]
    w_both: tuple[QTensor, QTensor]

    @property
    def end(self) -> int:
        return layout(self.sizes, self.x.shape[0])[0][-1]


def layer(
    sizes, n, k, *, spare=40, height=None, device="cpu", dtype=torch.bfloat16, scale="pow2", dy_fmt=None, scheme=None
):
    rows = sum(sizes) + spare
    x, dy, w = randn(rows, k, dtype=dtype), randn(rows, n, dtype=dtype), randn(len(sizes), n, k, dtype=dtype)
    x *= torch.exp2(torch.randint(-4, 4, (rows, 1)))
    x[sum(sizes) :] = float("nan")
    dy[sum(sizes) :] = float("nan")
    if scheme is None:
        fine = Block1D(scale=scale)
        scheme = Scheme(fine, Block2D(scale=scale), fine if dy_fmt is None else Block1D(dy_fmt, scale))
    return made(sizes, x.to(device), dy.to(device), w.to(device), height or up(n), scheme)


def made(sizes, x, dy, w, height, scheme=BLOCKS) -> Layer:
    groups = split(torch.tensor(sizes, device=x.device), x.shape[0])
    fine, coarse, steep = scheme
    x_both, dy_both = quantize_groups(x, fine, fine, groups), quantize_groups(dy, steep, steep, groups)
    return Layer(sizes, groups, x, dy, w, height, x_both, dy_both, stacked(w, height, coarse))


def stacked(w: torch.Tensor, height: int, coarse: Quantizer) -> tuple[QTensor, QTensor]:
    """Matrices as groups of one size, filled up with zeros."""
    flat = F.pad(w, (0, 0, 0, height - w.shape[1])).flatten(0, 1)
    row, column = quantize_groups(flat, coarse, coarse, equal(w.shape[0], height, w.device))
    return row.q, column.q


def spoiled(layer: Layer) -> Layer:
    """NaN in everything past the last group and in scales of empty groups, which are undefined."""
    rows, empty = 128 * int(layer.groups.block[-1]), [g for g, size in enumerate(layer.sizes) if size == 0]
    for t in (*layer.x_both, *layer.dy_both):
        q, dim = t.q, 0 if t.orientation == "row" else 1
        first = rows // (q.spec.fmt.packed if dim else 1)
        q.codes.view(torch.uint8).narrow(dim, first, q.codes.shape[dim] - first).fill_(0x7F)
        nan = float("nan") if q.scale.dtype == torch.float32 else {32: 0xFF, 16: 0x7F}[q.spec.block[1]]
        if q.spec.block[dim] is None:
            q.scale.index_fill_(dim, torch.tensor(empty, dtype=torch.long, device=q.device), nan)
        else:
            first = rows // q.spec.block[dim]
            q.scale.narrow(dim, first, q.scale.shape[dim] - first).fill_(nan)
        if q.global_scale is not None:
            q.global_scale[empty] = float("nan")
    return layer


def fprop(layer: Layer, dtype=torch.bfloat16, bias=None, out=None, scales=None, how="precise") -> torch.Tensor:
    if out is None:
        out = torch.full((layer.x.shape[0], layer.w.shape[1]), SENTINEL, dtype=dtype, device=layer.x.device)
    return grouped_gemm.rows(
        layer.x_both[0], layer.w_both[0], out, bias, scales, height=layer.height, accumulation=how
    )  # fmt: skip


def dgrad(layer: Layer, dtype=torch.bfloat16, out=None, how="precise") -> torch.Tensor:
    if out is None:
        out = torch.full((layer.x.shape[0], layer.w.shape[2]), SENTINEL, dtype=dtype, device=layer.x.device)
    return grouped_gemm.rows(
        layer.dy_both[0], layer.w_both[1], out, height=layer.height, along="columns", accumulation=how
    )  # fmt: skip


def wgrad(layer: Layer, dtype=torch.bfloat16, out=None, accumulate=False) -> torch.Tensor:
    if out is None:
        out = torch.full(layer.w.shape, SENTINEL, dtype=dtype, device=layer.x.device)
    return grouped_gemm.grouped_wgrad(layer.dy_both[1], layer.x_both[1], out, accumulate=accumulate)


def alone(layer: Layer) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Each group's x, dy and w."""
    return list(zip(pieces(layer.x, layer.sizes), pieces(layer.dy, layer.sizes), layer.w, strict=True))


def values(q: QTensor) -> torch.Tensor:
    """What a GEMM multiplies, in the basis that the codes are in."""
    found = q.spec.values(q).double()
    return found if q.global_scale is None else found * q.global_scale.double()


def assert_within(
    got: torch.Tensor, want: torch.Tensor, size: torch.Tensor, held: torch.Tensor | None = None, drop: float = 8e-4
) -> None:
    """want and size = |a| @ |b|ᵀ in float64. `held`: what the product, rounded once by then, was added to."""
    step, least = STEP[got.dtype], torch.finfo(got.dtype).tiny * torch.finfo(got.dtype).eps
    bound = drop * size + step * want.abs() + least  # what one step of the tensor cores drops: 6e-4 was seen
    if held is not None:
        want = want + held.double()
        bound = bound + step * want.abs()
    worst = ((got.double() - want).abs() / bound).max().item() if got.numel() else 0.0
    assert worst <= 1.0, f"{worst:.3g} times the bound"


def assert_all_within(
    found: Layer,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    scales: torch.Tensor | None = None,
    drop: float = 8e-4,
) -> None:
    """The three GEMMs against the decoded codes, and what they must leave alone."""
    y, dx, dw = fprop(found, dtype, bias, scales=scales), dgrad(found, dtype), wgrad(found, dtype)
    each = torch.ones(found.x.shape[0], device="cuda") if scales is None else scales
    held = randn(*found.w.shape, dtype=dtype, device="cuda")
    added = wgrad(found, out=held.clone(), accumulate=True)
    of_y, of_dx = pieces(y, found.sizes), pieces(dx, found.sizes)
    x_row, x_column, dy_row, dy_column = (q.members() for q in (*found.x_both, *found.dy_both))
    n, k = found.w.shape[1:]
    w_row, w_column = found.w_both
    for g, size in enumerate(found.sizes):
        a, b = values(x_row[g]), values(member(w_row, "row", g, g * found.height, n))
        own = pieces(each[:, None], found.sizes)[g].double()
        want = a @ b.T if bias is None else a @ b.T + own * bias[g].double()
        assert_within(of_y[g], want, a.abs() @ b.abs().T, drop=drop)
        a, b = values(dy_row[g]), values(member(w_column, "column", g, g * found.height, n))
        assert_within(of_dx[g], a @ b.T, a.abs() @ b.abs().T, drop=drop)
        if size == 0:  # of which no scale means anything
            assert not dw[g].any() and not dw[g].signbit().any()
            assert_exact(added[g], held[g])
            continue
        a, b = values(dy_column[g])[:n], values(x_column[g])[:k]
        assert_within(dw[g], a @ b.T, a.abs() @ b.abs().T, drop=drop)
        assert_within(added[g], a @ b.T, a.abs() @ b.abs().T, held[g], drop)
    for out in (y, dx):
        assert (out[found.end :] == SENTINEL).all()
