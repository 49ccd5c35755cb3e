"""Operators of torch on weights that are codes.

A few have a way of their own: copies as codes, views. Every other one runs on values, and a weight that it writes to is
quantized once from the result.
"""

import inspect
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo._torch.operators import schema, to_copy
from octavo._torch.tensors import tree_map
from octavo.runtime.weight_nodes import ANCHOR
from octavo.weights.code_memory import codes_of, fill_columns
from octavo.weights.master_values import keep_master, note_written, writable_values

aten = torch.ops.aten


class ViewStep(NamedTuple):
    """One operator of a view."""

    operator: str  # its name: an operator itself is not pickled
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    which: int | None  # which of the results, where there are several

    def of(self, values: Tensor) -> Tensor:
        result: Any = operator_of(self.operator)(values, *self.arguments, **dict(self.keywords))
        return result if self.which is None else result[self.which]


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator of torch on arguments among which there are weights that are codes."""
    special = _SPECIAL.get(func)
    if special is not None:
        result = special(func, args, kwargs)
        if result is not NotImplemented:
            return result
    # composite operators end in those below, which know codes
    result = func.decompose(*args, **kwargs)  # in inference mode these come as they are
    if result is not NotImplemented:
        return result
    view, written = _effects(func)
    if torch.Tag.inplace_view in func.tags:
        _first_of_codes(args).refuse(f"{func.name()} would give it another shape or memory")
    # schemas of collectives do not say which arguments they write to
    if func.namespace == "c10d":
        _first_of_codes((args, kwargs)).refuse(f"{func.name()} does not say what it writes")
    if view and _is_codes(args[0]):
        return args[0].view_by(func, args[1:], kwargs)
    return _computed(func, args, kwargs, written)


def _is_codes(t: Any) -> bool:
    """Return whether this is a QuantizedWeight, whose file imports this one."""
    return isinstance(t, Tensor) and hasattr(type(t), "row_codes")


def _aliased(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].with_inner(args[0].tensors())


def _cloned(func: Any, args: Any, kwargs: Any) -> Any:
    if args[0].steps or args[0].group is not None:
        return NotImplemented
    return args[0].with_inner({name: t.clone() for name, t in args[0].tensors().items()})


def _moved_copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Copy to another device as codes; a copy in another dtype is values."""
    weight = args[0]
    dtype, device = kwargs.get("dtype") or weight.dtype, kwargs.get("device") or weight.device
    if weight.steps or weight.group is not None or dtype != weight.dtype:
        return NotImplemented
    return weight.with_inner({name: t.to(device, copy=True) for name, t in weight.tensors().items()})


def _is_averaging() -> bool:
    """Return whether torch's AveragedModel is writing an average that it has computed, in a call above this one."""
    module = sys.modules.get("torch.optim.swa_utils")
    if module is None:
        return False
    # torch passes no sign of who writes: the frame above is the only one
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is module.AveragedModel.update_parameters.__code__:
            return bool(frame.f_locals["self"].n_averaged)  # the first one copies the model
        frame = frame.f_back
    return False


def _copied(func: Any, args: Any, kwargs: Any) -> Any:
    """Copy from codes of the same kind, without rounding."""
    target, source = args[0], args[1]
    if _is_codes(target) and target.kind.trainable and _is_averaging():
        target.refuse(
            "an AveragedModel that sets it to an average loses what is smaller than the distance of codes. Pass "
            "multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay), whose float32 values Octavo keeps, or "
            "average values: octavo.revert(average.module)"
        )
    if not all(_is_codes(t) and not t.steps for t in (target, source)):
        return NotImplemented
    if place_of(target) == place_of(source):
        return target
    # codes of another kind stand for other values: those are quantized once more
    if target.kind[:3] != source.kind[:3] or target.dtype != source.dtype or target.shape != source.shape:
        return NotImplemented
    lacks_columns = target.kind.columns and not source.kind.columns
    if lacks_columns and (target.group is not None or not target.kind.turns):
        return NotImplemented
    target.refuse_in_graphs()
    for mine, theirs in zip(target.own_codes(), source.own_codes(), strict=False):
        mine.copy_(theirs)
    if lacks_columns:
        fill_columns(target.kind, codes_of(target, "row"), codes_of(target, "column"), target.dtype)
    target.note_write()
    return target


