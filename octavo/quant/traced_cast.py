"""A quantizer's cast in a graph that is being traced: one operator, `octavo::quantize`, in place of its Python code.

The quantizer crosses as its canonical string. Codes leave as bytes, which have no gradient by dtype; no gradient flows
through a cast in eager mode either.
"""

from typing import Any

import torch
from torch import Tensor

from octavo.quant.orientation import oriented_shape
from octavo.quant.proto import TensorProto
from octavo.values import parse


def quantize(
    spec: Any, x: Tensor, is_column: bool, amax: Tensor | None, inverse_scale: Tensor | None, seed: Tensor | None
) -> Any:
    """Return the cast of x, or of its transpose, as part of the graph that is being traced."""
    parts = torch.ops.octavo.quantize(x.detach(), spec.key, is_column, amax, inverse_scale, seed)
    shape = oriented_shape(tuple(x.shape), 0 if is_column else -1)
    return spec.assemble(parts, shape, x.dtype)


@torch.library.custom_op("octavo::quantize", mutates_args=())
def _quantize(
    x: Tensor, spec: str, is_column: bool, amax: Tensor | None, inverse_scale: Tensor | None, seed: Tensor | None
) -> list[Tensor]:
    given = [t for t in (x, amax, inverse_scale, seed) if t is not None]
    found = parse(spec)._cast(x, is_column, amax, inverse_scale, seed)
    places = {t.untyped_storage().data_ptr() for t in given}
    parts = [t.clone() if t.untyped_storage().data_ptr() in places else t for t in found.tensors()]
    return [t.view(torch.uint8) if i == 0 else t for i, t in enumerate(parts)]


@_quantize.register_fake
def _(
    x: Tensor, spec: str, is_column: bool, amax: Tensor | None, inverse_scale: Tensor | None, seed: Tensor | None
) -> list[Tensor]:
    q = parse(spec).proto(TensorProto.of(x), 0 if is_column else -1)
    codes = q.codes.empty()
    return [codes.view(torch.uint8), *[p.empty() for p in (q.scale, q.global_scale) if p is not None]]
