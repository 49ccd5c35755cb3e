"""What can take part in a run: an operation that says, for a call, which stage of a chain it is.

    class Double(octavo.ops.BasicOperation):
        @staticmethod
        def op_forward_compute(config, inputs):                  # -> y, fresh tensors
            return inputs.x * 2, ()

        @staticmethod
        def op_forward_save_ctx(config, inputs, y, fresh):       # -> which of these backward needs
            return ()

        @staticmethod
        def op_backward(config, saved, dy, wants):               # -> a gradient for each input
            return (dy * 2,)

These are the functions of a layer (`octavo.layers.contract`): they see their arguments and nothing else, which is why
they are static. Settings come from `op_config`, as a registered value; parameters are named in `params` and read at
every call. `inputs` has x, the parameters, extra inputs (`extra0`, …) and `kwargs`, by name.

An operation with extra inputs or outputs defines `fuser_forward_compute`, `fuser_forward_save_ctx` and
`fuser_backward`, which take and return them. One whose forward cannot be taken apart defines
`op_forward(self, ctx, x, ...)` instead: it works in eager mode, and a graph breaks there.
"""

import hashlib
import inspect
import keyword
import re
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from octavo.layers import custom
from octavo.lower import while_tracing
from octavo.quant.proto import TensorProto
from octavo.values import Value, parse


class Edge(NamedTuple):
    """A value between two operations, without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    needs: bool  # a gradient
    like: Any = None  # (shape, dtype, device) of something like it, where the shape is not known: it is ()

    @property
    def requires_grad(self) -> bool:
        return self.needs

    def to(self, width: int, needs: bool) -> "Edge":
        """With another last dim."""
        shape = (*self.shape[:-1], width) if self.shape else ()
        like = None if self.like is None else ((*self.like[0][:-1], width), *self.like[1:])
        return Edge(shape, self.dtype, self.device, needs, like)

    @property
    def width(self) -> int:
        """Of its last dim, as far as it is known."""
        return self.shape[-1] if self.shape else self.like[0][-1] if self.like is not None and self.like[0] else 0

    @classmethod
    def of(cls, x: Tensor) -> "Edge":
        return cls(tuple(x.shape), x.dtype, x.device, x.requires_grad and torch.is_grad_enabled())


class Stage(NamedTuple):
    """One operation's part in one call of a run."""

    key: str  # of its layer's config
    inputs: tuple[Any, ...]  # of its layer, but for x
    buffers: tuple[Any, ...]
    y: Edge
    needs: bool  # whether it wants any gradient
    away: tuple[Edge, ...] = ()  # what it gives away
    anchored: bool = False  # backward has to run for what it writes, though no input of it takes a gradient
    after: Any = None  # called with its extras, once forward has run


