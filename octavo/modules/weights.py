"""A weight's codes, kept in buffers of its module at fixed addresses.

Two uses, one storage. A *cache* spares the microbatches of a step from quantizing the same weight again: it is
refreshed in place, and remembers which version of the weight it was made from. *Held* codes are the weight itself:
nothing else of it is left.

The buffers are not persistent (a checkpoint keeps weights, not codes of them), and codes are bytes, so that
`module.half()` leaves them alone.
"""

from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import UnsupportedConfig
from octavo.layers.linear import Parts
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Given, Quantizer, as_matrix, fill_pair
from octavo.recipes import Recipe

SIDES = ("row", "column")
PARTS = ("codes", "scale", "level2")


def buffer_name(side: str, part: str) -> str:
    return f"weight_{side}_{part}"


NAMES = {side: tuple(buffer_name(side, part) for part in PARTS) for side in SIDES}


class Codes:
    """What is known of the codes in a module's buffers. Holds no tensor: buffers may be moved or replaced."""

    def __init__(self) -> None:
        self.held = False
        self.recipe: Recipe | None = None  # that they were made by; None: there are none
        self.source: tuple[int, int] | None = None  # version and address of the weight they were made from

    def parts(self, module: nn.Module, side: str) -> Parts:
        buffers = module._buffers
        return tuple(t for t in (buffers.get(name) for name in NAMES[side]) if t is not None)

    def has(self, module: nn.Module, side: str) -> bool:
        return module._buffers.get(NAMES[side][0]) is not None

    def drop(self, module: nn.Module) -> None:
        for names in NAMES.values():
            for name in names:
                module._buffers.pop(name, None)
                module._non_persistent_buffers_set.discard(name)
        self.recipe = self.source = None

    def fill(self, module: nn.Module, weight: Tensor, recipe: Recipe, given: Given, *, column: bool) -> None:
        """Quantize `weight` into the buffers, making those that are missing. A column that is there stays in use."""
        if self.recipe != recipe:
            self.drop(module)
        quant = recipe.linear()
        row_spec, column_spec = quant.fprop.right, quant.dgrad.right
        wants_column = column_spec is not None and (column or self.has(module, "column"))
        pair = (
            None if row_spec is None else self._storage(module, "row", row_spec, weight),
            self._storage(module, "column", column_spec, weight) if wants_column and column_spec else None,
        )
        self.source = None  # unknown until the cast is done
        with torch.no_grad():
            fill_pair(as_matrix(weight), pair, given)
            # a backward that still waits for the old codes must notice
            torch.autograd.graph.increment_version([t for q in pair if q is not None for t in q.tensors()])
        self.recipe, self.source = recipe, source_of(weight)

    def _storage(self, module: nn.Module, side: str, spec: Quantizer, weight: Tensor) -> QTensor:
        shape = (weight.shape[0], weight.shape[1])
        if not self.has(module, side):
            with torch.inference_mode(False):  # made there, it must still serve training
                made = spec.proto(TensorProto.of(weight.detach()), 0 if side == "column" else -1).empty()
                for name, tensor in zip(NAMES[side], made.tensors(), strict=False):
                    stored = tensor.view(torch.uint8) if name == NAMES[side][0] else tensor
                    module.register_buffer(name, stored, persistent=False)
        return spec.assemble(self.parts(module, side), shape if side == "row" else shape[::-1], weight.dtype)

    def check_fresh(self, weight: Tensor) -> None:
        if self.source != source_of(weight):
            raise UnsupportedConfig(
                f"is_first_microbatch=False uses cached codes of a weight that has changed since: they were made from "
                f"version {self.source and self.source[0]}, it is at {source_of(weight)[0]}. Pass "
                "is_first_microbatch=True once a step, or call octavo.refresh_weights(model) after the optimizer's."
            )

    def values(self, module: nn.Module, dtype: torch.dtype) -> Tensor:
        """The weight that held codes stand for."""
        assert self.recipe is not None
        spec = self.recipe.linear().fprop.right
        weight: Any = module.weight
        assert spec is not None
        return spec.assemble(self.parts(module, "row"), tuple(weight.shape), dtype).dequantize(dtype)


def source_of(weight: Tensor) -> tuple[int, int]:
    """Version and address: what changes when the weight does. Inference tensors have no version."""
    return (-1 if weight.is_inference() else weight._version), weight.data_ptr()


def token(weight: Tensor, requires_grad: bool) -> nn.Parameter:
    """A parameter of one element that looks like the weight and receives its gradient. An optimizer that writes to it
    raises: codes are not updated in place."""
    one = torch.zeros(1, dtype=weight.dtype, device=weight.device)
    return nn.Parameter(one.expand(weight.shape), requires_grad=requires_grad)
