"""Operations that compute little or nothing: Identity, Reshape, AddExtraInput, MakeExtraOutput."""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedShape
from octavo.ops import fork_layer
from octavo.ops.add_layer import Config
from octavo.ops.inputs import check_input, numbers, values_of, wanted_gradients
from octavo.ops.operation import Edge, FusibleOperation
from octavo.ops.settings import Settings
from octavo.quant import QTensor
from octavo.quant.qtensor import Join
from octavo.runtime.call import Stage
from octavo.runtime.contract import DTYPE_NAMES

T = TypeVar("T")


class Identity(FusibleOperation, nn.Module):
    """Return x itself, a QTensor too. In a Sequential it keeps its neighbours from being fused with each other.

    Example:
        >>> x = torch.ones(2, 3)
        >>> octavo.ops.Identity()(x) is x
        True
    """

    op_is_elementwise = True

    def forward(self, input: T) -> T:
        """Return x.

        Args:
            input: x, of any kind.

        Returns:
            x itself.
        """
        return input

    def why_not_fusible(self, x: Any) -> str:
        return "it is x itself"

    def op_makes_node(self) -> bool:
        return False


class Reshape(FusibleOperation, nn.Module):
    """Reshape x. y is a view where x's strides allow one.

    Args:
        shape: the new sizes; -1 stands for one that follows from the others.

    Example:
        >>> octavo.ops.Reshape((2, -1))(torch.ones(4, 6)).shape
        torch.Size([2, 12])
    """

    def __init__(self, shape: int | tuple[int, ...]) -> None:
        super().__init__()
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)

    def forward(self, input: Tensor | QTensor) -> Tensor:
        """Return x in the new shape.

        Args:
            input: x. A QTensor is dequantized.

        Returns:
            A view of x, or a copy where its strides allow no view.

        Raises:
            RuntimeError: x has another number of elements.
        """
        return values_of(input).reshape(self.shape)

    def why_not_fusible(self, x: Any) -> str:
        return "it is a view"

    def op_makes_node(self) -> bool:
        return False

    def extra_repr(self) -> str:
        return f"{self.shape}"


