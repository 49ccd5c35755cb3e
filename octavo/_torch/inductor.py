"""Inductor's code for an operator: a call of a plain Python function, without torch's dispatcher in between.

The dispatcher takes longer to reach an operator that is written in Python than a small layer's kernels take to start.
Inductor has no public way around it, so a graph of one node proves it first.
"""

import operator as python_operators
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from octavo._torch.dispatcher import plainly
from octavo._torch.fast_paths import FastPath, Undecided, torch_version


def is_loaded() -> bool:
    """Return whether Inductor was imported: a graph that it compiles is traced with tensors without data after that."""
    return "torch._inductor.lowering" in sys.modules


def call_directly(operator: Any, factory: str, makes_intermediates: Callable[..., bool]) -> None:
    """Make Inductor's code call a function in place of `operator`, whose first argument is a list of tensors.

    `factory` is the dotted name of a function that returns the one to call. The code calls the factory once, when it is
    loaded, with the operator's other arguments and `fixed`: whether the tensors always have the same layout. It then
    passes the list of tensors alone. `makes_fresh` gets the same other arguments, and says whether all results are
    allocations of their own: Inductor takes those to be aligned, and checks no sizes.
    """
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V
    from torch._library.utils import get_layout_constraint_tag
    from torch.utils import _pytree

    class Call(ir.FallbackKernel):  # type: ignore[misc, no-any-unimported]
        """A node of Inductor's graph that calls the function."""

        @classmethod
        def create(cls, kernel: Any, *args: Any, **kwargs: Any) -> Any:
            made = super().create(kernel, *args, **kwargs)
            if makes_intermediates(*args[1:]):
                for buffer in made:  # type: ignore[attr-defined]
                    buffer.skip_size_stride_alignment_checks = True
                    # an unaligned input, such as a slice of a buffer, is no reason for the results to be
                    V.graph.unaligned_buffers.discard(buffer.name)
            return made

        def codegen(self, wrapper: Any) -> None:
            if not V.graph.cpp_wrapper:
                args, _ = self.unflatten_args(self.inputs, self.constant_args)
                name = f"call_of_{self.get_name()}"
                given = "".join(f"{value!r}, " for value in args[1:])
                wrapper.add_import_once(f"import {factory.rpartition('.')[0]}")
                wrapper.add_import_once(f"{name} = {factory}({given}fixed={_is_fixed(args[0])})")
                self.python_kernel_name = name
                self.last_used = _last_used(self, V.graph)
            super().codegen(wrapper)

        def codegen_args(self) -> Any:
            said = super().codegen_args()
            return said if V.graph.cpp_wrapper else [_handed_over(said[0], self.last_used)]

    def lower(*args: Any, **kwargs: Any) -> Any:
        return _pytree.tree_map(_boxed, Call.create(operator, *args, **kwargs))

    def _boxed(x: Any) -> Any:
        return ir.TensorBox.create(x) if isinstance(x, ir.IRNode) else x

    constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(operator, with_default=True))
    lowering.make_fallback(operator, layout_constraint=constraint, warn=False)  # type: ignore[no-untyped-call]
    lower._is_fallback_handler = True  # type: ignore[attr-defined]
    lowering.register_lowering(operator, type_promotion_kind=None)(lower)  # type: ignore[no-untyped-call]


def _last_used(node: Any, graph: Any) -> set[str]:
    """Return the inputs of the graph that no node after this one uses, as far as Inductor tells."""
    current = getattr(graph.scheduler, "current_node", None)
    if getattr(current, "node", None) is not node:
        return set()
    return set(getattr(current, "last_usage", ())) & set(graph.graph_inputs)


def _handed_over(said: str, last_used: set[str]) -> str:
    """Write the list of tensors so that nothing else refers to those that are used for the last time: the function may
    then free them."""
    for name in last_used:
        if len(re.findall(rf"\b{name}\b", said)) == 1:
            said = re.sub(rf"\b{name}\b", f"({name}, {name} := None)[0]", said)
    return said


def _is_fixed(nodes: Any) -> bool:
    """Return whether no size or stride is symbolic."""
    return all(
        not getattr(number, "free_symbols", None) for node in nodes for number in (*node.get_size(), *node.get_stride())
    )


@torch.library.custom_op("octavo::doubled", mutates_args=())
def _doubled(tensors: list[Tensor], text: str) -> list[Tensor]:
    """Return an operator for the check: it has the form of those that layers run as."""
    return [t + t for t in tensors]


@_doubled.register_fake
def _(tensors: list[Tensor], text: str) -> list[Tensor]:
    return [torch.empty_like(t) for t in tensors]


_asked: list[str] = []  # what the check's graph was given


def doubled_node(text: str, *, fixed: bool) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return the function that the check's graph calls in place of the operator."""
    _asked.append(text)
    return lambda tensors: [t + t for t in tensors]


def _check() -> str:
    """Compile one graph of one operator, twice: as Inductor does by itself, and with a direct call."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    if isinstance(V.graph, GraphLowering):  # Inductor takes one graph at a time
        raise Undecided
    with plainly():
        x = torch.arange(6, dtype=torch.float32, device="cpu").view(2, 3)
        plain = _compiled(x)([x])[0]
        call_directly(torch.ops.octavo.doubled.default, f"{__name__}.doubled_node", lambda text: True)
        _asked.clear()
        direct = _compiled(x)([x])[0]
        same = torch.equal(plain, x + x) and torch.equal(direct, plain)
    if _asked != ["check"]:
        return "Inductor's code does not call the function"
    return "" if same else "Inductor's code gives another result"


# a user's passes over graphs, which are made for a model's
_PASSES = (
    "pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)  # fmt: skip


def _compiled(x: Tensor) -> Callable[[list[Tensor]], Any]:
    """Return Inductor's code for a graph that doubles x. The compiler's counters and caches do not see it."""
    from torch._dynamo.utils import counters
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    made = graph.call_function(torch.ops.octavo.doubled.default, ([given], "check"))
    first = graph.call_function(python_operators.getitem, (made, 0))
    graph.output((first,))
    given.meta["val"] = mode.from_tensor(x)
    made.meta["val"] = [mode.from_tensor(x)]
    first.meta["val"] = made.meta["val"][0]
    counted = {name: dict(values) for name, values in counters.items()}
    try:
        with ExitStack() as stack:
            stack.enter_context(tracing(TracingContext(mode)))
            passes = {name: None for name in _PASSES if hasattr(config, name)}
            stack.enter_context(config.patch(force_disable_caches=True, cpp_wrapper=False, **passes))
            return compile_fx_inner(torch.fx.GraphModule({}, graph), [given.meta["val"]])  # type: ignore[return-value]
    finally:
        counters.clear()
        for name, values in counted.items():
            counters[name].update(values)


DIRECT_CALLS = FastPath(
    "calls of layers in Inductor's code without torch's dispatcher",
    "The code calls operators, with the same results and more host time.",
    _check,
    torch_version,
)
