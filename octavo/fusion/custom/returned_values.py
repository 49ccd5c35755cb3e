"""The values that users' functions return: their number and memory, checked; those for backward, packed as tensors;
and gradients, which must be like their inputs.

A value that passes from forward to backward is a Tensor, QTensor, GroupedTensor, None, or a number or word that is the
same in every call of one plan. A config holds its kind:

    "none", "empty", "tensor", "codes:dtype:quantizer", "groups:side:dtype:quantizer", "value:number"

A QTensor or GroupedTensor is packed as its tensors and an empty one that has its shape.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo._torch.fakes import is_fake
from octavo.errors import UnsupportedConfig
from octavo.formats import Format
from octavo.quant.grouped import GroupedTensor, restore
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import QTensor
from octavo.runtime.contract import DTYPES
from octavo.runtime.dry_run import Miscounted
from octavo.runtime.named_gradients import in_order
from octavo.text import plural
from octavo.values import Value, parse, written

CONSTANTS = (bool, int, float, str, tuple, Format, Value)  # classes of what a config can hold as it is
MADE_UP = 128  # stands, when a run is planned, for a dim that the plan does not depend on


def check_extra_inputs(op: Any, number: int) -> None:
    if number != op.num_extra_inputs:
        what = plural(op.num_extra_inputs, "extra input")
        raise ValueError(f"{type(op).__name__} takes {what} besides x, got {number}.")


# -- values for backward -----------------------------------------------------------------------------------------------


def tensor_count(kind: str) -> int:
    """Return the number of tensors that a value of this kind is packed as."""
    return {"none": 0, "empty": 1, "tensor": 1, "codes": 4, "groups": 9, "value": 0}[kind.split(":")[0]]


def kind_of(value: Any, where: str) -> str:
    """Return the kind of a value that backward may need; `where` is the function that returned it."""
    if value is None:
        return "none"
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, QTensor):
        return f"codes:{dtype_name(value.dtype)}:{value.spec.key}"
    if isinstance(value, GroupedTensor):
        return f"groups:{value.orientation}:{dtype_name(value.q.dtype)}:{value.q.spec.key}"
    if isinstance(value, CONSTANTS) and not holds_tensors(value):
        return f"value:{written(value, where)}"
    raise TypeError(
        f"{where} returned {described(value)} for backward. What backward needs is a Tensor, QTensor, GroupedTensor or "
        "None; or a bool, int, finite float, str, or a tuple of these, the same in every call, such as the .value of "
        "an Enum."
    )


def holds_tensors(value: Any) -> bool:
    """Return whether a tuple has a tensor in it, as where its author forgot a star."""
    if isinstance(value, tuple):
        return any([holds_tensors(item) for item in value])
    return isinstance(value, Tensor | QTensor | GroupedTensor)


def packed(value: Any) -> list[Tensor | None]:
    if value is None or isinstance(value, CONSTANTS):
        return []
    if isinstance(value, QTensor):
        return [value.codes, value.scale, value.global_scale, value.codes.new_empty(0, *value.shape)]
    if isinstance(value, GroupedTensor):
        q = value.q
        shape = q.codes.new_empty(0, value.groups.rows, *q.shape)
        return [q.codes, q.scale, q.global_scale, *value.groups.tensors(), shape]
    return [value]


def unpacked(kind: str, tensors: Sequence[Any]) -> Any:
    name, *rest = kind.split(":", 2 if kind.startswith("codes") else 3)
    if name in ("none", "empty"):
        return None
    if name == "value":
        return parse(kind.partition(":")[2])
    if name == "tensor":
        return tensors[0]
    spec, dtype = parse(rest[-1]), DTYPES[rest[-2]]
    parts = [t for t in tensors[:3] if t is not None]
    if name == "codes":
        return spec.assemble(parts, tuple(tensors[3].shape[1:]), dtype)
    rows, *shape = tensors[8].shape[1:]
    codes = parts[0] if parts[0].dtype == spec.fmt.dtype else parts[0].view(spec.fmt.dtype)
    settings = (spec, tuple(shape), dtype, rows, rest[0], None)
    return restore([codes, *parts[1:], *tensors[3:8]], settings)


def described(value: Any) -> str:
    """Describe a returned value, for messages."""
    if isinstance(value, Tensor | TensorProto):
        name = dtype_name(value.dtype)
        return f"{'an' if name.startswith('i') else 'a'} {name} tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"{len(value)} {'entry' if len(value) == 1 else 'entries'}"
    return "None" if value is None else f"a {type(value).__name__}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- number and memory -------------------------------------------------------------------------------------------------


def entries(
    where: str, what: str, found: Any, number: int, error: type[Exception] = Miscounted, kinds: str = "tuple"
) -> list[tuple[Any, ...]]:
    """Return the entries that a function returned, one for each operation."""
    if not isinstance(found, tuple | list) or len(found) != number:
        raise error(f"{where} returns {what} with an entry for each of {number} operations, got {described(found)}.")
    for i, part in enumerate(found):
        if not isinstance(part, tuple | list):
            raise error(f"{where} returns a {kinds} of {what}{of_operation(i, number)}, got {described(part)}.")
    return list(map(tuple, found))


def of_operation(i: int, number: int) -> str:
    return f" for operation {i}" if number > 1 else ""


def _memory(t: Tensor) -> int:
    """Return the address of a tensor's memory; 0 for one without data."""
    return 0 if t.is_meta or is_fake(t) else t.untyped_storage().data_ptr()


