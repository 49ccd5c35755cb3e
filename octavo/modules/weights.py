"""A weight's codes, kept in buffers of its module at fixed addresses.

Two uses, one storage. A *cache* spares the microbatches of a step from quantizing the same weight again: it is
refreshed in place, and remembers which version of the weight it was made from. *Held* codes are the weight itself:
nothing else of it is left.

The buffers are not persistent (a checkpoint keeps weights, not codes of them), and codes are bytes, so that
`module.half()` leaves them alone.
"""

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.optim.optimizer import register_optimizer_step_pre_hook

from octavo.errors import UnsupportedConfig
from octavo.layers.linear import Parts, config, refresh
from octavo.quant.proto import TensorProto
from octavo.quant.quantizer import Quantizer
from octavo.recipes import Recipe

SIDES = ("row", "column")
PARTS = ("codes", "scale", "level2")


NAMES = {side: tuple(f"weight_{side}_{part}" for part in PARTS) for side in SIDES}


class Codes:
    """What is known of the codes in a module's buffers. Holds no tensor: buffers may be moved or replaced."""

    def __init__(self) -> None:
        self.held = False
        self.recipe: Recipe | None = None  # that they were made by; None: there are none
        self._weight: weakref.ref[Tensor] | None = None  # that they were made from,
        self._state: tuple[int, int] | None = None  # and its version and address then

    def __getstate__(self) -> dict[str, Any]:
        """A copy's weight is another tensor: its cache is cold."""
        return {**self.__dict__, "_weight": None, "_state": None}

    def parts(self, module: nn.Module, side: str) -> Parts:
        buffers = module._buffers
        return tuple(t for t in (buffers.get(name) for name in NAMES[side]) if t is not None)

    def has(self, module: nn.Module, side: str) -> bool:
        return module._buffers.get(NAMES[side][0]) is not None

    def drop(self, module: nn.Module) -> None:
        drop_buffers(module, [name for names in NAMES.values() for name in names])
        self.recipe = self._weight = self._state = None

    def fill(
        self,
        module: nn.Module,
        weight: Tensor,
        recipe: Recipe,
        *,
        column: bool,
        amaxes: Sequence[Tensor] = (),
        scaling: Sequence[Tensor] = (),
    ) -> None:
        """Quantize `weight` into the buffers, making those that are missing. A column that is there stays in use.
        Without `scaling` a delayed recipe's scale is the weight's own."""
        with as_real_as(weight):
            self._fill(module, weight, recipe, column, amaxes, scaling)

    def _fill(
        self,
        module: nn.Module,
        weight: Tensor,
        recipe: Recipe,
        column: bool,
        amaxes: Sequence[Tensor],
        scaling: Sequence[Tensor],
    ) -> None:
        if self.recipe != recipe:
            self.drop(module)
        quant = recipe.linear()
        for side, spec, wanted in (("row", quant.fprop.right, True), ("column", quant.dgrad.right, column)):
            if spec is not None and wanted and not self.has(module, side):
                self._reserve(module, side, spec, weight)
        row, column_parts = self.parts(module, "row"), self.parts(module, "column")
        self._weight = None  # unknown until the cast is done
        with torch.no_grad():
            refresh(config(f"linear(recipe={recipe.key})"), weight, row, column_parts, amaxes, scaling)
            # a backward that still waits for the old codes must notice
            torch.autograd.graph.increment_version([*row, *column_parts])
        self.recipe, self._weight, self._state = recipe, weakref.ref(weight), state_of(weight)

    def _reserve(self, module: nn.Module, side: str, spec: Quantizer, weight: Tensor) -> None:
        with torch.inference_mode(False):  # made there, it must still serve training
            made = spec.proto(TensorProto.of(weight.detach()), 0 if side == "column" else -1).empty()
            for name, tensor in zip(NAMES[side], made.tensors(), strict=False):
                stored = tensor.view(torch.uint8) if name == NAMES[side][0] else tensor
                module.register_buffer(name, stored, persistent=False)

    @property
    def is_cold(self) -> bool:
        """Whether it is not known what they were made from."""
        return self._weight is None

    def check_fresh(self, weight: Tensor) -> None:
        then, now = self._state, state_of(weight)
        if self._weight is None or self._weight() is not weight:
            what = "it is another tensor"
        elif then is not None and then != now:
            what = f"from version {then[0]} to {now[0]}" if then[0] != now[0] else "it has another storage"
        else:
            return
        raise UnsupportedConfig(
            f"is_first_microbatch=False uses cached codes of a weight that has changed since ({what}). Pass "
            "is_first_microbatch=True once a step, or call octavo.refresh_weights(model) after the optimizer's."
        )

    def values(self, module: nn.Module, dtype: torch.dtype) -> Tensor:
        """The weight that held codes stand for."""
        assert self.recipe is not None
        spec = self.recipe.linear().fprop.right
        weight: Any = module.weight
        assert spec is not None
        return spec.assemble(self.parts(module, "row"), tuple(weight.shape), dtype).dequantize(dtype)


def state_of(weight: Tensor) -> tuple[int, int]:
    """Version and address: what changes when the weight does. Inference tensors have no version."""
    return (-1 if weight.is_inference() else weight._version), weight.data_ptr()


def as_real_as(weight: Tensor) -> AbstractContextManager[Any]:
    """State of a real layer is real, also where a fake mode watches, which would leave fakes behind in it."""
    return nullcontext() if isinstance(weight, FakeTensor) else unset_fake_temporarily()


def drop_buffers(module: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        module._buffers.pop(name, None)
        module._non_persistent_buffers_set.discard(name)


# -- tokens ----------------------------------------------------------------------------------------------------------


def token(weight: Tensor) -> nn.Parameter:
    """A parameter of one element that looks like the weight, has its attributes and receives its gradient."""
    _refuse_updates()
    one = torch.zeros(1, dtype=weight.dtype, device=weight.device)
    found = nn.Parameter(one.expand(weight.shape), requires_grad=weight.requires_grad)
    found.__dict__.update(weight.__dict__)
    return found


def is_token(weight: Tensor) -> bool:
    return all(n == 1 or step == 0 for n, step in zip(weight.shape, weight.stride(), strict=True))


@cache
def _refuse_updates() -> None:
    """Optimizers raise before they write to a token. Torch's plain ones would anyway; its fused ones would write a
    whole weight over one element's memory."""

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() == 2 and p.numel() > 1 and is_token(p):
                    raise UnsupportedConfig(
                        f"A weight of {tuple(p.shape)} is held as codes (octavo.quantize_weights), which an optimizer "
                        "cannot update. Leave it out of the optimizer, or octavo.revert(model) and train the weight."
                    )

    register_optimizer_step_pre_hook(check)
