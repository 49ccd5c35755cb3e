"""Operations, and fused ones, whose forward is in one piece: it keeps what it likes on a context, at every step. They
work in eager mode. A graph cannot tell what they save, so it ends before them: an error under fullgraph, a break where
the operation is not strict."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.errors import UnsupportedConfig
from octavo.fuser.class_checks import OP
from octavo.fuser.pattern import Rule
from octavo.layers.gradient_check import check_gradient
from octavo.layers.saved_values import dtype_name
from octavo.layers.user_op import fields_of
from octavo.quant import QTensor


class OperationContext:
    """What a legacy operation keeps between forward and backward."""

    def __init__(self) -> None:
        self.to_save: tuple[Tensor | None, ...] = ()
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.to_save = tensors


class _Legacy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Any, kwargs: dict[str, Any], count: int, x: Tensor, *params: Tensor) -> Tensor:
        ctx.op, ctx.own, ctx.count = op, OperationContext(), count
        ctx.likes = [(dtype_name(t.dtype), tuple(t.shape), False) for t in (x, *params)]
        y: Tensor = op.op_forward(ctx.own, x, **kwargs)
        ctx.save_for_backward(*ctx.own.to_save)
        ctx.own.to_save = ()  # kept there, and not here too
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        own = ctx.own
        own.saved_tensors = ctx.saved_tensors
        found = ctx.op.op_backward(own, dy)
        title = type(ctx.op).__name__
        if not isinstance(found, tuple) or len(found) != 2:
            raise RuntimeError(f"{title}.op_backward returns (dx, gradients of the parameters), got {found!r}.")
        dx, grads = found
        if len(grads) != ctx.count:
            raise RuntimeError(f"{title}.op_backward returns {ctx.count} gradients of parameters, got {len(grads)}.")
        for i, (g, like) in enumerate(zip((dx, *grads), ctx.likes, strict=True)):
            if g is not None:
                check_gradient(f"{title}.op_backward", f"parameter {i - 1}" if i else "x", g, like, None, None)
        return None, None, None, dx, *grads


def run_legacy(op: Any, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
    if torch.compiler.is_compiling():
        if op.strict:
            torch._dynamo.graph_break(msg=f"{type(op).__name__} does not compile. {_WHY}")
        found: Tensor = outside(op, x, kwargs)
        return found
    x = x.dequantize() if isinstance(x, QTensor) else x
    params = list(op.parameters(recurse=False))
    y: Tensor = _Legacy.apply(op, kwargs, len(params), x, *params)  # type: ignore[no-untyped-call]
    return y


_WHY = (
    "octavo: this operation's forward is in one piece (op_forward), so that a graph cannot tell what it saves. Define "
    f"{OP[0]} and {OP[1]}, or set strict=False on it, to run it outside."
)


@torch.compiler.disable(reason=_WHY)  # type: ignore[untyped-decorator,no-untyped-call]
def outside(op: Any, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """A legacy operation that a graph meets: an error, or eager mode."""
    if op.strict:
        raise UnsupportedConfig(f"{type(op).__name__} does not compile. {_WHY}")
    return run_legacy(op, x, kwargs)


# -- fused -------------------------------------------------------------------------------------------------------------


_WHY_FUSED = (
    "octavo: this fused operation's forward is in one piece (fuser_forward), so that a graph cannot tell what it "
    "saves. Define fuser_forward_compute and fuser_forward_save_ctx, or leave its rule out of what is compiled."
)


class _LegacyFused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fused: Any, counts: tuple[Any, ...], x: Tensor, *params: Tensor) -> Tensor:
        ctx.fused, ctx.counts, ctx.own = fused, [n for _, n in counts], [OperationContext() for _ in counts]
        rest = iter(params)
        inputs = [make(x if i == 0 else None, *[next(rest) for _ in range(n)]) for i, (make, n) in enumerate(counts)]
        y: Tensor = fused.fuser_forward(ctx.own, inputs)
        ctx.save_for_backward(*[t for own in ctx.own for t in own.to_save])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        saved = iter(ctx.saved_tensors)
        for own in ctx.own:
            own.saved_tensors = tuple(next(saved) for _ in own.to_save)
        found = ctx.fused.fuser_backward(ctx.own, dy)
        if [len(part) for part in found] != [1 + n for n in ctx.counts]:
            raise RuntimeError(
                f"{ctx.fused.__name__}.fuser_backward returns (dx, gradients of the parameters) for each operation: "
                f"{[1 + n for n in ctx.counts]} entries, got {[len(part) for part in found]}."
            )
        return None, None, found[0][0], *[g for part in found for g in part[1:]]


def find_fused(ops: Sequence[Any], rules: Sequence[Rule]) -> tuple[int, int, Rule] | None:
    """The first operations that a rule with a forward in one piece takes. Its conditions see their settings."""
    for rule in rules:
        if not rule.op.op_is_legacy:
            continue
        for first in range(len(ops) - len(rule.pattern) + 1):
            own = ops[first : first + len(rule.pattern)]
            if any(op.num_extra_inputs or op.num_extra_outputs for op in own):
                continue  # it has no place for them
            settings = [op.op_config() if hasattr(op, "op_config") else op for op in own]
            fits = all(isinstance(op, kind) for op, kind in zip(own, rule.pattern, strict=True))
            if fits and all(condition.holds(settings) for condition in rule.conditions):
                return first, first + len(own), rule
    return None


def run_fused(rule: Rule, ops: Sequence[Any], x: Tensor) -> Tensor:
    params = [dict(op.named_parameters(recurse=False)) for op in ops]
    flat = [p for own in params for p in own.values()]
    makers = tuple((fields_of(("x", *own)), len(own)) for own in params)
    y: Tensor = _LegacyFused.apply(rule.op, makers, x, *flat)  # type: ignore[no-untyped-call]
    return y


def fused_refusal(rule: Rule) -> str:
    """Why a graph ends before it."""
    return f"{rule.op.__name__} does not compile. {_WHY_FUSED}"


@torch.compiler.disable(reason=_WHY_FUSED)  # type: ignore[untyped-decorator,no-untyped-call]
def outside_for_fused(rule: Rule, ops: Sequence[Any], call: Any, *arguments: Any) -> Any:
    """`call`, which has such an operation in it, that a graph meets: an error, or eager mode."""
    if all(getattr(op, "strict", True) for op in ops):
        raise UnsupportedConfig(fused_refusal(rule))
    return call(*arguments)
