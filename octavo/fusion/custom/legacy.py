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
from octavo.fusion.custom.returned_values import check_extra_inputs, check_gradient, described, dtype_name, entries
from octavo.fusion.custom.user_layer import fields_of
from octavo.fusion.rule import Rule
from octavo.ops.operation import has_hooks
from octavo.quant import QTensor
from octavo.runtime.named_gradients import in_order


class OperationContext:
    """The place where an operation whose forward is in one piece keeps tensors for its backward.

    Octavo makes it and passes it as `ctx` to op_forward and op_backward. Any other attribute may be set on it too.

    Args:
        requires_grad: whether the call that it is made for may have a backward.

    Attributes:
        requires_grad: whether this call may have a backward. Where it is False, op_forward need not save anything.
        saved_tensors: the tensors of `save_for_backward`, in backward only.

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

    def __init__(self, requires_grad: bool = True) -> None:
        self.requires_grad = requires_grad
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
    # contexts, x, then the parameters and extra inputs of each operation; returns y and all extra outputs
    forward: Callable[[list[OperationContext], Tensor, Sequence[Tensor]], tuple[Tensor, ...]]
    # contexts, the gradients of y and of all extra outputs
    backward: Callable[..., Sequence[Sequence[Any] | Mapping[str, Any]]]
    fields: tuple[tuple[str, ...], ...]  # the names of each operation's parameters and extra inputs
    names: tuple[str, ...]  # all of them, as messages name them
    requires_grad: bool


class _Legacy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _OnePiece, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.own = call, [OperationContext(call.requires_grad) for _ in call.fields]
        ctx.likes = [(dtype_name(t.dtype), tuple(t.shape), False) for t in (x, *others)]
        made = call.forward(ctx.own, x, others)
        ctx.counts = [len(own.to_save) for own in ctx.own]
        ctx.save_for_backward(*[t for own in ctx.own for t in own.to_save])
        for own in ctx.own:
            own.to_save = ()  # autograd's ctx holds the tensors now; do not hold them twice
        ctx.mark_non_differentiable(*[t for t in made if not t.is_floating_point()])
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        call, saved = ctx.call, iter(ctx.saved_tensors)
        for own, count in zip(ctx.own, ctx.counts, strict=True):
            own.saved_tensors = tuple(next(saved) for _ in range(count))
        found = in_order(call.where, call.backward(ctx.own, *grads), [("x", *names) for names in call.fields])
        want, got = [1 + len(names) for names in call.fields], [len(part) for part in found]
        if want != got:
            raise RuntimeError(
                f"{call.where} returns dx and gradients of the parameters and extra inputs for each operation: {want} "
                f"entries, got {got}."
            )
        flat = (found[0][0], *[g for part in found for g in part[1:]])
        for g, like, name in zip(flat, ctx.likes, ("x", *call.names), strict=True):
            if g is not None:
                check_gradient(call.where, name, g, like, None, None)
        return None, *flat


def _run_in_one_piece(
    where: str, forward: Any, backward: Any, ops: Sequence[Any], x: Tensor, extra_inputs: Sequence[Sequence[Tensor]],
    name: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run a forward in one piece over these operations. Return y and all extra outputs. `name` is the format in which
    messages name an input, by its operation, its place and its own name."""
    fields = [_fields(op, extra) for op, extra in zip(ops, extra_inputs, strict=True)]
    names = tuple(name.format(i, j, own) for i, named in enumerate(fields) for j, own in enumerate(named))
    given = [t for named in fields for t in named.values()]
    requires_grad = torch.is_grad_enabled() and any([t.requires_grad for t in (x, *given)])
    call = _OnePiece(where, forward, backward, tuple(map(tuple, fields)), names, requires_grad)
    return _Legacy.apply(call, x, *given)  # type: ignore[no-untyped-call]