def refuse_inputs(where: str, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    for value in outputs:
        place = _memory(value)
        if place != 0 and any([_memory(t) == place for t in given if t.numel()]):
            raise UnsupportedConfig(
                f"{where} returns one of its inputs, or a view of it. Return an intermediate: a node of a graph has no "
                "aliases."
            )


def without_aliases(found: Sequence[Any], given: Sequence[Any]) -> tuple[Any, ...]:
    """Return the tensors, with copies of those that lie in given memory or share theirs with another: a node of a graph
    returns no aliases."""
    taken = {_memory(t) for t in given if isinstance(t, Tensor)}
    kept: list[Any] = []
    for t in found:
        if t is not None:
            place = _memory(t)
            if place != 0 and place in taken:
                t = t.clone(memory_format=torch.contiguous_format)
                place = _memory(t)
            taken.add(place)
        kept.append(t)
    return tuple(kept)


# -- gradients ---------------------------------------------------------------------------------------------------------


def placed(where: str, found: Any, names: Sequence[tuple[str, ...]]) -> list[tuple[Any, ...]]:
    """Return the gradients of each operation in the order of its inputs, from a dict by name or a tuple with all of
    them."""
    number = len(names)
    parts = in_order(where, found, names) if isinstance(found, tuple | list) else found
    placed = entries(where, "gradients", parts, number, kinds="tuple or dict")
    for i, (part, own) in enumerate(zip(placed, names, strict=True)):
        if len(part) != len(own):
            raise Miscounted(
                f"{where} returns a gradient for each of {', '.join(own)}{of_operation(i, number)}: {len(own)}, got "
                f"{len(part)}. A dict of gradients by name may leave out those that are None."
            )
    return placed


NO_GRADIENT = ("", (), False)  # of an input that wants none, in place of what `like` returns


def like(t: TensorProto, known: str, y: TensorProto) -> tuple[str, tuple[int, ...], bool]:
    """Return what the gradient of an input is checked against: its dtype; its dims as far as they are `known` ("all",
    "last", those that are not made up, or "none"), -1 for the others; whether y has its shape."""
    end = len(t.shape) - 1
    dims = [n if known == "all" or (known == "last" and (n != MADE_UP or i == end > 0)) else -1
            for i, n in enumerate(t.shape)]  # fmt: skip
    return dtype_name(t.dtype), tuple(dims), known != "all" and tuple(t.shape) == tuple(y.shape)


def check_gradient(where: str, name: str, g: Any, like: Any, given: Any, dy: Any) -> None:
    """Refuse a gradient that is not like its input: it would be broadcast, summed or cast silently.
    `given` is the input itself, where it was saved."""
    if not isinstance(g, Tensor):
        raise Miscounted(f"{where} returned {described(g)} as the gradient of {name}. Return a tensor.")
    if like is None:  # an input of one of Octavo's layers
        if given is None:
            return
        like = dtype_name(given.dtype), given.shape, False
    dtype, dims, as_y = like
    want: Sequence[Any] = dims if given is None else given.shape
    fits = dtype_name(g.dtype) == dtype and g.dim() == len(want)
    fits = fits and not any([_differs(n, m) and n >= 0 for n, m in zip(want, g.shape, strict=True)])
    if fits and as_y and given is None and dy is not None and dy.dim() == g.dim():
        # the number of rows is not known, but it is more than one where dy has more than one
        fits = not any([_differs(n, m) and m == 1 for n, m in zip(dy.shape, g.shape, strict=True)])
        want = want if fits else dy.shape
    if not fits:
        shape = ", ".join("?" if n == -1 else str(n) for n in want) + ("," if len(want) == 1 else "")
        raise Miscounted(
            f"{where} returned {described(g)} as the gradient of {name}, which is a {dtype} tensor of shape ({shape}). "
            "Return gradients in the dtype and shape of their inputs."
        )


def _differs(a: Any, b: Any) -> bool:
    """Return whether two dims differ as numbers. A compiler's symbols are not compared."""
    return isinstance(a, int) and isinstance(b, int) and a != b
