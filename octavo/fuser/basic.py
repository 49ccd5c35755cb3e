"""`BasicOperation`: an operation of one's own.

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

import keyword
import re
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from octavo._torch.tracing import while_tracing
from octavo.fuser.class_checks import check_backward, check_functions, defined, name_of, nearest
from octavo.fuser.custom_plan import as_it_is, known_sizes, plan, planned, sizes_of, sketch, wants_gradient
from octavo.fuser.operation import Edge, FusibleOperation, last_dim
from octavo.layers import user_op
from octavo.layers.dry_run import Miscounted
from octavo.layers.saved_values import told
from octavo.lower.call import Stage
from octavo.values import Value

OP = ("op_forward_compute", "op_forward_save_ctx", "op_backward")
_FUSER = ("fuser_forward_compute", "fuser_forward_save_ctx", "fuser_backward")


class BasicOperation(FusibleOperation, nn.Module):
    """An operation of your own. See this file's head, and docs/custom-ops.md."""

    params: ClassVar[tuple[str, ...]] = ()
    kwargs: ClassVar[tuple[str, ...]] = ()
    op_abstract: ClassVar[Any] = None
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
        backward = defined(cls, last, BasicOperation)
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
        return isinstance(config, user_op.Config) and config.name == cls.op_name

    def why_not_fusible(self, x: Any) -> str:
        return "its forward is in one piece (op_forward)" if self.op_is_legacy else ""

    def op_stage(self, x: Edge, extras: tuple[Tensor, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        own = tuple([getattr(self, name) for name in self.params])
        given = tuple([kwargs.get(name) for name in self.kwargs])
        self._check_given(extras, given)
        inputs = (*own, *extras, *given)
        wanted = (x.needs, *[wants_gradient(t) for t in inputs])
        key, width = self._settings_key(), last_dim(x)
        sketches = [sketch(x, width), *[as_it_is(t) for t in own], *[sketch(t, width) for t in (*extras, *given)]]
        # of which inputs the sizes are known: what a custom operation made has those that were made up for its own
        known = [known_sizes(x), *["all" for _ in own], *[known_sizes(t) for t in (*extras, *given)]]
        if torch.compiler.is_compiling():
            found = self._planned_now(key, wanted, sketches, known)
            if not found:  # then for these sizes alone
                found = self._planned_now(key, wanted, [sizes_of(t) for t in (x, *inputs)], known, last=True)
        else:
            found = planned(self.op_name, key, wanted, tuple(sketches), tuple(known))
            if not found:
                sizes = tuple([sizes_of(t) for t in (x, *inputs)])
                found = planned(self.op_name, key, wanted, sizes, tuple(known), last=True)
        said, outputs = found
        # what y's leading dims are is not known here, only what they would be for an x like the one that was tried
        edges = [
            Edge((), dtype, device, any(wanted) and dtype.is_floating_point, (shape, dtype, device))
            for shape, dtype, device in outputs
        ]
        return Stage("custom", said, inputs, (), any(wanted), outputs=tuple(edges))

    def _check_given(self, extras: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        if len(extras) != self.num_extra_inputs:
            raise ValueError(
                f"{type(self).__name__} takes {self.num_extra_inputs} extra inputs besides x, got {len(extras)}."
            )
        for i, extra in enumerate(extras):
            if not isinstance(extra, Tensor | Edge):  # an Edge: what another operation of the run will make
                raise TypeError(f"{type(self).__name__} takes a tensor as extra input {i}, got {told(extra)}.")
        for name, t in zip(self.kwargs, given, strict=True):
            if t is not None and not isinstance(t, Tensor):
                raise TypeError(f"{type(self).__name__} takes a tensor as {name}, got {type(t).__name__}.")

    def _settings_key(self) -> str:
        settings = self.op_config()
        if settings is not None and not isinstance(settings, Value):
            raise TypeError(
                f"{type(self).__name__}.op_config returns a registered octavo.values.Value or None, got {settings!r}."
            )
        return "" if settings is None else settings.key

    @while_tracing
    def _planned_now(
        self, key: str, wanted: tuple[bool, ...], sketches: list[Any], known: list[str], last: bool = False
    ) -> tuple[Any, ...]:
        return plan(self.op_name, key, wanted, tuple(sketches), known, last)


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


def _register(cls: Any, with_extras: bool) -> None:
    cls.op_name = name_of(cls, user_op.FUNCTIONS)
    fields = ("x", *cls.params, *[f"extra{i}" for i in range(cls.num_extra_inputs)], *cls.kwargs)
    if with_extras:
        compute, select, back = (getattr(cls, name) for name in _FUSER)
    else:
        compute, select, back = _widened(cls)
    protos = cls.op_abstract if with_extras or cls.op_abstract is None else _widened_abstract(cls)
    user_op.FUNCTIONS[cls.op_name] = user_op.Functions(
        cls.__name__, fields, compute, select, back, 1 + cls.num_extra_outputs, protos
    )


def _widened(cls: Any) -> tuple[Any, Any, Any]:
    """op_* as fuser_*: without extra outputs."""

    def compute(config: Any, inputs: Any) -> Any:
        made = cls.op_forward_compute(config, inputs)
        if not isinstance(made, tuple) or len(made) != 2:
            raise Miscounted(f"{cls.__name__}.op_forward_compute returns y and a tuple of fresh tensors, got {made!r}.")
        return made[0], (), made[1]

    def select(config: Any, inputs: Any, outputs: Any, fresh: Any) -> Any:
        return cls.op_forward_save_ctx(config, inputs, outputs[0], fresh)

    def backward(config: Any, saved: Any, grads: Any, wants: Any) -> Any:
        return cls.op_backward(config, saved, grads[0], wants)

    return compute, select, backward


def _widened_abstract(cls: Any) -> Any:
    def abstract(config: Any, inputs: Any) -> Any:
        y, fresh = cls.op_abstract(config, inputs)
        return y, (), fresh

    return abstract