def _fields(op: Any, extra_inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the inputs of an operation but for x, by name."""
    check_extra_inputs(op, len(extra_inputs))
    return {**dict(op.named_parameters(recurse=False)), **{f"extra{i}": t for i, t in enumerate(extra_inputs)}}


def _checked(where: str, made: Any, counts: Sequence[int], of_each: bool) -> tuple[Tensor, ...]:
    """Return y and all extra outputs, from what a forward in one piece returned: y alone; or if there are extra outputs
    y and a tuple of them, `of_each` operation one."""
    if not any(counts):
        made = made, ((),) * len(counts)
    elif not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], tuple | list):
        raise RuntimeError(f"{where} returns y and a tuple of extra outputs, got {described(made)}.")
    elif not of_each:
        made = made[0], (made[1],)
    extra = entries(where, "extra outputs", made[1], len(counts))
    got = [len(own) for own in extra]
    if got != list(counts):
        raise RuntimeError(f"{where} returns {list(counts)} extra outputs, by operation, got {got}.")
    found = (made[0], *[t for own in extra for t in own])
    if not all([isinstance(t, Tensor) for t in found]):
        raise RuntimeError(f"{where} returns tensors, got {', '.join([described(t) for t in found])}.")
    return found


def run_legacy(
    op: Any, x: Tensor, extra_inputs: Sequence[Tensor], kwargs: dict[str, Any]
) -> Tensor | tuple[Tensor, ...]:
    """Run a legacy operation. Return y; with extra outputs a tuple of y and these."""
    if torch.compiler.is_compiling():
        why = not_compiled(type(op), OP, "set strict=False on it, to run it outside") if op.strict else ""
        if why:
            torch._dynamo.graph_break(msg=why)
        return outside.call(why, run_legacy, op, x, extra_inputs, kwargs)
    x = x.dequantize() if isinstance(x, QTensor) else x
    where = f"{type(op).__name__}.op_backward"

    def backward(contexts: list[OperationContext], *grads: Tensor) -> list[Any]:
        found = op.op_backward(contexts[0], *grads)
        if isinstance(found, Mapping):
            return [found]
        parts = 3 if extra_inputs else 2
        if not isinstance(found, tuple) or len(found) != parts:
            more = ", gradients of the extra inputs" if extra_inputs else ""
            raise RuntimeError(
                f"{where} returns (dx, gradients of the parameters{more}), or a dict of gradients by name, got "
                f"{found!r}."
            )
        return [(found[0], *[g for own in found[1:] for g in own])]

    def forward(contexts: list[OperationContext], x: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, ...]:
        extra = others[len(others) - op.num_extra_inputs :]
        made = op.op_forward(contexts[0], x, *extra, **kwargs)
        return _checked(f"{type(op).__name__}.op_forward", made, (op.num_extra_outputs,), False)

    made = _run_in_one_piece(where, forward, backward, [op], x, (extra_inputs,), "{2}")
    return made if op.num_extra_outputs else made[0]


def run_fused(
    rule: Rule, ops: Sequence[Any], x: Tensor, extra_inputs: Sequence[Sequence[Tensor]]
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """Run a legacy fused operation. Return y and the extra outputs of each operation."""
    fused: Any = rule.op
    make = [fields_of(("x", *_fields(op, extra))) for op, extra in zip(ops, extra_inputs, strict=True)]
    counts = [op.num_extra_outputs for op in ops]

    def forward(contexts: list[OperationContext], x: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rest, first = iter(others), (x, *[None] * (len(ops) - 1))
        inputs = [
            fields(own_x, *islice(rest, len(fields._fields) - 1)) for fields, own_x in zip(make, first, strict=True)
        ]
        return _checked(f"{fused.__name__}.fuser_forward", fused.fuser_forward(contexts, inputs), counts, True)

    where = f"{fused.__name__}.fuser_backward"
    y, *away = _run_in_one_piece(where, forward, fused.fuser_backward, ops, x, extra_inputs, "{0}.{2}")
    rest = iter(away)
    return y, [tuple(islice(rest, count)) for count in counts]


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