class Channel(NamedTuple):
    name: str
    output_to_caller: bool = True


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody wants to see what goes into a module or comes out: then it is called as a module is."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class FusibleOperation:
    """What a Sequential may put into a run. A mixin for modules."""

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    op_keywords: ClassVar[tuple[str, ...]] = ()  # of a call, through op_kwargs
    op_is_legacy: ClassVar[bool] = False
    # class attributes, and not looked for: a compiler that misses one on a module takes note of all that is there
    op_forks: ClassVar[bool] = False
    op_writes_extra: bool = False  # an extra input is written to
    op_hooked: bool = False  # a copy, for an explanation, of one that has hooks
    op_runs_its_forward: ClassVar[bool] = False  # somebody else wrote its `forward`
    delay_wgrad_compute: bool = False
    fuse_wgrad_accumulation: bool = False

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        owner = next((parent for parent in cls.__mro__ if "forward" in parent.__dict__), cls)
        cls.op_runs_its_forward = not owner.__module__.startswith(("octavo.", "torch."))

    def op_alone(self, x: Any) -> str:
        """Why this operation does not join others in a call with x; empty if it does."""
        return ""

    def op_makes_node(self) -> bool:
        """Whether a call by itself is a node of a graph, and not plain torch."""
        return not self.op_is_legacy

    def op_stage(self, x: Edge, extras: tuple[Tensor, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        raise NotImplementedError

    def op_call(self, x: Any, extras: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        """By itself."""
        return self(x, *extras, **kwargs)  # type: ignore[operator]

    @classmethod
    def op_matches(cls, config: Value) -> bool:
        """Whether a stage with this config is one of this class's."""
        return False

    # -- channels --------------------------------------------------------------------------------------------------

    def set_extra_input_channel(self, index: int, name: str) -> "FusibleOperation":
        """Take extra input `index` from the channel of that name, within the same Sequential."""
        self._check_channel(index, name, self.num_extra_inputs, "inputs")
        self._channels("_input_channels")[index] = Channel(name)
        return self

    def set_extra_output_channel(self, index: int, name: str, output_to_caller: bool = True) -> "FusibleOperation":
        """Give extra output `index` to the channel of that name, and to the caller too unless told otherwise."""
        self._check_channel(index, name, self.num_extra_outputs, "outputs")
        if not isinstance(output_to_caller, bool):
            raise TypeError(f"output_to_caller is True or False, got {output_to_caller!r}.")
        self._channels("_output_channels")[index] = Channel(name, output_to_caller)
        return self

    def _check_channel(self, index: int, name: str, count: int, what: str) -> None:
        if self.__dict__.get("_channels_locked"):
            raise RuntimeError(
                f"{type(self).__name__} is in a Sequential, which has resolved its channels. Name them before."
            )
        if not 0 <= index < count:
            raise IndexError(f"{type(self).__name__} has {count} extra {what}, got index {index}.")
        if not isinstance(name, str) or not name:
            raise ValueError(f"A channel's name is a string that is not empty, got {name!r}.")

    def _channels(self, which: str) -> dict[int, Channel]:
        found: dict[int, Channel] = self.__dict__.setdefault(which, {})
        return found


# -- operations that somebody writes -----------------------------------------------------------------------------------

OP = ("op_forward_compute", "op_forward_save_ctx", "op_backward")
_FUSER = ("fuser_forward_compute", "fuser_forward_save_ctx", "fuser_backward")


def _defined(cls: type, name: str, base: type) -> Any:
    """What a class has under a name, if somebody wrote it."""
    for parent in cls.__mro__:
        if parent is base or not issubclass(parent, base):
            return None
        if name in parent.__dict__:
            return parent.__dict__[name]
    return None


def check_functions(cls: type, base: type, names: tuple[str, ...], legacy: str) -> bool:
    """Refuse a class with half of a contract. Whether it has it all."""
    own = [name for name in names[:2] if name in cls.__dict__]
    if own and legacy in cls.__dict__:
        raise TypeError(f"{cls.__name__} defines {legacy} and {own[0]}: one forward in one piece, or one in two.")
    compute, save = (_defined(cls, name, base) for name in names[:2])
    if (compute is None) != (save is None):
        has, misses = (names[0], names[1]) if save is None else (names[1], names[0])
        raise TypeError(f"{cls.__name__} defines {has} and not {misses}. Define both, or {legacy} alone.")
    for name in names:
        found = _defined(cls, name, base)
        if found is not None and name != names[2] and not isinstance(found, staticmethod):
            raise TypeError(
                f"{cls.__name__}.{name} must be a @staticmethod: it sees its arguments and not the module, which may "
                "have changed until backward."
            )
    return compute is not None


def _check_names(cls: Any) -> None:
    """`params` and `kwargs` are fields beside x and the extra inputs, each once."""
    taken = {"x"}
    for what in ("params", "kwargs"):
        names = getattr(cls, what)
        if not isinstance(names, tuple | list):
            hint = f" Write ({names!r},)." if isinstance(names, str) else ""
            raise TypeError(f"{cls.__name__}.{what} is a tuple of names, got {names!r}.{hint}")
        for name in names:
            if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
                raise TypeError(
                    f"{cls.__name__}.{what} has names of attributes that do not start with an underscore, got {name!r}."
                )
            if name in taken or re.fullmatch(r"extra\d+", name):
                raise TypeError(
                    f"{cls.__name__}.{what} has {name!r}, which its inputs have already: they are x, params, extra0, "
                    "extra1, … and kwargs. Give it another name."
                )
            taken.add(name)


def nearest(cls: type, base: type, forwards: tuple[str, ...]) -> str:
    """Which of these a class runs: the first that somebody wrote, from the class up. Empty if there is none."""
    for parent in cls.__mro__:
        if parent is base:
            return ""
        for name in forwards:
            if name in parent.__dict__:
                return name
    return ""


def check_backward(cls: type, name: str, forward: str, legacy: bool) -> None:
    """Refuse a backward that a parent wrote for the other kind of forward: it has other arguments."""
    owner = next(parent for parent in cls.__mro__ if name in parent.__dict__)
    if owner is not cls and getattr(owner, "op_is_legacy", legacy) != legacy:
        raise TypeError(
            f"{cls.__name__} runs {forward}, and its {name} is that of {owner.__name__}, for a forward in "
            f"{'two pieces' if legacy else 'one piece'}. Define {name} too."
        )


class BasicOperation(FusibleOperation, nn.Module):
    """An operation of your own. See this file's head, and docs/custom-ops.md."""

    params: ClassVar[tuple[str, ...]] = ()
    kwargs: ClassVar[tuple[str, ...]] = ()
    op_protos: ClassVar[Any] = None
    strict: bool = True  # a legacy operation in a graph: an error, or a break
    op_name: ClassVar[str] = ""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        _check_names(cls)
        cls.op_keywords = tuple(cls.kwargs)
        has_extras = bool(cls.num_extra_inputs or cls.num_extra_outputs)
        splits_op = check_functions(cls, BasicOperation, OP, "op_forward")
        splits_fuser = check_functions(cls, BasicOperation, _FUSER, "op_forward")
        forward = nearest(cls, BasicOperation, ("op_forward", _FUSER[0], OP[0]))
        legacy = forward == "op_forward"
        if has_extras and legacy:
            raise TypeError(
                f"{cls.__name__} has extra inputs or outputs, and op_forward has no place for them. Define "
                f"{', '.join(_FUSER)}."
            )
        if has_extras and forward != _FUSER[0]:
            raise TypeError(
                f"{cls.__name__} has extra inputs or outputs, and op_* functions have no place for them. Define "
                f"{', '.join(_FUSER)}."
            )
        if not (splits_op or splits_fuser or legacy):
            raise TypeError(f"{cls.__name__} defines no forward. Define {OP[0]} and {OP[1]}, or op_forward.")
        runs = ("op_forward", OP[2]) if legacy else _FUSER if forward == _FUSER[0] else OP
        for name in (*OP, *_FUSER, "op_forward"):
            if name in cls.__dict__ and name not in runs:
                raise TypeError(
                    f"{cls.__name__} defines {name}, which would never run: its forward is {forward}. Define op_* "
                    "functions or fuser_* ones, not both."
                )
        last = runs[-1]
        backward = _defined(cls, last, BasicOperation)
        if backward is None:
            raise TypeError(f"{cls.__name__} defines a forward and no {last}. Define it.")
        check_backward(cls, last, forward, legacy)
        if not legacy and not isinstance(backward, staticmethod):
            raise TypeError(f"{cls.__name__}.{last} must be a @staticmethod: it sees what was saved, not the module.")
        cls.op_is_legacy = legacy
        if legacy:
            cls.op_name = ""  # and not a parent's, whose rules are not for it
        else:
            _register(cls, forward == _FUSER[0])

    def op_config(self) -> Value | None:
        """Settings of a call, as a registered value."""
        return None

    def forward(self, x: Any, *extras: Tensor, **kwargs: Any) -> Any:
        from octavo.fuser.runs import run_alone

        return run_alone(self, x, extras, kwargs)

    @classmethod
    def op_matches(cls, config: Value) -> bool:
        return isinstance(config, custom.Config) and config.name == cls.op_name

    def op_alone(self, x: Any) -> str:
        return "its forward is in one piece (op_forward)" if self.op_is_legacy else ""

    def op_stage(self, x: Edge, extras: tuple[Tensor, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        if len(extras) != self.num_extra_inputs:
            raise ValueError(
                f"{type(self).__name__} takes {self.num_extra_inputs} extra inputs besides x, got {len(extras)}."
            )
        for i, extra in enumerate(extras):
            if not isinstance(extra, Tensor | Edge):  # an Edge: what another operation of the run will make
                raise TypeError(f"{type(self).__name__} takes a tensor as extra input {i}, got {custom.told(extra)}.")
        own = tuple([getattr(self, name) for name in self.params])
        given = tuple([kwargs.get(name) for name in self.kwargs])
        for name, t in zip(self.kwargs, given, strict=True):
            if t is not None and not isinstance(t, Tensor):
                raise TypeError(f"{type(self).__name__} takes a tensor as {name}, got {type(t).__name__}.")
        inputs = (*own, *extras, *given)
        wanted = (x.needs, *[wants_gradient(t) for t in inputs])
        settings = self.op_config()
        if settings is not None and not isinstance(settings, Value):
            raise TypeError(
                f"{type(self).__name__}.op_config returns a registered octavo.values.Value or None, got {settings!r}."
            )
        key = "" if settings is None else settings.key
        width = x.width
        sketches = [sketch(x, width), *[as_it_is(t) for t in own], *[sketch(t, width) for t in (*extras, *given)]]
        # of which inputs the sizes are known: what a custom operation made has those that were made up for its own
        known = [_known(x), *["all" for _ in own], *[_known(t) for t in (*extras, *given)]]
        if torch.compiler.is_compiling():
            found = self._planned_now(key, wanted, sketches, known)
            if not found:  # then for these sizes alone
                found = self._planned_now(key, wanted, [_sizes(t) for t in (x, *inputs)], known, last=True)
        else:
            found = planned(self.op_name, key, wanted, tuple(sketches), tuple(known))
            if not found:
                sizes = tuple([_sizes(t) for t in (x, *inputs)])
                found = planned(self.op_name, key, wanted, sizes, tuple(known), last=True)
        said, outputs = found
        # what y's leading dims are is not known here, only what they would be for an x like the one that was tried
        edges = [
            Edge((), dtype, device, any(wanted) and dtype.is_floating_point, (shape, dtype, device))
            for shape, dtype, device in outputs
        ]
        return Stage(said, inputs, (), edges[0], any(wanted), tuple(edges[1:]))

    @while_tracing
    def _planned_now(
        self, key: str, wanted: tuple[bool, ...], sketches: list[Any], known: list[str], last: bool = False
    ) -> tuple[Any, ...]:
        return _plan(self.op_name, key, wanted, tuple(sketches), known, last)


def _known(t: Any) -> str:
    """As much of its shape as `octavo.layers.custom.like` may rely on."""
    return "none" if isinstance(t, Edge) and t.like is not None else "last"


def sketch(t: Any, width: int = 0) -> Any:
    """(shape, dtype, device) of a tensor as its functions are tried on it: what is planned depends on the last dim
    alone, so that the others are made up, but for those of one element, and of as many as x has columns (`width`)."""
    if t is None:
        return None
    if isinstance(t, Edge) and t.like is not None:
        return t.like
    return _made_up(t.shape, width), t.dtype, t.device


def _made_up(shape: Any, width: int) -> tuple[int, ...]:
    known: list[int] = []
    for i, n in enumerate(shape):
        if n == 1:
            known.append(1)
        elif n == width:
            known.append(len(range(width)))  # a number from here on, where a compiler had a symbol for it
        elif i == len(shape) - 1 and len(shape) > 1:
            known.append(len(range(n)))
        else:
            known.append(custom.MADE_UP)
    return tuple(known)


def _sizes(t: Any) -> Any:
    """As it is, in numbers, also where a compiler had symbols."""
    if t is None:
        return None
    if isinstance(t, Edge) and t.like is not None:
        return t.like
    return tuple([len(range(n)) for n in t.shape]), t.dtype, t.device


def as_it_is(t: Any) -> Any:
    return None if t is None else (tuple(t.shape), t.dtype, t.device)


def wants_gradient(t: Any) -> bool:
    return t is not None and t.requires_grad and torch.is_grad_enabled()


def digest_of(cls: type) -> str:
    """Of the text of a class and its parents: the same name may stand for other code tomorrow."""
    text = ""
    for parent in cls.__mro__:
        if parent.__module__.startswith(("octavo.", "torch.")) or parent is object:
            continue
        try:
            text += inspect.getsource(parent)
        except (OSError, TypeError):
            text += parent.__qualname__
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def name_of(cls: type, known: Any) -> str:
    """The name of a class in graphs: the same in every process, and another for each class of this one."""
    name = f"{cls.__module__}.{cls.__qualname__}".replace("<locals>.", "").replace("<", "").replace(">", "")
    found = name = f"{name}.{digest_of(cls)}"
    count = 1
    while found in known:
        count += 1
        found = f"{name}.{count}"
    return found


def _register(cls: Any, with_extras: bool) -> None:
    cls.op_name = name_of(cls, custom.FUNCTIONS)
    fields = ("x", *cls.params, *[f"extra{i}" for i in range(cls.num_extra_inputs)], *cls.kwargs)
    if with_extras:
        compute, select, back = (getattr(cls, name) for name in _FUSER)
    else:
        compute, select, back = _widened(cls)
    protos = cls.op_protos if with_extras or cls.op_protos is None else _widened_protos(cls)
    custom.FUNCTIONS[cls.op_name] = custom.Functions(
        cls.__name__, fields, compute, select, back, 1 + cls.num_extra_outputs, protos
    )


def _widened(cls: Any) -> tuple[Any, Any, Any]:
    """op_* as fuser_*: without extra outputs."""

    def compute(config: Any, inputs: Any) -> Any:
        made = cls.op_forward_compute(config, inputs)
        if not isinstance(made, tuple) or len(made) != 2:
            raise custom.Miscounted(
                f"{cls.__name__}.op_forward_compute returns y and a tuple of fresh tensors, got {made!r}."
            )
        return made[0], (), made[1]

    def select(config: Any, inputs: Any, outputs: Any, fresh: Any) -> Any:
        return cls.op_forward_save_ctx(config, inputs, outputs[0], fresh)

    def backward(config: Any, saved: Any, grads: Any, wants: Any) -> Any:
        return cls.op_backward(config, saved, grads[0], wants)

    return compute, select, backward


Said = tuple[str, tuple[Any, ...]]  # the key of a stage, (shape, dtype, device) of its outputs


def _widened_protos(cls: Any) -> Any:
    def protos(config: Any, inputs: Any) -> Any:
        y, fresh = cls.op_protos(config, inputs)
        return y, (), fresh

    return protos


_planned: dict[tuple[Any, ...], Said | tuple[()]] = {}


def planned(
    name: str,
    settings: str,
    wanted: tuple[bool, ...],
    sketches: tuple[Any, ...],
    known: tuple[str, ...],
    last: bool = False,
) -> Said | tuple[()]:
    """A custom stage for inputs like these: what its functions save is found out once. Nothing, if they cannot be run
    on tensors of these sizes and this is not the last try."""
    at = (name, settings, wanted, sketches, known)
    if at not in _planned:
        _planned[at] = _plan(name, settings, wanted, sketches, known, last)
    return _planned[at]


def _plan(
    name: str, settings: str, wanted: tuple[bool, ...], sketches: tuple[Any, ...], known: Sequence[str], last: bool
) -> Said | tuple[()]:
    value = None if settings == "" else parse(settings)
    protos = [None if t is None else TensorProto(*t) for t in sketches]
    try:
        found = custom.probe(custom.FUNCTIONS[name], value, protos)
    except custom.Miscounted:
        raise
    except (RuntimeError, ValueError):  # sizes that were made up do not fit each other
        if last:
            raise
        return ()
    y = found.outputs[0]
    likes = tuple(custom.like(t if want else None, how, y) for t, how, want in zip(protos, known, wanted, strict=True))
    config = custom.Config(name, value, wanted, found.fresh, found.saved, likes)
    return config.key, tuple((p.shape, p.dtype, p.device) for p in found.outputs)
