"""Operations that compute little or nothing: Identity, Reshape, AddExtraInput, MakeExtraOutput."""

from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedShape
from octavo.fuser.inputs import check_input
from octavo.fuser.operation import Edge, FusibleOperation
from octavo.layers import fork
from octavo.layers.add import Config
from octavo.layers.contract import DTYPE_NAMES
from octavo.lower.call import Stage
from octavo.modules.activation import numbers, values_of
from octavo.quant import QTensor
from octavo.quant.qtensor import Join
from octavo.values import Value


class Identity(FusibleOperation, nn.Module):
    """Returns x."""

    def forward(self, input: Any) -> Any:
        return input

    def why_not_fusible(self, x: Any) -> str:
        return "it is x itself"

    def op_makes_node(self) -> bool:
        return False


class Reshape(FusibleOperation, nn.Module):
    """Reshapes x; -1 is inferred from the other sizes. y is a view where x's strides allow one."""

    def __init__(self, shape: int | tuple[int, ...]) -> None:
        super().__init__()
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = values_of(input).reshape(self.shape)
        return found

    def why_not_fusible(self, x: Any) -> str:
        return "it is a view"

    def op_makes_node(self) -> bool:
        return False

    def extra_repr(self) -> str:
        return f"{self.shape}"


class AddExtraInput(FusibleOperation, nn.Module):
    """Adds an extra input of x's shape to x. With `source`, the extra input is the channel of that name. With
    `in_place`, torch writes the sum to the extra tensor."""

    num_extra_inputs = 1

    def __init__(self, *, in_place: bool = False, source: str | None = None) -> None:
        super().__init__()
        self.in_place = self.op_writes_extra = in_place
        if source is not None:
            self.set_extra_input_channel(0, source)

    def forward(self, input: Tensor, extra: Tensor | Any) -> Tensor:
        if self.in_place and isinstance(extra, QTensor):
            raise UnsupportedConfig(
                f"AddExtraInput(in_place=True) writes the sum to the extra tensor, and {extra!r} is codes, which would "
                "stay as they are. Pass extra.dequantize(), or leave in_place out."
            )
        x, extra = values_of(input), values_of(extra)
        if self.in_place:
            self._check(x, extra)
            written: Tensor = extra.add_(x)
            return written
        y: Tensor = self.op_run(x, extra)
        return y

    def _check(self, x: Tensor | Edge, extra: Tensor | Edge) -> None:
        check_input("AddExtraInput", x)
        check_input("the extra input", extra)
        if x.shape and extra.shape and tuple(x.shape) != tuple(extra.shape):
            raise UnsupportedShape(
                f"AddExtraInput adds tensors of one shape, got {numbers(x)} and {numbers(extra)}. Expand "
                "the smaller one."
            )
        if x.device != extra.device:
            raise UnsupportedDevice(f"x is on {x.device} and the extra input on {extra.device}. Move them together.")

    @classmethod
    def op_matches(cls, config: Value) -> bool:
        return isinstance(config, Config)

    def why_not_fusible(self, x: Any) -> str:
        return "in_place=True writes to the caller's tensor" if self.in_place else ""

    def op_makes_node(self) -> bool:
        return not self.in_place

    def op_stage(self, x: Tensor | Edge, extras: tuple[Any, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        extra = values_of(extras[0])
        self._check(x, extra)
        grads = _grads(x.requires_grad, extra)
        return Stage("add", _key(x.dtype, extra, grads), (extra,), (), grads != "")

    def extra_repr(self) -> str:
        return f"in_place={self.in_place}"


def _grads(x: bool, extra: Tensor | Edge) -> str:
    if not torch.is_grad_enabled():
        return ""
    return ("x" if x else "") + ("e" if extra.requires_grad else "")


def _key(dtype: torch.dtype, extra: Tensor | Edge, grads: str) -> str:
    return f"add(dtype='{DTYPE_NAMES[dtype]}',extra_dtype='{DTYPE_NAMES[extra.dtype]}',grads='{grads}')"


class MakeExtraOutput(FusibleOperation, nn.Module):
    """Returns x twice: as its output and as an extra output; dx is the sum of both gradients. With `channel`, other
    operations of the Sequential can take the extra output by that name, and `output_to_caller` says whether the caller
    gets it too. `in_place` has no effect, since no gradient is overwritten here; it keeps code for other libraries
    running."""

    num_extra_outputs = 1
    op_forks = True

    def __init__(self, *, in_place: bool = False, channel: str | None = None, output_to_caller: bool = True) -> None:
        super().__init__()
        self.in_place = in_place
        if channel is not None:
            self.set_extra_output_channel(0, channel, output_to_caller)

    def forward(self, input: Any) -> Any:
        x = input
        if not isinstance(x, Tensor) or not (x.requires_grad and torch.is_grad_enabled()):
            return x, x
        # Views have their own gradients, so autograd sums the uses of the extra output first, then adds the gradient of
        # y, then those of other uses of x, as inside a run. A compiler sends a plain view's gradient past the graph.
        y = x.view_as(x)
        extra = Join.apply(x, y) if torch.compiler.is_compiling() else y.view_as(y)  # type: ignore[no-untyped-call]
        return y, extra

    def op_makes_node(self) -> bool:
        return False

    def op_stage(self, x: Any, extras: tuple[Any, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        key = f"fork(leads={x.leads},grads='{'x' if x.requires_grad else ''}')"
        y = x._replace(leads=False)
        return Stage("fork", key, (), (), x.requires_grad, outputs=(y, y))

    @classmethod
    def op_matches(cls, config: Value) -> bool:
        return isinstance(config, fork.Config)
