"""Legacy operations and fused operations: their forward is one function, which saves values on a context at every
call. They work in eager mode. The compiler cannot tell what they save, so it ends the graph before them: an error under
fullgraph, a graph break if the operation is not strict."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo._torch.modules import GLOBAL_HOOKS, see_operations
from octavo._torch.tracing import Untraced
from octavo.errors import UnsupportedConfig
from octavo.fusion.custom.class_functions import FUSER, OP
from octavo.fusion.custom.returned_values import check_gradient, dtype_name
from octavo.fusion.custom.user_layer import fields_of
from octavo.fusion.rule import Rule
from octavo.ops.operation import has_hooks
from octavo.quant import QTensor
from octavo.runtime.named_gradients import in_order


class OperationContext:
    """The place where an operation whose forward is in one piece keeps tensors for its backward.

    Octavo makes it and passes it as `ctx` to op_forward and op_backward. Any other attribute may be set on it too.
    `saved_tensors` has the tensors of `save_for_backward`, in backward only.

    Example:
        >>> class OldSquare(octavo.ops.BasicOperation):
        ...     def op_forward(self, ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * x
        ...     def op_backward(self, ctx, dy):
        ...         (x,) = ctx.saved_tensors
        ...         return 2 * x * dy, ()
        >>> x = torch.tensor([3.0], requires_grad=True)
        >>> OldSquare()(x).backward()
        >>> x.grad
        tensor([6.])
    """

    def __init__(self) -> None:
        self.to_save: tuple[Tensor | None, ...] = ()
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for backward. A second call replaces the first.

        Args:
            *tensors: tensors, or None. Backward finds them in `saved_tensors`, in this order.
        """
        self.to_save = tensors


class _OnePiece(NamedTuple):
    """The functions of one call of a legacy operation, or of a fused one. Tuples have an entry for each operation."""

    where: str  # the name of its backward, for messages
    forward: Callable[[list[OperationContext], Tensor, Sequence[Tensor]], Tensor]
    backward: Callable[[list[OperationContext], Tensor], Sequence[Sequence[Any] | Mapping[str, Any]]]
    params: tuple[tuple[str, ...], ...]  # the names of each operation's parameters
    shown: tuple[str, ...]  # all of them, as messages name them


class _Legacy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _OnePiece, x: Tensor, *params: Tensor) -> Tensor:
        ctx.call, ctx.own = call, [OperationContext() for _ in call.params]
        ctx.likes = [(dtype_name(t.dtype), tuple(t.shape), False) for t in (x, *params)]
        y = call.forward(ctx.own, x, params)
        ctx.counts = [len(own.to_save) for own in ctx.own]
        ctx.save_for_backward(*[t for own in ctx.own for t in own.to_save])
        for own in ctx.own:
            own.to_save = ()  # autograd's ctx holds the tensors now; do not hold them twice
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        call, saved = ctx.call, iter(ctx.saved_tensors)
        for own, count in zip(ctx.own, ctx.counts, strict=True):
            own.saved_tensors = tuple(next(saved) for _ in range(count))
        found = in_order(call.where, call.backward(ctx.own, dy), [("x", *names) for names in call.params])
        want, got = [1 + len(names) for names in call.params], [len(part) for part in found]
        if want != got:
            raise RuntimeError(
                f"{call.where} returns (dx, gradients of the parameters) for each operation: {want} entries, got {got}."
            )
        flat = (found[0][0], *[g for part in found for g in part[1:]])
        for g, like, name in zip(flat, ctx.likes, ("x", *call.shown), strict=True):
            if g is not None:
                check_gradient(call.where, name, g, like, None, None)
        return None, *flat


def _run_in_one_piece(where: str, forward: Any, backward: Any, ops: Sequence[Any], x: Tensor, name: str) -> Tensor:
    """Run a forward in one piece over these operations. `name` is the format in which messages name a parameter, by
    its operation, its place and its own name."""
    params = [dict(op.named_parameters(recurse=False)) for op in ops]
    shown = tuple(name.format(i, j, own) for i, named in enumerate(params) for j, own in enumerate(named))
    call = _OnePiece(where, forward, backward, tuple(map(tuple, params)), shown)
    y: Tensor = _Legacy.apply(call, x, *[p for own in params for p in own.values()])  # type: ignore[no-untyped-call]
    return y


