"""Legacy operations and fused operations: their forward is one function, which saves values on a context at every
call. They work in eager mode. The compiler cannot tell what they save, so it ends the graph before them: an error under
fullgraph, a graph break if the operation is not strict."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo._torch.tracing import Untraced
from octavo.errors import UnsupportedConfig
from octavo.fusion.custom.class_checks import OP
from octavo.fusion.custom.gradient_check import check_gradient
from octavo.fusion.custom.saved_values import dtype_name
from octavo.fusion.custom.user_op import fields_of
from octavo.fusion.rule import Rule
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

        Example:
            >>> ctx = octavo.ops.OperationContext()
            >>> ctx.save_for_backward(torch.ones(2), None)
            >>> len(ctx.to_save)
            2
        """
        self.to_save = tensors


class _OnePiece(NamedTuple):
    """The functions of one call of a legacy operation, or of a fused one. Tuples have an entry for each operation."""

    where: str  # the name of its backward, for messages
    forward: Callable[[list[OperationContext], list[Any]], Tensor]
    backward: Callable[[list[OperationContext], Tensor], Sequence[Sequence[Any] | Mapping[str, Any]]]
    inputs: tuple[Callable[..., Any], ...]  # one per operation: makes its inputs from x and its parameters
    params: tuple[tuple[str, ...], ...]  # the names of each operation's parameters
    shown: tuple[tuple[str, ...], ...]  # as messages name them


class _Legacy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _OnePiece, x: Tensor, *params: Tensor) -> Tensor:
        ctx.call, ctx.own = call, [OperationContext() for _ in call.params]
        ctx.likes = [(dtype_name(t.dtype), tuple(t.shape), False) for t in (x, *params)]
        rest, first = iter(params), (x, *[None] * (len(call.params) - 1))
        parts = zip(call.inputs, first, call.params, strict=True)
        y = call.forward(ctx.own, [make(own_x, *[next(rest) for _ in names]) for make, own_x, names in parts])
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
        for g, like, name in zip(flat, ctx.likes, ("x", *[n for names in call.shown for n in names]), strict=True):
            if g is not None:
                check_gradient(call.where, name, g, like, None, None)
        return None, *flat


def run_legacy(op: Any, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
    if torch.compiler.is_compiling():
        if op.strict:
            torch._dynamo.graph_break(msg=f"{type(op).__name__} does not compile. {_WHY}")
        found: Tensor = outside.call(op, x, kwargs)
        return found
    x = x.dequantize() if isinstance(x, QTensor) else x
    params = dict(op.named_parameters(recurse=False))
    where, shown = f"{type(op).__name__}.op_backward", tuple(f"parameter {i}" for i in range(len(params)))

    def backward(contexts: list[OperationContext], dy: Tensor) -> list[Any]:
        found = op.op_backward(contexts[0], dy)
        if isinstance(found, Mapping):
            return [found]
        if not isinstance(found, tuple) or len(found) != 2:
            raise RuntimeError(
                f"{where} returns (dx, gradients of the parameters), or a dict of gradients by name, got {found!r}."
            )
        return [(found[0], *found[1])]

    call = _OnePiece(
        where, lambda contexts, inputs: op.op_forward(contexts[0], inputs[0], **kwargs), backward,
        (lambda x, *_: x,), (tuple(params),), (shown,),
    )  # fmt: skip
    y: Tensor = _Legacy.apply(call, x, *params.values())  # type: ignore[no-untyped-call]
    return y


_WHY = (
    "octavo: this is a legacy operation (op_forward), and a graph cannot tell what it saves. Define "
    f"{OP[0]} and {OP[1]}, or set strict=False on it, to run it outside."
)


def _run_outside(op: Any, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Run a legacy operation outside of the graph that reached it, in eager mode; raise if it is strict."""
    if op.strict:
        raise UnsupportedConfig(f"{type(op).__name__} does not compile. {_WHY}")
    return run_legacy(op, x, kwargs)


outside = Untraced(_run_outside, _WHY)


# -- fused -------------------------------------------------------------------------------------------------------------


_WHY_FUSED = (
    "octavo: this is a legacy fused operation (fuser_forward), and a graph cannot tell what it saves. "
    "Define fuser_forward_compute and fuser_forward_save_ctx, or leave its rule out of what is compiled."
)


def find_fused(ops: Sequence[Any], rules: Sequence[Rule]) -> tuple[int, int, Rule] | None:
    """Return (first, last, rule) of the first match of a legacy rule, or None. Its conditions get op_settings()."""
    for rule in rules:
        if not rule.op.op_is_legacy:
            continue
        for first in range(len(ops) - len(rule.pattern) + 1):
            own = ops[first : first + len(rule.pattern)]
            if any(op.num_extra_inputs or op.num_extra_outputs for op in own):
                continue  # fuser_forward takes no extra inputs and returns no extra outputs
            settings = [op.op_settings() for op in own]
            fits = all(isinstance(op, kind) for op, kind in zip(own, rule.pattern, strict=True))
            if fits and all(condition.holds(settings) for condition in rule.conditions):
                return first, first + len(own), rule
    return None


def run_fused(rule: Rule, ops: Sequence[Any], x: Tensor) -> Tensor:
    fused: Any = rule.op
    params = [dict(op.named_parameters(recurse=False)) for op in ops]
    shown = tuple(tuple(f"{i}.{name}" for name in own) for i, own in enumerate(params))
    inputs, names = tuple(fields_of(("x", *own)) for own in params), tuple(map(tuple, params))
    where = f"{fused.__name__}.fuser_backward"
    call = _OnePiece(where, fused.fuser_forward, fused.fuser_backward, inputs, names, shown)
    y: Tensor = _Legacy.apply(call, x, *[p for own in params for p in own.values()])  # type: ignore[no-untyped-call]
    return y


def unsupported_if_fused(rule: Rule) -> str:
    """Return the message that says why a graph ends before this rule's operation."""
    return f"{rule.op.__name__} does not compile. {_WHY_FUSED}"


def _call_outside(rule: Rule, ops: Sequence[Any], call: Any, *arguments: Any) -> Any:
    """Run `call`, which contains a legacy fused operation, outside of the graph; raise if all of `ops` are strict."""
    if all(getattr(op, "strict", True) for op in ops):
        raise UnsupportedConfig(unsupported_if_fused(rule))
    return call(*arguments)


outside_for_fused = Untraced(_call_outside, _WHY_FUSED)
