"""Record a layer's call as the source of a function.

Every operator and every launch becomes a line; tensors become names, which are deleted after their last use. A call
that reads a value, or a tensor that it was not given, is refused.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from octavo import launch
from octavo._torch.cuda import current_stream
from octavo._torch.dispatcher import TorchDispatchMode
from octavo._torch.operators import FUNCTIONS, assert_async, schema
from octavo._torch.tensors import EMPTY_STRIDED, is_alias, reinterpret
from octavo.runtime.replay.source import (
    Line,
    address,
    in_form,
    needed,
    with_addresses_once,
    with_aliases,
    with_deletions,
    with_late_allocations,
    with_one_fill,
    without_detached,
)


class NotRecordable(Exception):
    """This call cannot be recorded."""


_FRESH = {
    torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default,
}  # fmt: skip
# functions that reach the same kernels by a shorter way than the operator
_SHORT: dict[Any, Callable[..., Any]] = {
    **FUNCTIONS,
    torch.ops.aten.add_.Tensor: Tensor.add_,
    torch.ops.aten.as_strided.default: Tensor.as_strided,
    torch.ops.aten.detach.default: Tensor.detach,
    torch.ops.aten.maximum.out: torch.maximum,
    torch.ops.aten.mm.default: torch.mm,
    torch.ops.aten.permute.default: Tensor.permute,
    torch.ops.aten.t.default: Tensor.t,
    torch.ops.aten.transpose.int: Tensor.transpose,
    torch.ops.aten.unbind.int: Tensor.unbind,
    torch.ops.aten.view.default: Tensor.view,
    torch.ops.aten.view.dtype: Tensor.view,
    torch.ops.aten.sum.dim_IntList: torch.sum,
    torch.ops.aten.zero_.default: Tensor.zero_,
    torch.ops.aten.zeros.default: torch.zeros,
}
_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class _Reads(TorchFunctionMode):
    """Refuse functions that read or move memory without an operator."""

    def __init__(self, recorder: "Recorder") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # these reach memory without an operator: a replay would miss what they do
        if func in _UNSEEN:
            self._recorder.refuse(f"{func.__name__} is no operator")
        return func(*args, **(kwargs or {}))


_UNSEEN = frozenset((
    Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data.__set__, Tensor.set_,  # type: ignore[attr-defined]
    Tensor.untyped_storage,
))  # fmt: skip


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record operators and launches. It tells tensors apart by identity, and does not keep them."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lines: list[Line] = []
        self._names: dict[int, tuple[Any, str]] = {}
        self._constants: dict[str, Any] = {}
        self._within: dict[str, tuple[str, int]] = {}  # a view -> what it is a view of, and how many bytes further
        self._forms: dict[
            str, str
        ] = {}  # a tensor just made, or all of one in another form -> what allocates it like this
        self._roots: dict[str, tuple[str, Any, int]] = {}  # a view -> its origin, that one's layout, elements further
        self._aliases: dict[str, tuple[str, str]] = {}  # a view -> its origin, and what makes it from that
        self._kernels: list[launch.Direct] = []
        self._why = ""
        self._tiled = False
        self._mutates = False  # whether an operator, which counts versions, writes to a tensor
        self._inputs = tuple(f"i{n}" for n in range(len(inputs)))
        self._device, self._index = inputs[0].device, inputs[0].get_device()
        for t, name in zip(inputs, self._inputs, strict=True):
            # by identity, and weakly: a recording must not keep the tensors of its call, and an id may be used again
            self._names[id(t)] = weakref.ref(t), name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        uses: list[str] = []
        said = [self._said(v, uses) for v in args] + [f"{k}={self._said(v, uses)}" for k, v in kwargs.items()]
        # the call runs as it would without a recorder: what cannot be recorded still gives its result
        made = func(*args, **kwargs)
        try:
            self._note(func, said, uses, args, made)
        except NotRecordable as why:
            self.refuse(str(why))
        return made

    @contextmanager
    def watching(self) -> Iterator[None]:
        with self, _Reads(self), launch.listening(self.launched):
            yield

    def refuse(self, why: str) -> None:
        # the first reason is the one that a reader can act on
        self._why = self._why or why

    def _note(self, func: Any, said: list[str], uses: list[str], args: Any, made: Any) -> None:
        if any(tag in func.tags for tag in _READS):
            raise NotRecordable(f"{func} depends on values")
        writes = schema(func).is_mutable
        self._mutates = self._mutates or writes
        results = list(made) if isinstance(made, (list, tuple)) else [] if func is assert_async else [made]
        if not all(isinstance(t, Tensor) for t in results):
            raise NotRecordable(f"{func} returns something else than tensors")
        # allocations are named by their layout: the same line serves an empty tensor and a form of it
        if func in _FRESH:
            self._add(room := self._room(made), [], [made], idle=True)
            self._forms[self._known(made)] = room
            return
        short = self._constant(Tensor.t if _turns(func, args) else _SHORT.get(func, func))
        said = said[:1] if _turns(func, args) else said
        many = isinstance(made, (list, tuple))
        detached = func is torch.ops.aten.detach.default
        zeros = made.nbytes if func is torch.ops.aten.zeros.default and made.get_device() == self._index else 0
        self._add(f"{short}({', '.join(said)})", uses, results, many=many, idle=func.is_view, detached=detached,
                  zeros=zeros,
                  writes=writes)  # fmt: skip
        if func.is_view:
            for t in results:
                name = self._known(t)  # some return what they are given, or a copy of it: aten.to, aten.reshape
                if name != uses[0] and is_alias(t, args[0]):
                    self._within[name] = uses[0], t.data_ptr() - args[0].data_ptr()
                    if uses[0] in self._forms and _covers(t, args[0]):
                        self._forms[name] = self._room(t)
                    if not many:
                        self._note_alias(name, t, uses[0], args[0])

    def _note_alias(self, name: str, view: Tensor, of: str, t: Tensor) -> None:
        """Note how to make a view straight from the tensor that it is a view of, through others or not."""
        if view.dtype != t.dtype or not view.numel() or any(one.is_neg() or one.is_conj() for one in (view, t)):
            return
        # a view of a view is made from their origin, so that none in between is needed
        layout = tuple(view.shape), view.stride()
        root, own, start = self._roots.get(of, (of, (tuple(t.shape), t.stride()), 0))
        start += (view.data_ptr() - t.data_ptr()) // t.element_size()
        self._roots[name] = root, own, start
        same = layout == own and not start
        make = "" if same else f"{self._constant(reinterpret)}({root}, {layout[0]}, {layout[1]}, {start})"
        self._aliases[name] = root, make

    def _room(self, t: Tensor) -> str:
        if t.device.type not in EMPTY_STRIDED or t.get_device() != self._index:
            raise NotRecordable(f"something is made on {t.device}")
        make = self._constant(EMPTY_STRIDED[t.device.type])
        return f"{make}({tuple(t.shape)}, {t.stride()}, {self._constant(t.dtype)})"

    def _zeros(self, nbytes: int) -> str:
        make, dtype, device = (self._constant(v) for v in (torch.zeros, torch.uint8, self._device))
        return f"{make}({nbytes}, dtype={dtype}, device={device})"

    def launched(self, one: launch.Launch, pointers: Sequence[Any]) -> None:
        """Record a kernel launch."""
        try:
            uses, addresses = list[str](), list[str]()
            direct = one.direct(*pointers)
            if direct is None:
                raise NotRecordable("its kernels are launched by Triton")
            if launch.device_index(pointers[0]) != self._index:
                raise NotRecordable("it launches on several devices")
            given = [self._pointer(t, uses, addresses) for t in pointers]
            head, tail = ([self._value(v) for v in values] for values in (direct.head, one.tail))
            arguments = ", ".join([*given, *tail])
            said = ", ".join([f"{one.grid}, 1, 1, stream", *head, f"({arguments},)" if direct.packs else arguments])
            text = f"{self._constant(direct.launch)}({said})"
            self._kernels.append(direct)
            self._lines.append(Line(text, tuple(uses), (), tuple(addresses)))
        except NotRecordable as why:
            self.refuse(str(why))

    def _pointer(self, t: Any, uses: list[str], addresses: list[str]) -> str:
        if isinstance(t, launch.Tiles):
            self._tiled = True
            make, shape, layout = (self._constant(v) for v in (launch.Tiles, t.block_shape, t.layout))
            return f"{make}({self._said(t.base, uses)}, {shape}, {layout})"
        if t is None:
            return "0"
        name, offset = self._known(t), 0
        if not name:
            return self._said(t, uses)
        # of a view, the address of its origin and an offset: the line that makes the view may go
        while t.numel() and name in self._within:  # an address needs no view
            name, further = self._within[name]
            offset += further
        addresses.append(name)
        return address(name) + (f" + {offset}" if offset else "")

    def _add(
        self, text: str, uses: list[str], made: list[Any], *, many: bool = False, idle: bool = False,
        detached: bool = False, zeros: int = 0, writes: bool = False,
    ) -> None:  # fmt: skip
        makes: list[str] = []
        for t in made:
            known = self._known(t)
            name = known or f"t{len(self._lines)}_{len(makes)}"
            if not known:
                self._names[id(t)] = weakref.ref(t), name
            makes.append(name)
        fresh = tuple(name for name in makes if name not in uses)
        if fresh:
            target = f"{', '.join(makes)}," if many else makes[0]
            text = f"{target} = {text}"
        detached = detached and len(fresh) == 1
        self._lines.append(Line(text, tuple(uses), fresh, idle=idle, detached=detached, zeros=zeros, writes=writes))

    def _known(self, t: Any) -> str:
        reference, name = self._names.get(id(t), (None, ""))
        return name if reference is not None and reference() is t else ""

    def _said(self, value: Any, uses: list[str]) -> str:
        """Write a value as source."""
        if isinstance(value, Tensor):
            name = self._known(value)
            if not name:
                self.refuse("it uses a tensor that it was not given")
            uses.append(name)
            return name
        if isinstance(value, (list, tuple)):
            return "[" + "".join(self._said(v, uses) + "," for v in value) + "]"
        if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
            return repr(value)
        return self._constant(value)

    def _value(self, value: Any) -> str:
        """Write an argument of a launch as source."""
        return repr(value) if value is None or type(value) in (bool, int) else self._constant(value)

    def _constant(self, value: Any) -> str:
        for name, known in self._constants.items():
            if known is value:
                return name
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def _opening(self) -> Iterable[str]:
        if self._index >= 0:
            yield f"stream = {self._constant(current_stream)}({self._index})"
        if self._tiled:
            yield f"{self._constant(launch.enter_context)}({self._index})"

    def function(self, about: Any, results: Iterable[Tensor | None]) -> Callable[..., Any]:
        """Return the recorded call, as a function of the inputs that returns `about` and these tensors."""
        uses: list[str] = []
        returned = [self._said(t, uses) for t in results]
        if self._why:
            raise NotRecordable(self._why)
        lines = without_detached(needed(self._lines, set(uses)), set(uses))
        lines = with_aliases(in_form(lines, self._forms, set(uses)), self._aliases, set(self._inputs), set(uses))
        lines = with_late_allocations(with_one_fill(lines, set(uses), self._zeros))
        lines = with_addresses_once(lines, set(self._inputs))
        # the call owns its inputs, and frees each of them as early as what it makes itself
        taken = Line(f"{', '.join(self._inputs)}, = tensors; tensors.clear()", (), self._inputs)
        source = "\n    ".join([
            "def replay(tensors):",
            *self._opening(),
            *with_deletions([taken, *lines], set(uses)),
            f"return {self._constant(about)}, ({''.join(name + ', ' for name in returned)})",
        ])  # fmt: skip
        space = dict(self._constants)
        exec(compile(source, "<octavo replay>", "exec"), space)  # every word of it was written above
        replay: Callable[..., Any] = space["replay"]
        replay.source, replay.mutates = source, self._mutates  # type: ignore[attr-defined]
        replay.kernels = self._kernels  # type: ignore[attr-defined]  # which stay loaded as long as this function
        return replay


def _turns(func: Any, args: Any) -> bool:
    """Return whether this transposes a matrix, for which there is a shorter way."""
    return func is torch.ops.aten.permute.default and list(args[1]) == [1, 0]


def _covers(view: Tensor, t: Tensor) -> bool:
    """Return whether a view is all of a tensor's memory, in elements of the same size: either might have been
    allocated."""
    begins = view.data_ptr() == t.data_ptr() and view.element_size() == t.element_size()
    return begins and 0 < view.numel() == t.numel() and _extent(view) == _extent(t)


def _extent(t: Tensor) -> int:
    return sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
