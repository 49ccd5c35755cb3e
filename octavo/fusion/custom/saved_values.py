"""Values that pass from a user's forward to its backward: a Tensor, QTensor, GroupedTensor or None, packed as plain
tensors, and the kind of each in words, which a config can hold.

    "none", "empty", "tensor", "codes:dtype:quantizer", "groups:side:dtype:quantizer"

A QTensor or GroupedTensor is packed as its tensors and an empty one that has its shape.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.quant.grouped import GroupedTensor, restore
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import QTensor
from octavo.runtime.contract import DTYPES
from octavo.values import parse


def slots_of(kind: str) -> int:
    """The number of tensors that a value of this kind is packed as."""
    return {"none": 0, "empty": 1, "tensor": 1, "codes": 4, "groups": 9}[kind.split(":")[0]]


def kind_of(value: Any, where: str) -> str:
    """The kind of a value that backward may need; `where` is the function that returned it."""
    if value is None:
        return "none"
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, QTensor):
        return f"codes:{dtype_name(value.dtype)}:{value.spec.key}"
    if isinstance(value, GroupedTensor):
        return f"groups:{value.orientation}:{dtype_name(value.q.dtype)}:{value.q.spec.key}"
    raise TypeError(
        f"{where} returned {told(value)} for backward. What backward needs is a Tensor, QTensor, GroupedTensor or "
        "None; any other choice is a field of op_config, known when the run is planned."
    )


def packed(value: Any) -> list[Tensor | None]:
    if value is None:
        return []
    if isinstance(value, QTensor):
        return [value.codes, value.scale, value.global_scale, value.codes.new_empty(0, *value.shape)]
    if isinstance(value, GroupedTensor):
        q = value.q
        shape = q.codes.new_empty(0, value.groups.rows, *q.shape)
        return [q.codes, q.scale, q.global_scale, *value.groups.tensors(), shape]
    return [value]


def _unpacked(kind: str, slots: Sequence[Any]) -> Any:
    name, *rest = kind.split(":", 2 if kind.startswith("codes") else 3)
    if name in ("none", "empty"):
        return None
    if name == "tensor":
        return slots[0]
    spec, dtype = parse(rest[-1]), DTYPES[rest[-2]]
    parts = [t for t in slots[:3] if t is not None]
    if name == "codes":
        return spec.assemble(parts, tuple(slots[3].shape[1:]), dtype)
    rows, *shape = slots[8].shape[1:]
    codes = parts[0] if parts[0].dtype == spec.fmt.dtype else parts[0].view(spec.fmt.dtype)
    settings = (spec, tuple(shape), dtype, rows, rest[0], None)
    return restore([codes, *parts[1:], *slots[3:8]], settings)


def unpacked_all(kinds: Sequence[str], slots: Iterator[Any]) -> tuple[Any, ...]:
    """Values of these kinds, from the tensors that come next."""
    return tuple([_unpacked(kind, [next(slots) for _ in range(slots_of(kind))]) for kind in kinds])


def told(value: Any) -> str:
    """Describe a returned value, for messages."""
    if isinstance(value, Tensor | TensorProto):
        name = dtype_name(value.dtype)
        return f"{'an' if name.startswith('i') else 'a'} {name} tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"{len(value)} {'entry' if len(value) == 1 else 'entries'}"
    return "None" if value is None else f"a {type(value).__name__}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
