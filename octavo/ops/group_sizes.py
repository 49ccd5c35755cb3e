"""The sizes of groups that a caller passes: checked, and on the device of the layer."""

import operator
from typing import Any

import torch
from torch import Tensor

from octavo import backend
from octavo._torch.fakes import FakeTensor
from octavo.errors import UnsupportedConfig, UnsupportedDtype, UnsupportedShape
from octavo.ops.operation import Edge
from octavo.quant.groups import check_values, split
from octavo.values import shown


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
                f"In a graph {name} must be a tensor on {device}: a graph would keep the first sizes of a list, or of "
                "a tensor elsewhere. Put them in a device tensor and overwrite it."
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
            f"{name} is a list of integers, got {shown(repr(splits))}. Give one size for each group."
        )
    if any([not -(2**63) <= size < 2**63 for size in sizes]):
        raise UnsupportedShape(f"{name} is a list of numbers of rows, got {shown(repr(splits))}. Count them anew.")
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