class AddExtraInput(FusibleOperation, Settings, nn.Module):
    """Add a second tensor to x, such as a residual: y = x + extra. Call it with (x, extra).

    Args:
        in_place: False by default: y is an intermediate. True writes the sum to the extra tensor and returns that; the
            operation then joins no run.
        source: the channel of the Sequential that the extra tensor comes from, such as that of a `MakeExtraOutput`.
            None, the default, takes it from the caller.

    Example:
        >>> octavo.ops.AddExtraInput()(torch.ones(2), torch.tensor([1.0, 2.0]))
        tensor([2., 3.])
        >>> block = octavo.Sequential(
        ...     octavo.ops.MakeExtraOutput(channel="residual", output_to_caller=False),
        ...     octavo.ops.ConstantScale(3.0),
        ...     octavo.ops.AddExtraInput(source="residual"),
        ... )
        >>> block(torch.ones(2))
        tensor([4., 4.])
    """

    num_extra_inputs = 1
    op_is_elementwise = True
    _setting_names = ("in_place",)
    op_layer_config = Config

    def __init__(self, *, in_place: bool = False, source: str | None = None) -> None:
        super().__init__()
        self.in_place = in_place
        self._derive_from_settings()
        if source is not None:
            self.set_extra_input_channel(0, source)

    def _checked_setting(self, name: str, value: Any) -> Any:
        channels = self._channels("_input_channels")
        if value and channels:
            raise UnsupportedConfig(
                f"AddExtraInput(in_place=True) writes to its extra input, which is the channel {channels[0].name!r}, a "
                "value that other operations read. Leave in_place False."
            )
        return value

    def _derive_from_settings(self) -> None:
        super()._derive_from_settings()
        self.op_writes_extra = self.in_place

    def forward(self, input: Tensor | QTensor, extra: Tensor | QTensor) -> Tensor:
        """Return the sum of x and the extra tensor.

        Args:
            input: x, in float32, bfloat16 or float16. A QTensor is dequantized.
            extra: a tensor of x's shape, in one of these dtypes. With in_place it receives the sum.

        Returns:
            y of x's shape and dtype; the extra tensor itself with in_place.

        Raises:
            UnsupportedShape: the shapes differ.
            UnsupportedDtype: a tensor has another dtype.
            UnsupportedDevice: the tensors are on two devices.
            UnsupportedConfig: in_place is True and extra is a QTensor.
        """
        if self.in_place and isinstance(extra, QTensor):
            raise UnsupportedConfig(
                f"AddExtraInput(in_place=True) writes the sum to the extra tensor, and {extra!r} is codes, which would "
                "stay as they are. Pass extra.dequantize(), or leave in_place out."
            )
        x, added = values_of(input), values_of(extra)
        if self.in_place:
            self._check(x, added)
            return added.add_(x)
        return self.op_run(x, added)

    def _check(self, x: Tensor | Edge, extra: Tensor | Edge) -> None:
        check_input("AddExtraInput", x)
        check_input("AddExtraInput", extra, "the extra input")
        if x.shape and extra.shape and tuple(x.shape) != tuple(extra.shape):
            raise UnsupportedShape(
                f"AddExtraInput adds tensors of one shape, got {numbers(x)} and {numbers(extra)}. Expand "
                "the smaller one."
            )
        if x.device != extra.device:
            raise UnsupportedDevice(f"x is on {x.device} and the extra input on {extra.device}. Move them together.")

    def why_not_fusible(self, x: Any) -> str:
        return "in_place=True writes to the caller's tensor" if self.in_place else ""

    def op_makes_node(self) -> bool:
        return not self.in_place

    def op_stage(self, x: Any, extra_inputs: tuple[Any, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        extra = values_of(extra_inputs[0])
        self._check(x, extra)
        dx, dextra = wanted_gradients(x.requires_grad, extra)
        dtypes = f"dtype='{DTYPE_NAMES[x.dtype]}',extra_dtype='{DTYPE_NAMES[extra.dtype]}'"
        return Stage("add", f"add({dtypes},wants_dx={dx},wants_dextra={dextra})", (extra,), (), dx or dextra)

    def extra_repr(self) -> str:
        return f"in_place={self.in_place}"


class MakeExtraOutput(FusibleOperation, nn.Module):
    """Return x twice, as its output and as an extra output, such as the start of a residual branch.

    Both share x's memory. dx is the sum of both gradients.

    Args:
        in_place: has no effect, since no gradient is overwritten. It is accepted so that code for other libraries runs.
        channel: the name by which later operations of the Sequential take the extra output, such as
            `AddExtraInput(source=...)`. None, the default, returns it to the caller alone.
        output_to_caller: True by default: the caller of the Sequential gets the extra output too. False keeps it
            inside.

    Example:
        >>> y, extra = octavo.ops.MakeExtraOutput()(torch.ones(2))
        >>> torch.equal(y, extra)
        True
    """

    num_extra_outputs = 1
    op_forks = True
    op_layer_config = fork_layer.Config
    op_is_elementwise = True

    def __init__(self, *, in_place: bool = False, channel: str | None = None, output_to_caller: bool = True) -> None:
        super().__init__()
        self.in_place = in_place
        if channel is not None:
            self.set_extra_output_channel(0, channel, output_to_caller)

    def forward(self, input: T) -> tuple[T, T]:
        """Return x and x.

        Args:
            input: x, a Tensor or a QTensor.

        Returns:
            y and the extra output, which share x's memory.
        """
        x = input
        if not isinstance(x, Tensor) or not (x.requires_grad and torch.is_grad_enabled()):
            return x, x
        # Views have their own gradients, so autograd sums the uses of the extra output first, then adds the gradient of
        # y, then those of other uses of x, as inside a run. A compiler sends a plain view's gradient past the graph.
        y: Any = x.view_as(x)
        extra = Join.apply(x, y) if torch.compiler.is_compiling() else y.view_as(y)  # type: ignore[no-untyped-call]
        return y, extra

    def op_makes_node(self) -> bool:
        return False

    def op_stage(self, x: Any, extra_inputs: tuple[Any, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        key = f"fork(leads={x.leads},wants_dx={x.requires_grad})"
        y = x._replace(leads=False, made_by="")
        return Stage("fork", key, (), (), x.requires_grad, outputs=(y, y))
