"""A weight that is codes: a tensor that owns them, by row and maybe by column too, and no other memory.

Reading it gives the values that the codes stand for, in the weight's dtype, with gradients that are dense. Writing to
it in place, through a view too, computes with the values and quantizes the result into the same codes: one rounding for
each write, of all that shares a scale with it. `detach()`, `.data`, views, `clone()` and moves to another device are
codes again; every other operation returns a plain tensor.

Operations that would change its memory or shape (`resize_`, `set_`), and operators that do not declare their writes
(collectives), are refused. Layers do not read it: they pass its codes to their nodes, and its anchor for the gradient.
"""

import copy
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from octavo._torch.dispatcher import no_torch_function
from octavo._torch.fakes import FakeTensor
from octavo._torch.tensors import PARAMETER_MARK, wrapper_subclass
from octavo.errors import UnsupportedConfig
from octavo.quant.qtensor import Join
from octavo.runtime.contract import WeightCast
from octavo.weights.code_memory import (
    Kind,
    codes_of,
    group_slices,
    is_plain,
    quantize_into,
    room_for,
    scales_by_amax,
    values_of,
)
from octavo.weights.gradient_anchor import new_anchor
from octavo.weights.weight_operators import ViewStep, dispatch, place_of

aten = torch.ops.aten
ROW = ("row_codes", "row_scale", "row_level2")
COLUMN = ("column_codes", "column_scale", "column_level2")
INNER = (*ROW, *COLUMN, "element")


