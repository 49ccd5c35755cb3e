"""Tell which pairs of operands the Hopper kernels multiply. Each kernel is probed once in the process: a version of
Triton may not build it. Imports no Triton, since reports use it too."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from octavo import backend
from octavo._torch.cuda import is_capturing
from octavo.errors import UnsupportedHardware
from octavo.kernels.grouped_gemm import reference
from octavo.kernels.probe import CAPTURED, Support, answer_of, error_of, noise, verdict
from octavo.quant.block import Block1D, Block2D
from octavo.quant.grouped import quantize_groups
from octavo.quant.groups import BLOCK, Groups, equal, split
from octavo.quant.quantizer import Quantizer
from octavo.quant.scale_blocks import Block
from octavo.quant.tensorwise import Tensorwise

_FINE: Block = (1, BLOCK)
_COARSE: Block = (BLOCK, BLOCK)


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def rows(a: Quantizer, b: Quantizer, device: torch.device, fast: bool = False) -> bool:
    """Return whether a Hopper kernel computes `grouped_gemm.rows`; `fast`: the one that sums in the tensor cores."""
    if _reach_over_all(a, b):
        return runs("fast rows" if fast else "rows", device)
    return (a.block, b.block) == (_FINE, _COARSE) and runs("rows of blocks", device)


def grouped_wgrad(a: Quantizer, b: Quantizer, device: torch.device) -> bool:
    if _reach_over_all(a, b):
        return runs("wgrad", device)
    return (a.block, b.block) == (_FINE, _FINE) and runs("wgrad of blocks", device)


def _reach_over_all(a: Quantizer, b: Quantizer) -> bool:
    return a.block[1] is None and b.block[1] is None


def pair(a: Quantizer, b: Quantizer, device: torch.device) -> bool:
    """Return whether Hopper kernels compute every product that recipes have for such a pair."""
    if _reach_over_all(a, b):
        return runs("rows", device) and runs("wgrad", device)  # fast rows are rows where their kernel fails
    return rows(a, b, device) or grouped_wgrad(a, b, device)


def runs(kernel: str, device: torch.device) -> bool:
    """Return whether a kernel of `_PROBES` runs here."""
    if not is_hopper(device) or backend.forced() == "emulated":
        return False
    found = support(kernel, device)
    # those in _INSTEAD have another kernel to fall back to: strict mode has nothing to refuse
    if not found.ok and kernel not in _INSTEAD:
        backend.refuse_emulation(found.reason)
    return found.ok


def support(kernel: str, device: torch.device) -> Support:
    """Return the verdict of a kernel's probe on a Hopper chip, with the reason why the kernel is not used."""
    found = _verdicts.get((kernel, device))
    if found is None:
        if is_capturing():  # a probe waits for the device; the kernel is taken to run, and probed later
            if backend.forced() == "strict":
                raise UnsupportedHardware(CAPTURED)
            return Support(True)
        what = f"the Hopper kernel for {_NAMES.get(kernel, f'{kernel} in groups')}"
        found = verdict(what, device, lambda: _PROBES[kernel](device), _INSTEAD.get(kernel, ""))
        _verdicts[kernel, device] = found
    return found


_verdicts: dict[tuple[str, torch.device], Support] = {}
_NAMES = {
    "rows of blocks": "rows in groups with a scale for each block",
    "wgrad of blocks": "weight gradients of groups with a scale for each block",
    "decoded products": "products of decoded MX and NVFP4 codes",
}
_INSTEAD = {
    "decoded products": "Octavo decodes such codes as it multiplies them, which is slower.",
    "fast rows": "Octavo sums their products in float32, which is slower.",
}


# -- probes: three groups, one without rows ----------------------------------------------------------------------------

_SIZES, _TAIL = (100, 0, 156), 8
_M, _N, _K = sum(_SIZES) + _TAIL, 256, 384  # rows, and columns of the result and of the contraction


def _groups(device: torch.device) -> Groups:
    # one group without rows, and a tail: what a kernel gets wrong first
    return split(torch.tensor(_SIZES, dtype=torch.int64, device=device), _M)


