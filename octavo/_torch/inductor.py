"""Inductor's code for an operator: a call of a plain Python function, without torch's dispatcher in between.

The dispatcher takes longer to reach an operator that is written in Python than a small layer's kernels take to start.
Inductor has no public way around it, so this is done only with the versions of torch in TRIED; with others the code
calls the operator, with the same results and more of the host's time.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

TRIED = ("2.11.", "2.13.")


def is_loaded() -> bool:
    """Whether Inductor was imported: a graph that it compiles is traced with tensors without data after that."""
    return "torch._inductor.lowering" in sys.modules


def call_directly(operator: Any, factory: str, makes_fresh: Callable[..., bool]) -> None:
    """Make Inductor's code call a function in place of `operator`, whose first argument is a list of tensors.

    `factory` is the dotted name of a function that returns the one to call. The code calls the factory once, when it is
    loaded, with the operator's other arguments and `fixed`: whether the tensors always have the same layout. It then
    passes the list of tensors alone. `makes_fresh` gets the same other arguments, and says whether all results are
    allocations of their own: Inductor takes those to be aligned, and checks no sizes.
    """
    if not torch.__version__.startswith(TRIED):
        return
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V
    from torch._library.utils import get_layout_constraint_tag
    from torch.utils import _pytree

    class Call(ir.FallbackKernel):  # type: ignore[misc, no-any-unimported]
        """A node of Inductor's graph that calls the function."""

        @classmethod
        def create(cls, kernel: Any, *args: Any, **kwargs: Any) -> Any:
            made = super().create(kernel, *args, **kwargs)
            if makes_fresh(*args[1:]):
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
            super().codegen(wrapper)

        def codegen_args(self) -> Any:
            said = super().codegen_args()
            return said if V.graph.cpp_wrapper else said[:1]

    def lower(*args: Any, **kwargs: Any) -> Any:
        return _pytree.tree_map(_boxed, Call.create(operator, *args, **kwargs))

    def _boxed(x: Any) -> Any:
        return ir.TensorBox.create(x) if isinstance(x, ir.IRNode) else x

    constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(operator, with_default=True))
    lowering.make_fallback(operator, layout_constraint=constraint, warn=False)  # type: ignore[no-untyped-call]
    lower._is_fallback_handler = True  # type: ignore[attr-defined]
    lowering.register_lowering(operator, type_promotion_kind=None)(lower)  # type: ignore[no-untyped-call]


def _is_fixed(nodes: Any) -> bool:
    """Whether no size or stride is symbolic."""
    return all(
        not getattr(number, "free_symbols", None) for node in nodes for number in (*node.get_size(), *node.get_stride())
    )
