"""A weight that is codes: a tensor that owns them, in both orientations, and no other memory.

Reading it gives the values that the codes stand for, in the weight's dtype, with gradients that are dense. Writing to
it in place, through a view too, computes with the values and quantizes the result into the same codes: one rounding for
each write, of all that shares a scale with it. `detach()`, `.data`, views, `clone()` and moves to another device are
codes again; every other operation returns a plain tensor.

Operations that would change its memory or shape (`resize_`, `set_`), and operators that do not declare their writes
(collectives), are refused. Layers do not read it: they pass its codes to their nodes, and its token for the gradient.
"""

import copy
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from octavo._torch.dispatcher import no_torch_function
from octavo._torch.fakes import FakeTensor
from octavo._torch.operators import schema, to_copy
from octavo._torch.tensors import PARAMETER_MARK, tree_map, wrapper_subclass
from octavo.errors import UnsupportedConfig
from octavo.quant.qtensor import Join, Parts
from octavo.recipes import Recipe
from octavo.runtime.contract import WeightCast
from octavo.runtime.transforms import refuse_active, refuse_tangents
from octavo.runtime.weight_nodes import anchor as anchor_in_graph
from octavo.weights.code_memory import Kind, group_slices, is_plain, measured_by, quantize_into, room_for, values_of
from octavo.weights.master_values import note_written, writable_values

aten = torch.ops.aten
ROW = ("row_codes", "row_scale", "row_level2")
COLUMN = ("column_codes", "column_scale", "column_level2")
INNER = (*ROW, *COLUMN, "element")