def _matrix(rows: int, columns: int, device: torch.device) -> Tensor:
    return noise(rows, columns, seed=columns).to(device, torch.bfloat16)


def _probe_rows(device: torch.device, x_spec: Quantizer, w_spec: Quantizer, fast: bool = False) -> float:
    x, _ = quantize_groups(_matrix(_M, _K, device), x_spec, None, _groups(device))
    w, _ = quantize_groups(_matrix(3 * _N, _K, device), w_spec, None, equal(3, _N, device))
    assert x is not None and w is not None
    got, want = _room(device, _M, _N)

    def product() -> None:
        # inside `answer_of`, so that a Triton that cannot build the kernel is an answer too
        from octavo.kernels.grouped_gemm import hopper  # it imports Triton

        (hopper.fast_rows if fast else hopper.rows)(x, w.q, got, None, None, _N, "rows")

    answer_of(product)
    reference.rows(x, w.q, want, None, None, _N, "rows", "precise")
    return _difference(got, want)


def _probe_wgrad(device: torch.device, spec: Quantizer) -> float:
    _, dy = quantize_groups(_matrix(_M, _N, device), None, spec, _groups(device))
    _, x = quantize_groups(_matrix(_M, _K, device), None, spec, _groups(device))
    assert dy is not None and x is not None
    got, want = _room(device, 3, _N, _K)
    added = torch.zeros_like(got)  # another kernel adds, and writes wide tiles

    def product() -> None:
        from octavo.kernels.grouped_gemm import hopper

        hopper.grouped_wgrad(dy, x, got, False)
        hopper.grouped_wgrad(dy, x, added, True)

    answer_of(product)
    reference.grouped_wgrad(dy, x, want, False)
    return max(_difference(got, want), _difference(added, want))


def _probe_plain_rows(device: torch.device) -> float:
    x, w, groups = _matrix(_M, _K, device), _matrix(3 * _N, _K, device).view(3, _N, _K), _groups(device)
    got, want = _room(device, _M, _N)

    def product() -> None:
        from octavo.kernels.grouped_gemm import hopper

        hopper.plain_rows(x, w, got, groups, None, None)

    answer_of(product)
    reference.plain_rows(x, w, want, groups, None, None)
    return _difference(got, want)


def _probe_decoded(device: torch.device) -> float:
    a, b = _matrix(_N, _K, device), _matrix(_K, _K, device)

    def product() -> Tensor:
        from octavo.kernels.gemm import hopper

        return hopper.gemm(a, b, torch.bfloat16, None, (None, None))

    return _difference(answer_of(product), a.double() @ b.double().T)


def _room(device: torch.device, *shape: int) -> tuple[Tensor, Tensor]:
    """Return room for a result and for the exact one: neither GEMM writes rows of the tail, nor has an empty group
    any."""
    return torch.zeros(shape, dtype=torch.bfloat16, device=device), torch.zeros(
        shape, dtype=torch.float32, device=device
    )


def _difference(got: Tensor, want: Tensor) -> float:
    """Return the largest error as a fraction of what sums in the tensor cores and one rounding may differ by; a wrong
    tile, row or scale differs by far more."""
    # by rows: their magnitudes differ by design of `noise`
    rows = want.double().square().mean(-1, keepdim=True).sqrt()
    return error_of(got.double(), want.double(), rows + 1e-30, 0.03)


_PROBES: dict[str, Callable[[torch.device], float]] = {
    "rows": lambda device: _probe_rows(device, Tensorwise(), Tensorwise()),
    "fast rows": lambda device: _probe_rows(device, Tensorwise(), Tensorwise(), fast=True),
    "rows of blocks": lambda device: _probe_rows(device, Block1D(), Block2D()),
    "wgrad": lambda device: _probe_wgrad(device, Tensorwise()),
    "wgrad of blocks": lambda device: _probe_wgrad(device, Block1D()),
    "plain rows": _probe_plain_rows,
    "decoded products": _probe_decoded,
}