def run_legacy(op: Any, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
    if torch.compiler.is_compiling():
        why = not_compiled(type(op), OP, "set strict=False on it, to run it outside") if op.strict else ""
        if why:
            torch._dynamo.graph_break(msg=why)
        outer: Tensor = outside.call(why, run_legacy, op, x, kwargs)
        return outer
    x = x.dequantize() if isinstance(x, QTensor) else x
    where = f"{type(op).__name__}.op_backward"

    def backward(contexts: list[OperationContext], dy: Tensor) -> list[Any]:
        found = op.op_backward(contexts[0], dy)
        if isinstance(found, Mapping):
            return [found]
        if not isinstance(found, tuple) or len(found) != 2:
            raise RuntimeError(
                f"{where} returns (dx, gradients of the parameters), or a dict of gradients by name, got {found!r}."
            )
        return [(found[0], *found[1])]

    def forward(contexts: list[OperationContext], x: Tensor, params: Sequence[Tensor]) -> Tensor:
        y: Tensor = op.op_forward(contexts[0], x, **kwargs)
        return y

    return _run_in_one_piece(where, forward, backward, [op], x, "parameter {1}")


def run_fused(rule: Rule, ops: Sequence[Any], x: Tensor) -> Tensor:
    fused: Any = rule.op
    make = [fields_of(("x", *[name for name, _ in op.named_parameters(recurse=False)])) for op in ops]

    def forward(contexts: list[OperationContext], x: Tensor, params: Sequence[Tensor]) -> Tensor:
        rest, first = iter(params), (x, *[None] * (len(ops) - 1))
        inputs = [
            fields(own_x, *islice(rest, len(fields._fields) - 1)) for fields, own_x in zip(make, first, strict=True)
        ]
        y: Tensor = fused.fuser_forward(contexts, inputs)
        return y

    return _run_in_one_piece(f"{fused.__name__}.fuser_backward", forward, fused.fuser_backward, ops, x, "{0}.{2}")


def find_fused(ops: Sequence[Any], rules: Sequence[Rule]) -> tuple[int, int, Rule] | None:
    """Return (first, last, rule) of the first match of a legacy rule, or None. Its conditions get op_settings(). An
    operation with hooks is called by itself."""
    if any(GLOBAL_HOOKS) and see_operations():
        return None
    for rule in rules:
        if not rule.op.op_is_legacy:
            continue
        for first in range(len(ops) - len(rule.pattern) + 1):
            own = ops[first : first + len(rule.pattern)]
            if any(op.num_extra_inputs or op.num_extra_outputs for op in own):
                continue  # fuser_forward takes no extra inputs and returns no extra outputs
            if any(op.op_hooked or has_hooks(op) for op in own):
                continue
            settings = [op.op_settings() for op in own]
            fits = all(isinstance(op, kind) for op, kind in zip(own, rule.pattern, strict=True))
            if fits and all(condition.holds(settings) for condition in rule.conditions):
                return first, first + len(own), rule
    return None


# -- graphs ------------------------------------------------------------------------------------------------------------


def not_compiled(cls: type, names: Sequence[str], way_out: str) -> str:
    """Return the message that says why a graph ends before a class's forward in one piece."""
    kind = "legacy operation (op_forward)" if names is OP else "legacy fused operation (fuser_forward)"
    return (
        f"{cls.__name__} does not compile. octavo: this is a {kind}, and a graph cannot tell what it saves. Define "
        f"{names[0]} and {names[1]}, or {way_out}."
    )


def unsupported_if_fused(rule: Rule) -> str:
    """Return the message that says why a graph ends before this rule's operation."""
    return not_compiled(rule.op, FUSER, "leave its rule out of what is compiled")


_WHY_OUTSIDE = (
    "octavo: a forward in one piece (op_forward or fuser_forward), and a graph cannot tell what it saves; or a "
    "required fusion that was refused"
)


def _call_outside(why: str, function: Any, *arguments: Any) -> Any:
    """Run a function outside of the graph that reached it, in eager mode; raise if there is a reason not to."""
    if why:
        raise UnsupportedConfig(why)
    return function(*arguments)


outside = Untraced(_call_outside, _WHY_OUTSIDE)
