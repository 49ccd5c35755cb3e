"""The inputs of a grouped layer besides its rows: sizes of groups, x as codes, scales of the bias."""

import operator
from typing import Any

import torch
from torch import Tensor

from octavo import backend
from octavo._torch.fakes import FakeTensor
from octavo.errors import UnsupportedConfig, UnsupportedDtype, UnsupportedShape
from octavo.formats import FLOATS
from octavo.ops.inputs import check_features
from octavo.ops.operands import NO_X_CODES, XCodes
from octavo.ops.operation import Edge
from octavo.quant.grouped import GroupedTensor
from octavo.quant.groups import check_values, split
from octavo.recipes import LinearQuant
from octavo.values import excerpt


def splits_on(device: torch.device, splits: Any, number: int, rows: int, name: str = "m_splits") -> Any:
    """Return the sizes of that many groups as a tensor on the device. Raise in a graph, which would copy them only at
    capture, and for sizes on the host that so many `rows` cannot have. Sizes from inside a run (an Edge) are taken as
    they are. `name` is the argument's, for messages."""
    if type(splits) is Edge:
        return splits
    moves = not isinstance(splits, Tensor) or splits.device != device
    if moves:
        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if torch.compiler.is_compiling() or captured:
            raise UnsupportedConfig(
                f"In a graph {name} must be a tensor on the device of x, {device}: a graph would keep the first sizes "
                f"of {'a tensor elsewhere' if isinstance(splits, Tensor) else 'a list'}. Pass "
                f"torch.tensor(sizes, device={str(device)!r}), made outside of the graph, and overwrite it."
            )
        if not isinstance(splits, (Tensor, list, tuple)):
            raise UnsupportedDtype(
                f"{name} must be a tensor or a list of sizes, got {type(splits).__name__}. Give one size for each "
                "group."
            )
        splits = splits if isinstance(splits, Tensor) else _sizes_of(splits, name)
    if splits.dim() != 1 or splits.shape[0] != number:
        raise UnsupportedShape(
            f"{name} must have one size for each of the {number} groups, got shape {tuple(splits.shape)}. Give 0 for "
            "a group without rows."
        )
    if moves:
        check_values(splits, rows)
        splits = splits.to(device, non_blocking=True)
    return splits


def _sizes_of(splits: list[Any] | tuple[Any, ...], name: str) -> Tensor:
    try:
        sizes = [operator.index(size) for size in splits]
    except TypeError:
        sizes = []
    if any([isinstance(size, bool) for size in splits]) or len(sizes) != len(splits):
        raise UnsupportedDtype(
            f"{name} is a list of integers, got {excerpt(repr(splits))}. Give one size for each group."
        )
    if any([not -(2**63) <= size < 2**63 for size in sizes]):
        raise UnsupportedShape(f"{name} is a list of numbers of rows, got {excerpt(repr(splits))}. Count them anew.")
    return torch.tensor(sizes, device="cpu", dtype=torch.int64)


def check_same_sizes(sizes: Tensor, splits: Tensor, rows: int) -> None:
    """Raise if a GroupedTensor was made for other sizes. On a GPU, where the host would wait for them, the device does
    under `octavo.backend.use("checked")`."""
    if torch.compiler.is_compiling() or isinstance(sizes, FakeTensor):
        return
    if sizes.device.type != "cpu":
        rule = "Octavo: m_splits must be the sizes of the groups that x was quantized in"
        backend.check_on_device(lambda: (split(splits, rows).start.diff() == sizes).all(), rule)
    elif not torch.equal(split(splits, rows).start.diff(), sizes):
        raise UnsupportedShape(
            f"x was quantized in groups of {sizes.tolist()} rows, and m_splits is {splits.tolist()}. Leave m_splits "
            "out, or pass x.dequantize()."
        )


def codes_of(x: GroupedTensor, splits: Any, number: int, own: Tensor, quant: LinearQuant) -> tuple[Tensor, Any, XCodes]:
    """Return an anchor in place of x, the sizes of its groups, and its codes. If fprop takes other codes: x's
    values and the sizes."""
    if x.orientation != "row":
        raise UnsupportedShape(
            "GroupedLinear takes a GroupedTensor of rows as x, got one of columns. Quantize the rows of x."
        )
    check_features(x, own, "GroupedLinear", dims=2)
    if x.groups.number != number:
        raise UnsupportedShape(
            f"x was quantized in {x.groups.number} groups, and this GroupedLinear has {number} groups. "
            "Quantize x in as many, with size 0 for a group without rows, or pass x.dequantize() and m_splits."
        )
    sizes = x.groups.start.diff()
    if splits is not None:
        rows = x.groups.rows
        check_same_sizes(sizes, splits_on(own.device, splits, number, rows), rows)
    if x.q.spec != quant.fprop.left or not x.groups.is_ragged:
        return x.dequantize(), sizes, NO_X_CODES
    anchor = x.anchor
    if anchor is None or not torch.is_grad_enabled():
        anchor = torch.zeros(1, dtype=x.dtype, device=x.device).expand(x.shape)
    column = () if x.columns is None or x.columns.spec != quant.wgrad.right else tuple(x.columns.tensors())
    return anchor, sizes, XCodes(tuple(x.q.tensors()), column)


def bias_scales(scales: Any, rows: Any, scaled: bool) -> Tensor | None:
    """Return the scales of the bias, flat; None if the layer takes none. `scaled` says whether it does."""
    if scaled != (scales is not None):
        raise UnsupportedConfig(
            "scales= multiply the bias of a layer with scale_bias=True and a bias; "
            + ("this call has none. Pass scales, one for each row." if scaled else "this layer does not take them.")
        )
    if scales is None or type(scales) is Edge:
        return scales  # type: ignore[return-value]
    if scales.numel() != rows.shape[0] or scales.dtype not in FLOATS or scales.device != rows.device:
        raise UnsupportedShape(
            f"scales has a float32, bfloat16 or float16 for each of the {rows.shape[0]} rows, on {rows.device}; "
            f"got {scales.dtype} {tuple(scales.shape)} on {scales.device}."
        )
    return scales.reshape(-1)


def bias_of_rows(bias: Tensor, splits: Tensor, scales: Tensor | None, y: Tensor) -> Tensor:
    """Return the bias of each row's group, zero in the tail; in float32, in which its gradient is summed."""
    ends = splits.cumsum(0)
    group = torch.searchsorted(ends, torch.arange(y.shape[0], device=y.device, dtype=ends.dtype), right=True)
    rows = torch.cat([bias, bias.new_zeros(1, bias.shape[1])]).float()[group]
    return rows if scales is None else rows * scales[:, None].float()
