"""`BasicOperation`: the base class of users' operations.

A class's static functions are those of a layer (`octavo.runtime.contract`), which see only their arguments. When the
class is defined they become a `UserLayer`, as the functions of a fused operation do: an operation is a fused operation
over one. An operation whose forward cannot be split into compute and save has `op_forward(self, ctx, x, ...)` instead
(`octavo.fusion.custom.legacy`).
"""

import keyword
import re
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from octavo._torch.tracing import while_tracing
from octavo.formats import Format
from octavo.fusion.custom.class_functions import FUSER, OP, check_backward, check_static, forward_of, name_of
from octavo.fusion.custom.custom_plan import StagePlan, as_it_is, sketch, stage_plan, wants_gradient
from octavo.fusion.custom.returned_values import CONSTANTS, check_extra_inputs, described, holds_tensors
from octavo.fusion.custom.user_layer import Functions, UserLayer, fields_of
from octavo.ops.operation import Edge, FusibleOperation, last_dim
from octavo.quant import QTensor
from octavo.runtime.call import Stage
from octavo.runtime.dry_run import Miscounted
from octavo.values import Value, written


class BasicOperation(FusibleOperation, nn.Module):
    """Base class for an operation of your own: static functions for forward and backward.

    It then works alone, in the runs of a Sequential, and under `torch.compile(fullgraph=True)` as one node forward and
    one backward. A subclass defines

        op_forward_compute(config, inputs)                 returns y and a tuple of intermediates
        op_forward_save_ctx(config, inputs, y, intermediates)
                                                           returns a tuple of the tensors that backward needs
        op_backward(config, saved, dy, wants)              returns a gradient, or None, for each input: a tuple with
                                                           all of them, or a dict {name: gradient} with some

    as static methods, and may define `op_config(self)`, which returns settings, and `op_abstract(config, inputs)`,
    which returns what compute would, from tensors without data. `inputs` and `wants` are named tuples of x, `params`,
    extra inputs (extra0, extra1, …) and `kwargs`. Class attributes:

        params               names of attributes that are inputs: parameters and buffers
        kwargs               names of tensors, and of constants such as numbers, that a call may pass by keyword
        num_extra_inputs     how many tensors a call takes besides x
        num_extra_outputs    how many it returns besides y

    With extra inputs or outputs the functions are fuser_forward_compute(config, inputs), which returns y, extra outputs
    and intermediates, fuser_forward_save_ctx(config, inputs, outputs, intermediates) and
    fuser_backward(config, saved, grads, wants). A forward that cannot be split in two is
    op_forward(self, ctx, x, *extra_inputs, **kwargs), with op_backward(self, ctx, dy, ...); see `OperationContext`. It
    runs in eager mode only; with `strict = False` a compiler breaks the graph there.

    Defining a class with missing functions is a TypeError.

    Example:
        >>> class Square(octavo.ops.BasicOperation):
        ...     @staticmethod
        ...     def op_forward_compute(config, inputs):
        ...         return inputs.x * inputs.x, ()
        ...     @staticmethod
        ...     def op_forward_save_ctx(config, inputs, y, intermediates):
        ...         return (inputs.x,)
        ...     @staticmethod
        ...     def op_backward(config, saved, dy, wants):
        ...         return (2 * saved[0] * dy,)
        >>> x = torch.tensor([3.0], requires_grad=True)
        >>> octavo.Sequential(octavo.ops.ConstantScale(2.0), Square())(x).backward()
        >>> x.grad
        tensor([24.])
    """

    params: ClassVar[tuple[str, ...]] = ()
    kwargs: ClassVar[tuple[str, ...]] = ()
    op_abstract: ClassVar[Any] = None
    strict: bool = True  # whether a legacy operation in a graph is an error; if not, the graph breaks
    op_name: ClassVar[str] = ""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        _check_names(cls)
        cls.op_keywords = tuple(cls.kwargs)
        names = _names_of(cls)
        cls.op_is_legacy = names[0] == "op_forward"
        check_backward(cls, names[-1], names[0], cls.op_is_legacy)
        if cls.op_is_legacy:
            cls.op_name = ""  # not inherited: a parent's rules do not apply
            return
        check_static(cls, names[-1], "it sees what was saved, not the module")
        cls.op_name = name_of(cls, "custom")
        fields = ("x", *cls.params, *[f"extra{i}" for i in range(cls.num_extra_inputs)], *cls.kwargs)
        where = Functions(*(f"{cls.__name__}'s {name}" for name in ("compute", "save_ctx", "backward", "op_abstract")))
        outputs = 1 + cls.num_extra_outputs
        UserLayer(cls.op_name, cls.__name__, _functions(cls, names), where, fields_of(fields), outputs)

    def op_config(self) -> Value | None:
        """Return the settings of a call, as a registered value, or None. A subclass may override it. Make the value in
        `__init__`: a compiler may turn a float attribute into a symbol.

        Returns:
            The value that the functions get as `config`.
        """
        return None

    def op_settings(self) -> Any:
        return self.op_config()

    def forward(self, x: Tensor | QTensor, *extra_inputs: Tensor, **kwargs: object) -> Tensor | tuple[Tensor, ...]:
        """Run this operation alone.

        Args:
            x: the input. A QTensor is dequantized.
            *extra_inputs: the extra inputs, `num_extra_inputs` of them.
            **kwargs: tensors, or constants such as numbers, by the names in `kwargs`; those of a forward in one piece
                may be anything.

        Returns:
            y, or y and the extra outputs.

        Raises:
            ValueError: there are more or fewer extra inputs.
            TypeError: a keyword is unknown or neither a tensor nor a constant, or an extra input is no tensor.
        """
        from octavo.fusion.runs import run_alone

        return run_alone(self, x, extra_inputs, kwargs)

    @classmethod
    def op_matches(cls, config: Value) -> bool:
        return config.registered_name == cls.op_name

    def why_not_fusible(self, x: Any) -> str:
        return "it is a legacy operation (op_forward)" if self.op_is_legacy else ""

    def op_stage(self, x: Edge, extra_inputs: tuple[Tensor, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        own = tuple([getattr(self, name) for name in self.params])
        given = tuple([None if is_constant(kwargs.get(name)) else kwargs.get(name) for name in self.kwargs])
        self._check_given(extra_inputs, given)
        constants = self._constants(kwargs)
        inputs = (*own, *extra_inputs, *given)
        wanted = (x.requires_grad, *[wants_gradient(t) for t in inputs])
        settings = self.op_config()
        if settings is not None and not isinstance(settings, Value):
            raise TypeError(
                f"{type(self).__name__}.op_config returns a registered octavo.values.Value or None, got {settings!r}."
            )
        key, width = "" if settings is None else settings.key, last_dim(x)
        sketches = [sketch(x, width), *[as_it_is(t) for t in own], *[sketch(t, width) for t in (*extra_inputs, *given)]]
        found = stage_plan(self.op_name, key, constants, wanted, sketches)
        if not found:  # plan for these sizes alone
            exact = [old and (*sketch(t)[:3], old[3]) for t, old in zip((x, *inputs), sketches, strict=True)]
            found = stage_plan(self.op_name, key, constants, wanted, exact, last=True)
        stage_key, outputs = cast(StagePlan, found)
        # y's leading dims are not known here, only those of the dry run's y
        edges = [
            Edge((), dtype, device, any(wanted) and dtype.is_floating_point, (shape, dtype, device))
            for shape, dtype, device in outputs
        ]
        return Stage(self.op_name, stage_key, inputs, (), any(wanted), outputs=tuple(edges))

    def _check_given(self, extra_inputs: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        check_extra_inputs(self, len(extra_inputs))
        for i, extra in enumerate(extra_inputs):
            if not isinstance(extra, Tensor | Edge):  # an Edge stands for the output of another operation of the run
                raise TypeError(f"{type(self).__name__} takes a tensor as extra input {i}, got {described(extra)}.")
        for name, t in zip(self.kwargs, given, strict=True):
            if t is not None and not isinstance(t, Tensor):
                raise TypeError(
                    f"{type(self).__name__} takes {name} as a tensor, or as a bool, an int, a finite float, a str or a "
                    f"tuple of these, which become part of the plan; got {described(t)}."
                )

    def _constants(self, kwargs: dict[str, Any]) -> str:
        """Return the keywords of a call that are not tensors, as the text of a config's field."""
        found = ""
        for name in self.kwargs:
            value = kwargs.get(name)
            if is_constant(value):
                compiling = torch.compiler.is_compiling()
                text = _traced(value) if compiling else written(value, f"{type(self).__name__}.{name}")
                found += f"('{name}',{text},),"
        return f"({found})"


def is_constant(value: Any) -> bool:
    """Return whether a keyword of a call becomes part of the plan."""
    return isinstance(value, CONSTANTS) and not holds_tensors(value)


def _traced(value: Any) -> str:
    """Return the text of a constant in a graph that is being traced, where a number may be a symbol: the graph is then
    for this number."""
    if isinstance(value, tuple):
        return "(" + "".join([f"{_traced(item)}," for item in value]) + ")"
    if isinstance(value, bool):
        return "True" if value else "False"
    if isinstance(value, float):
        return _decimal(value.hex())  # these two, and no string of it, turn a symbol into a number
    if isinstance(value, int):
        return str(len(range(value))) if value >= 0 else "-" + str(len(range(-value)))
    if isinstance(value, Format):
        return value.name
    return value.key if isinstance(value, Value) else repr(value)


@while_tracing
def _decimal(number: str) -> str:
    return written(float.fromhex(number), "A keyword of a call")


def _names_of(cls: Any) -> tuple[str, ...]:
    """Return the names of the functions that a class runs: its forward, one function or two, and its backward."""
    forward = forward_of(cls, (FUSER, OP), "op_forward")
    if not forward:
        extra_inputs = cls.num_extra_inputs or cls.num_extra_outputs
        way_out = ", ".join(FUSER) if extra_inputs else f"{OP[0]} and {OP[1]}"
        raise TypeError(f"{cls.__name__} defines no forward. Define {way_out}, or op_forward.")
    runs = {"op_forward": ("op_forward", OP[2]), FUSER[0]: FUSER, OP[0]: OP}[forward]
    if (cls.num_extra_inputs or cls.num_extra_outputs) and runs is OP:
        raise TypeError(
            f"{cls.__name__} has extra inputs or outputs, and {forward} has no place for them. Define "
            f"{', '.join(FUSER)}."
        )
    for name in (*OP, *FUSER, "op_forward"):
        if name in cls.__dict__ and name not in runs:
            raise TypeError(
                f"{cls.__name__} defines {name}, which would never run: its forward is {forward}. Define op_* "
                "functions or fuser_* ones, not both."
            )
    return runs


def _check_names(cls: Any) -> None:
    """Check that `params` and `kwargs` are valid field names, different from each other, x and the extra inputs."""
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


def _functions(cls: Any, names: tuple[str, ...]) -> Functions:
    """Wrap a class's functions, which serve one operation, as functions for a list of operations
    (`octavo.fusion.custom.user_layer`). The op_* functions have no extra outputs."""
    extra_inputs = names is FUSER

    def computed_by(name: str) -> Any:
        def compute(configs: Any, inputs: Any) -> Any:
            made = getattr(cls, name)(configs[0], inputs[0])
            if not isinstance(made, tuple) or len(made) != 2 + extra_inputs:
                what = "outputs" if extra_inputs else "y"
                raise Miscounted(f"{cls.__name__}.{name} returns {what} and a tuple of intermediates, got {made!r}.")
            return made[0], (made[1] if extra_inputs else (),), (made[-1],)

        return compute

    def select(configs: Any, inputs: Any, outputs: Any, intermediates: Any) -> Any:
        return (
            getattr(cls, names[1])(configs[0], inputs[0], outputs if extra_inputs else outputs[0], intermediates[0]),
        )

    def backward(configs: Any, saved: Any, grads: Any, wants: Any) -> Any:
        return (getattr(cls, names[2])(configs[0], saved[0], grads if extra_inputs else grads[0], wants[0]),)

    abstract = None if cls.op_abstract is None else computed_by("op_abstract")
    return Functions(computed_by(names[0]), select, backward, abstract)