class QuantizedWeight(Tensor):
    """A weight that is codes, one group of it, or a view of either."""

    __slots__ = (*INNER, "_flat", "anchor", "group", "kind", "steps")
    __torch_function__ = no_torch_function  # type: ignore[assignment]

    row_codes: Tensor
    row_scale: Tensor
    row_level2: Tensor | None
    column_codes: Tensor | None
    column_scale: Tensor | None
    column_level2: Tensor | None
    element: Tensor  # [1], zero: what the gradient anchor is made of
    kind: Kind
    group: int | None
    anchor: Tensor | None  # without a gradient: a layer asks it for shape, dtype and device
    _flat: tuple[list[str], Any]
    steps: tuple[ViewStep, ...]  # from the weight, or the group, to what this tensor shows

    @staticmethod
    def __new__(
        cls, inner: dict[str, Tensor], kind: Kind, group: int | None = None, steps: tuple[ViewStep, ...] = (),
        size: Sequence[int] | None = None, stride: Sequence[int] | None = None,
    ) -> "QuantizedWeight":  # fmt: skip
        element = inner["element"]
        size = (kind.shape if group is None else kind.shape[1:]) if size is None else size
        stored = sum(t.nbytes for t in inner.values() if t is not None)
        return wrapper_subclass(
            cls, tuple(size), None if stride is None else tuple(stride), dtype=element.dtype, device=element.device,
            storage_size=stored if group is None else stored // kind.shape[0],  # parameters of groups share the codes
        )  # fmt: skip

    def __init__(
        self, inner: dict[str, Tensor], kind: Kind, group: int | None = None, steps: tuple[ViewStep, ...] = (),
        size: Sequence[int] | None = None, stride: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        for name in INNER:
            setattr(self, name, inner.get(name))
        self.kind, self.group, self.steps = kind, group, steps
        names = [name for name in INNER if inner.get(name) is not None]
        self._flat = names, (kind, group, steps)  # kept: a compiled graph asks for it at every call
        self.anchor = new_anchor(self) if is_plain(self.element) else None  # kept: a call asks for it each time

    # -- the codes -------------------------------------------------------------------------------------------------

    @staticmethod
    def of(
        kind: Kind, dtype: torch.dtype, device: torch.device, row: Sequence[Tensor], column: Sequence[Tensor] = ()
    ) -> "QuantizedWeight":
        """Return a whole weight that is these codes and scales."""
        inner = {"element": torch.zeros(1, dtype=dtype, device=device)}
        inner |= dict(zip(ROW, row, strict=False)) | dict(zip(COLUMN, column, strict=False))
        return QuantizedWeight(inner, kind)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors inside, by name."""
        return {name: getattr(self, name) for name in self._flat[0]}

    def with_inner(self, inner: dict[str, Tensor]) -> "QuantizedWeight":
        """Return this view, of other codes."""
        return self._made(inner, self.kind, self.group, self.steps, self.shape, self.stride())

    def whole(self) -> "QuantizedWeight":
        return self._made(self.tensors(), self.kind)

    def groups(self) -> list["QuantizedWeight"]:
        return [self._made(self.tensors(), self.kind, i) for i in range(self.kind.shape[0])]

    def _made(self, *settings: Any) -> "QuantizedWeight":
        with torch.inference_mode(self.is_inference()):  # a view is an inference tensor if its base is one
            return QuantizedWeight(*settings)

    def values(self) -> Tensor:
        """Return the values of the codes, without a gradient."""
        return self.seen_through_views(self.base_values())

    def dequantize(self) -> Tensor:
        """Return the values of the codes, as a plain tensor whose gradient goes to this weight."""
        # the gradient goes to the weight by `Join`, and not through the decoding
        with torch.no_grad():
            values = self.values()
        return Join.apply(values, self)  # type: ignore[no-untyped-call]

    def tolist(self) -> Any:
        return self.values().tolist()

    def seen_through_views(self, base: Tensor) -> Tensor:
        for step in self.steps:
            base = step.of(base)
        return base

    def base_values(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values of the weight, or of the group, that this is a view of: in its dtype, or exactly in
        float32."""
        kind, dtype = self.kind, self.dtype if dtype is None else dtype
        if self.group is None:
            return values_of(kind, codes_of(self, "row"), kind.shape, dtype)
        # a group's scales may lie between those of others: they are copied to where one group alone would have them
        row, _ = room_for(kind, self.dtype, self.device, groups=1)
        for own, part in zip(row, self.own_codes(), strict=False):
            own.copy_(part)
        return values_of(kind, row, (1, *kind.shape[1:]), dtype)[0]

    def amaxes(self) -> int:
        """Count the amaxes that decide the scales of a `write`, one for each group; 0 if blocks have scales."""
        groups = self.kind.shape[0] if self.group is None and len(self.kind.shape) == 3 else 1
        return groups if scales_by_amax(self.kind) else 0

    def write(self, values: Tensor, amaxes: Tensor | None = None) -> None:
        """Quantize values of the whole weight, or of the group, once: those in float32 are not rounded before. A caller
        that has measured the values passes their `amaxes()`, float32; the cast then does not measure them again."""
        # as bits, twice: row and column of a tensorwise cast share one amax
        measured = () if amaxes is None else (amaxes.view(torch.int32),) * 2
        if self.group is None:
            cast = WeightCast(values, codes_of(self, "row"), codes_of(self, "column"), all_reduced=measured)
            quantize_into(self.kind, cast)
            return
        room = room_for(self.kind, self.dtype, self.device, groups=1)
        quantize_into(self.kind, WeightCast(values[None], *room, all_reduced=measured))
        for part, new in zip(self.own_codes(), (*room[0], *room[1]), strict=True):
            part.copy_(new)
        self.note_write()

    def note_write(self) -> None:
        """Let a backward that has saved the codes know: a copy below autograd advances no version."""
        torch.autograd.graph.increment_version([*codes_of(self, "row"), *codes_of(self, "column")])

    def own_codes(self) -> list[Tensor]:
        """Return the codes and scales by row, then by column; for one group, its part of them."""
        row, column = codes_of(self, "row"), codes_of(self, "column")
        if self.group is None:
            return [*row, *column]
        alone = room_for(self.kind, self.dtype, torch.device("meta"), groups=1)
        return [*group_slices(row, alone[0], self.group), *group_slices(column, alone[1], self.group)]

    # -- what torch asks of a tensor that is made of others ----------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return self._flat

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "QuantizedWeight":
        kind, group, steps = context
        return QuantizedWeight(inner, kind, group, steps, size, stride)

    def _stable_hash_for_caching(self) -> str:
        return repr((self.kind, self.group, self.steps, tuple(self.shape), self.dtype))

    def __repr__(self) -> str:  # type: ignore[override]
        shape = "x".join(map(str, self.shape))
        return f"QuantizedWeight({shape}, {self.dtype}, {self.device}, stored as codes of {self.kind.recipe})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_parameter = isinstance(self, nn.Parameter)
        # attributes of users travel with a parameter; torch's mark of one is set anew
        attributes = {name: value for name, value in self.__dict__.items() if name != PARAMETER_MARK}
        where = self.tensors(), self.kind, self.group, self.steps, tuple(self.shape), tuple(self.stride())
        return _rebuilt, (where, is_parameter, self.requires_grad, attributes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the codes, and not the gradient and attributes, as for any parameter."""
        copied = self.with_inner({name: copy.deepcopy(t, memo) for name, t in self.tensors().items()})
        result = memo[id(self)] = as_parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        return result

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        if isinstance(value, QuantizedWeight) and place_of(value) == place_of(self) and value.steps == self.steps:
            return  # w.data += x has written there already
        if value.shape != self.shape or value.device != self.device:
            self.refuse(f"data of {tuple(value.shape)} on {value.device} would take its place")
        # the write would otherwise change what it still reads
        overlaps = isinstance(value, QuantizedWeight) and value.row_codes is self.row_codes
        with torch.no_grad():
            self.copy_(value.clone() if overlaps else value)

    def data_ptr(self) -> NoReturn:  # kernels ask for it, and would read at address 0
        self.refuse("it has no memory of its own")

    def __dlpack__(self, *_: Any, **__: Any) -> NoReturn:
        self.refuse("it has no memory to share")

    # -- operators -------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return dispatch(func, args, kwargs or {})

    def view_by(self, func: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        grouped = self.group is None and not self.steps and len(self.kind.shape) == 3
        if grouped and func in (aten.select.int, aten.unbind.int) and (arguments or (0,))[0] in (0, -3):
            if func is aten.unbind.int:
                return self.groups()
            return self._made(self.tensors(), self.kind, range(self.kind.shape[0])[arguments[1]])
        # on meta: the operator runs for its shape alone, and for its errors
        like = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        viewed = func(like, *arguments, **keywords)
        plain = tuple(tuple(a) if isinstance(a, list) else a for a in arguments)  # lists have no hash
        step = ViewStep(func.name(), plain, tuple(keywords.items()), None)
        if isinstance(viewed, Tensor):
            return self._seen(step, viewed)
        return [self._seen(step._replace(which=i), part) for i, part in enumerate(viewed)]

    def _seen(self, step: ViewStep, like: Tensor) -> Any:
        # a view as another dtype would show bits of values that do not exist
        if like.dtype != self.dtype:
            self.refuse(f"{step.operator} would show its bits as {like.dtype}, which it does not have")
        return self._made(self.tensors(), self.kind, self.group, (*self.steps, step), like.shape, like.stride())

    # -- refusals --------------------------------------------------------------------------------------------------

    def refuse(self, why: str) -> NoReturn:
        raise UnsupportedConfig(
            f"A weight of {tuple(self.shape)} is stored as codes of {self.kind.recipe} (octavo.quantize_weights): "
            f"{why}. Use weight.dequantize(), or octavo.revert(model) first."
        )

    def refuse_in_graphs(self) -> None:
        if not is_plain(self.row_codes) and not isinstance(self.row_codes, FakeTensor):
            self.refuse("a graph that is being traced cannot write to it. Write to it outside of the graph")


def as_parameter(weight: QuantizedWeight, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=requires_grad)


def _rebuilt(where: Any, is_parameter: bool, requires_grad: bool, attributes: dict[str, Any]) -> Tensor:
    weight = QuantizedWeight(*where)
    new = as_parameter(weight, requires_grad) if is_parameter else weight.requires_grad_(requires_grad)
    new.__dict__.update(attributes)
    return new