class ViewStep(NamedTuple):
    """One operator of a view."""

    operator: str  # its name: an operator itself is not pickled
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    which: int | None  # which of the results, where there are several

    def of(self, values: Tensor) -> Tensor:
        result: Any = _operator(self.operator)(values, *self.arguments, **dict(self.keywords))
        view: Tensor = result if self.which is None else result[self.which]
        return view


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
    element: Tensor  # [1], zero: what the token is made of
    kind: Kind
    group: int | None
    anchor: (
        Tensor | None
    )  # a plain tensor that looks like the whole weight: a layer asks it for shape, dtype and device
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
        weight: QuantizedWeight = wrapper_subclass(
            cls, tuple(size), None if stride is None else tuple(stride), dtype=element.dtype, device=element.device,
            storage_size=stored if group is None else stored // kind.shape[0],  # parameters of groups share the codes
        )  # fmt: skip
        return weight

    def __init__(
        self, inner: dict[str, Tensor], kind: Kind, group: int | None = None, steps: tuple[ViewStep, ...] = (),
        size: Sequence[int] | None = None, stride: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        for name in INNER:
            setattr(self, name, inner.get(name))
        self.kind, self.group, self.steps = kind, group, steps
        names = [name for name in INNER if inner.get(name) is not None]
        self._flat = names, (kind, group, steps)  # kept: a compiled graph asks for it at every call
        self.anchor = token_of(self) if is_plain(self.element) else None  # kept: a call asks for it each time

    # -- the codes -------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The tensors inside, by name."""
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
        """The values of the codes, without a gradient."""
        return self._shown(self._base_values())

    def dequantize(self) -> Tensor:
        """The values of the codes, as a plain tensor whose gradient goes to this weight."""
        with torch.no_grad():
            values = self.values()
        found: Tensor = Join.apply(values, self)  # type: ignore[no-untyped-call]
        return found

    def tolist(self) -> Any:
        return self.values().tolist()

    def _shown(self, base: Tensor) -> Tensor:
        for step in self.steps:
            base = step.of(base)
        return base

    def _base_values(self) -> Tensor:
        """The values of the weight, or of the group, that this is a view of."""
        kind = self.kind
        if self.group is None:
            return values_of(kind, codes_of(self, "row"), kind.shape, self.dtype)
        row, _ = room_for(kind, self.dtype, self.device, groups=1)
        for own, part in zip(row, self.own_codes(), strict=False):
            own.copy_(part)
        return values_of(kind, row, (1, *kind.shape[1:]), self.dtype)[0]

    def write(self, values: Tensor, amax: Tensor | None = None) -> None:
        """Quantize values of the whole weight, or of the group, once: those in float32 are not rounded before. A caller
        that has measured the values passes their amax, float32 [1]; the cast then does not measure them again."""
        if self.group is None:
            measured = () if amax is None or len(self.kind.shape) != 2 else measured_by(self.kind, amax)
            cast = WeightCast(values, codes_of(self, "row"), codes_of(self, "column"), all_reduced=measured)
            quantize_into(self.kind, cast)
            return
        room = room_for(self.kind, self.dtype, self.device, groups=1)
        quantize_into(self.kind, WeightCast(values[None], *room))
        for part, new in zip(self.own_codes(), (*room[0], *room[1]), strict=True):
            part.copy_(new)
        self._told()

    def _told(self) -> None:
        """Let a backward that has saved the codes know: a copy below autograd advances no version."""
        torch.autograd.graph.increment_version([*codes_of(self, "row"), *codes_of(self, "column")])

    def own_codes(self) -> list[Tensor]:
        """The codes and scales by row, then by column; for one group, its part of them."""
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
        return f"QuantizedWeight({shape}, {self.dtype}, {self.device}, held as codes of {self.kind.recipe})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_parameter = isinstance(self, nn.Parameter)
        attributes = {name: value for name, value in self.__dict__.items() if name != PARAMETER_MARK}
        where = self.tensors(), self.kind, self.group, self.steps, tuple(self.shape), tuple(self.stride())
        return _rebuilt, (where, is_parameter, self.requires_grad, attributes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the codes, and not the gradient and attributes, as for any parameter."""
        copied = self.with_inner({name: copy.deepcopy(t, memo) for name, t in self.tensors().items()})
        result = memo[id(self)] = (
            _as_parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        )
        return result

    @property
    def data(self) -> Tensor:
        alias: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return alias

    @data.setter
    def data(self, value: Tensor) -> None:
        if isinstance(value, QuantizedWeight) and _place(value) == _place(self) and value.steps == self.steps:
            return  # w.data += x has written there already
        if value.shape != self.shape or value.device != self.device:
            self._refuse(f"data of {tuple(value.shape)} on {value.device} would take its place")
        overlaps = isinstance(value, QuantizedWeight) and value.row_codes is self.row_codes
        with torch.no_grad():
            self.copy_(value.clone() if overlaps else value)

    def data_ptr(self) -> NoReturn:  # kernels ask for it, and would read at address 0
        self._refuse("it has no memory of its own")

    def __dlpack__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("it has no memory to share")

    # -- operators -------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            result = special(func, args, kwargs)
            if result is not NotImplemented:
                return result
        result = func.decompose(*args, **kwargs)  # in inference mode these come as they are
        if result is not NotImplemented:
            return result
        view, written = _effects(func)
        if torch.Tag.inplace_view in func.tags:
            _first_quantized(args)._refuse(f"{func.name()} would give it another shape or memory")
        if func.namespace == "c10d":
            _first_quantized((args, kwargs))._refuse(f"{func.name()} does not say what it writes")
        if view and isinstance(args[0], QuantizedWeight):
            return args[0]._view(func, args[1:], kwargs)
        return _computed(func, args, kwargs, written)

    def _view(self, func: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        grouped = self.group is None and not self.steps and len(self.kind.shape) == 3
        if grouped and func in (aten.select.int, aten.unbind.int) and (arguments or (0,))[0] in (0, -3):
            if func is aten.unbind.int:
                return self.groups()
            return self._made(self.tensors(), self.kind, range(self.kind.shape[0])[arguments[1]])
        like = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        shown = func(like, *arguments, **keywords)
        plain = tuple(tuple(a) if isinstance(a, list) else a for a in arguments)  # lists have no hash
        step = ViewStep(func.name(), plain, tuple(keywords.items()), None)
        if isinstance(shown, Tensor):
            return self._seen(step, shown)
        return [self._seen(step._replace(which=i), part) for i, part in enumerate(shown)]

    def _seen(self, step: ViewStep, like: Tensor) -> Any:
        if like.dtype != self.dtype:
            self._refuse(f"{step.operator} would show its bits as {like.dtype}, which it does not have")
        return self._made(self.tensors(), self.kind, self.group, (*self.steps, step), like.shape, like.stride())

    # -- refusals --------------------------------------------------------------------------------------------------

    def _refuse(self, why: str) -> NoReturn:
        raise UnsupportedConfig(
            f"A weight of {tuple(self.shape)} is held as codes of {self.kind.recipe} (octavo.quantize_weights): {why}. "
            "Use weight.dequantize(), or octavo.revert(model) first."
        )

    def _refuse_in_graphs(self) -> None:
        if not is_plain(self.row_codes) and not isinstance(self.row_codes, FakeTensor):
            self._refuse("a graph that is being traced cannot write to it. Write to it outside of the graph")


def codes_of(weight: Tensor, side: str) -> Parts:
    """The codes and scales of a quantized weight, in the order in which a layer takes them."""
    w: Any = weight
    codes, scale, level2 = (
        (w.row_codes, w.row_scale, w.row_level2) if side == "row" else (w.column_codes, w.column_scale, w.column_level2)
    )
    if codes is None:
        return ()
    return (codes, scale) if level2 is None else (codes, scale, level2)


def is_whole(parts: Sequence[Any]) -> bool:
    """Whether these are one quantized weight, or all of its groups in their order."""
    first = parts[0]
    if len(parts) == 1 and first.group is None:
        return not first.steps
    same = [isinstance(p, QuantizedWeight) and p.row_codes is first.row_codes and not p.steps for p in parts]
    return all(same) and [p.group for p in parts] == list(range(first.kind.shape[0]))


def hold(layer: str, recipe: Recipe, weight: Tensor, trainable: bool = False) -> QuantizedWeight:
    """Return a whole weight as codes, scaled by the weight itself."""
    kind = Kind(layer, recipe.key, tuple(weight.shape), trainable)
    with torch.inference_mode(False):  # made when inference mode is on, it must still serve training
        inner = {"element": torch.zeros(1, dtype=weight.dtype, device=weight.device)}
        for names, parts in zip((ROW, COLUMN), room_for(kind, weight.dtype, weight.device), strict=True):
            inner |= dict(zip(names, parts, strict=False))
        found = QuantizedWeight(inner, kind)
    quantize_into(kind, WeightCast(weight, codes_of(found, "row"), codes_of(found, "column")))
    return found


def parameter(weight: QuantizedWeight, like: Tensor) -> nn.Parameter:
    """A parameter with the attributes of the one whose place it takes."""
    new = _as_parameter(weight, like.requires_grad)
    new.__dict__.update(like.__dict__)
    return new


def moved(weight: Any, fn: Any, done: dict[int, Tensor]) -> nn.Parameter:
    """A held parameter after `fn` of `nn.Module._apply`: codes and scales follow to its device, and keep their dtype.
    `done` maps each inner tensor's id to its result, so that parameters that share codes still share them."""
    inner = {}
    for name, tensor in weight.tensors().items():
        if id(tensor) not in done:
            new = fn(tensor)
            cast = new.dtype != tensor.dtype and name != "element"
            done[id(tensor)] = tensor.to(new.device) if cast else new
        inner[name] = done[id(tensor)]
    if all(inner[name] is tensor for name, tensor in weight.tensors().items()):
        same: nn.Parameter = weight
        return same
    found = parameter(weight.with_inner(inner), weight)
    if weight.grad is not None:
        found.grad = fn(weight.grad)
    return found


def refuse_codes(title: str) -> NoReturn:
    """Refuse a quantized weight as an activation: kernels read memory, and it has none of its own."""
    raise UnsupportedConfig(
        f"{title} takes an activation, got a weight that is held as codes. Pass its values: weight.dequantize()."
    )


class _Token(torch.autograd.Function):
    """A plain tensor that looks like a whole quantized weight, and whose gradient is that of its parameters."""

    @staticmethod
    def forward(ctx: Any, *parts: QuantizedWeight) -> Tensor:
        ctx.several = parts[0].group is not None
        return token_of(parts[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        parts = grad.unbind() if ctx.several else (grad,)
        return tuple(g if needed else None for g, needed in zip(parts, ctx.needs_input_grad, strict=True))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_tangents()


def token_of(weight: QuantizedWeight) -> Tensor:
    """A new token."""
    return weight.element.expand(weight.kind.shape)


def linked_anchor(parts: Sequence[Any]) -> Tensor:
    """Return a token whose gradient goes to the parameters that the weight consists of."""
    if torch.compiler.is_compiling():
        return anchor_in_graph(parts, parts[0].kind.shape)
    if torch.is_grad_enabled() and any([p.requires_grad for p in parts]):
        try:
            found: Tensor = _Token.apply(*parts)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            refuse_active(error)
            raise
        return found
    anchor: Tensor | None = parts[0].anchor
    return token_of(parts[0]) if anchor is None else anchor


# -- operators that have a way of their own ----------------------------------------------------------------------------


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


def _copied(func: Any, args: Any, kwargs: Any) -> Any:
    """Copy from codes of the same kind, without rounding."""
    target, source = args[0], args[1]
    if not all(isinstance(t, QuantizedWeight) and not t.steps for t in (target, source)):
        return NotImplemented
    if target.kind[:3] != source.kind[:3] or target.dtype != source.dtype or target.shape != source.shape:
        return NotImplemented
    target._refuse_in_graphs()
    for mine, theirs in zip(target.own_codes(), source.own_codes(), strict=True):
        mine.copy_(theirs)
    target._told()
    return target


def _linked(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0][0].element.new_zeros(1).expand(args[1])


def _recorded(func: Any, args: Any, kwargs: Any) -> Any:
    for tensor in args[0].tensors().values():
        func(tensor, *args[1:], **kwargs)


_SPECIAL: dict[Any, Any] = {
    aten.detach.default: _aliased, aten.alias.default: _aliased, aten.clone.default: _cloned,
    to_copy: _moved_copy, aten.copy_.default: _copied,
    aten.record_stream.default: _recorded, torch.ops.octavo.anchor.default: _linked,
}  # fmt: skip


def _computed(func: Any, args: Any, kwargs: Any, written: tuple[str, ...]) -> Any:
    """Run any other operator on values, and quantize the weights that it wrote to."""
    bases: dict[Any, tuple[QuantizedWeight, Tensor]] = {}
    shown: dict[int, Tensor] = {}
    owners: dict[int, QuantizedWeight] = {}
    targets = [t for t in _written(func, args, kwargs, written) if isinstance(t, QuantizedWeight)]
    written_places = set(map(_place, targets))

    def values(t: Any) -> Any:
        if not isinstance(t, QuantizedWeight):
            return t
        if id(t) not in shown:
            where = _place(t)
            if where not in bases:
                bases[where] = t, writable_values(t) if where in written_places else t._base_values()
            shown[id(t)] = dense = t._shown(bases[where][1])
            owners[id(dense)] = t
        return shown[id(t)]

    for t in targets:
        t._refuse_in_graphs()
    result = func(*tree_map(values, args), **tree_map(values, kwargs))
    for t in targets:
        if shown[id(t)].shape != t.shape:
            t._refuse(f"{func.name()} would give it the shape {tuple(shown[id(t)].shape)}")
    for where in written_places:
        weight, base = bases[where]
        weight.write(base)
        note_written(weight, base)
    return tree_map(lambda t: owners.get(id(t), t), result) if targets else result


def _written(func: Any, args: Any, kwargs: Any, written: tuple[str, ...]) -> Iterable[Any]:
    if not written:
        return
    arguments = dict(zip((a.name for a in schema(func).arguments), args, strict=False)) | kwargs
    for name in written:
        value = arguments.get(name)
        yield from value if isinstance(value, (list, tuple)) else (value,)


def _place(t: QuantizedWeight) -> tuple[int, int | None]:
    """A key that is equal for views of one weight, or of one group of it."""
    return id(t.row_codes), t.group


@cache
def _effects(func: Any) -> tuple[bool, tuple[str, ...]]:
    """Return whether an operator returns a view of its first argument, and the names of the arguments that it writes
    to."""
    of_func = schema(func)
    written = tuple(a.name for a in of_func.arguments if a.alias_info is not None and a.alias_info.is_write)
    return not written and any(r.alias_info is not None for r in of_func.returns), written


@cache
def _operator(name: str) -> Any:
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")


def _first_quantized(tree: Any) -> QuantizedWeight:
    weights: list[QuantizedWeight] = []
    tree_map(lambda t: weights.append(t) if isinstance(t, QuantizedWeight) else None, tree)
    return weights[0]


def _as_parameter(weight: QuantizedWeight, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=requires_grad)


def _rebuilt(where: Any, is_parameter: bool, requires_grad: bool, attributes: dict[str, Any]) -> Tensor:
    weight = QuantizedWeight(*where)
    new = _as_parameter(weight, requires_grad) if is_parameter else weight.requires_grad_(requires_grad)
    new.__dict__.update(attributes)
    return new