def _restrided(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the same codes, where the strides are those of the weight: FSDP2 asks for them."""
    weight, size, stride = args[:3]
    if weight.steps or weight.group is not None or (tuple(size), tuple(stride)) != (weight.shape, weight.stride()):
        return NotImplemented
    return _aliased(func, args, kwargs)


def _linked(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0][0].element.new_zeros(1).expand(args[1])


def _recorded(func: Any, args: Any, kwargs: Any) -> Any:
    for tensor in args[0].tensors().values():
        func(tensor, *args[1:], **kwargs)


_SPECIAL: dict[Any, Any] = {
    aten.detach.default: _aliased, aten.alias.default: _aliased, aten.clone.default: _cloned,
    to_copy: _moved_copy, aten.copy_.default: _copied,
    aten.as_strided.default: _restrided, aten.record_stream.default: _recorded, ANCHOR: _linked,
}  # fmt: skip


# in-place arithmetic with tensors, by which programs train and average weights in steps that are smaller than the
# distance of codes; arithmetic with numbers initialises them
_ACCUMULATES = frozenset(
    getattr(aten, name)
    for op in ("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv")
    for name in (f"{op}_", f"_foreach_{op}_")
)
# they take operands of one dtype, and a weight's values may be in float32
_LERPS = tuple(getattr(aten, name) for name in ("lerp_", "_foreach_lerp_"))


def _in_dtypes_of(targets: Any, other: Any) -> Any:
    """Return a tensor, or a list of them, in the dtypes of the targets; any other operand as it is."""
    if isinstance(other, Tensor):
        return other.to(targets.dtype)
    if not isinstance(other, (list, tuple)) or not isinstance(other[0], Tensor):
        return other
    return [t.to(target.dtype) for target, t in zip(targets, other, strict=True)]


def _computed(func: Any, args: Any, kwargs: Any, written: tuple[str, ...]) -> Any:
    """Run any other operator on values, and quantize the weights that it wrote to."""
    bases: dict[Any, tuple[Any, Tensor]] = {}
    dense_of: dict[int, Tensor] = {}
    owners: dict[int, Any] = {}
    targets = [t for t in _written(func, args, kwargs, written) if _is_codes(t)]
    # several arguments may be views of one weight: it is decoded once and written once
    written_places = set(map(place_of, targets))

    def values(t: Any) -> Any:
        if not _is_codes(t):
            return t
        if id(t) not in dense_of:
            where = place_of(t)
            if where not in bases:
                bases[where] = t, writable_values(t) if where in written_places else t.base_values()
            dense_of[id(t)] = dense = t.seen_through_views(bases[where][1])
            owners[id(dense)] = t
        return dense_of[id(t)]

    accumulates = func.overloadpacket in _ACCUMULATES and _has_tensors(args[1:])
    for t in targets:
        t.refuse_in_graphs()
        # most updates are smaller than the distance of two codes: from now on float32 values take them
        if t.kind.trainable and accumulates:
            keep_master(t)
    args, kwargs = tree_map(values, args), tree_map(values, kwargs)
    if func.overloadpacket in _LERPS:
        args = args[0], *[_in_dtypes_of(args[0], other) for other in args[1:]]
    result = func(*args, **kwargs)
    for t in targets:
        if dense_of[id(t)].shape != t.shape:
            t.refuse(f"{func.name()} would give it the shape {tuple(dense_of[id(t)].shape)}")
    # one cast for each weight, when the operator is done: the codes never see a part of it
    for where in written_places:
        weight, base = bases[where]
        weight.write(base)
        note_written(weight, base)
    return tree_map(lambda t: owners.get(id(t), t), result) if targets else result


def _has_tensors(operands: Any) -> bool:
    return any(_has_tensors(one) if isinstance(one, (list, tuple)) else isinstance(one, Tensor) for one in operands)


def _written(func: Any, args: Any, kwargs: Any, written: tuple[str, ...]) -> Iterable[Any]:
    if not written:
        return
    arguments = dict(zip((a.name for a in schema(func).arguments), args, strict=False)) | kwargs
    for name in written:
        value = arguments.get(name)
        yield from value if isinstance(value, (list, tuple)) else (value,)


def place_of(t: Any) -> tuple[int, int | None]:
    """Return a key that is equal for views of one weight, or of one group of it."""
    return id(t.row_codes), t.group


@cache
def _effects(func: Any) -> tuple[bool, tuple[str, ...]]:
    """Return whether an operator returns a view of its first argument, and the names of the arguments that it writes
    to."""
    of_func = schema(func)
    written = tuple(a.name for a in of_func.arguments if a.alias_info is not None and a.alias_info.is_write)
    return not written and any(r.alias_info is not None for r in of_func.returns), written


@cache
def operator_of(name: str) -> Any:
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")


def _first_of_codes(tree: Any) -> Any:
    weights: list[Any] = []
    tree_map(lambda t: weights.append(t) if _is_codes(t) else None, tree)
    return weights[0]
