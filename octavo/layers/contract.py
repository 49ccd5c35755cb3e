"""The contract of a differentiable layer: a frozen config, and pure functions over tensors, in one file for each layer.

`octavo.lower` runs the contract, in eager mode and as nodes of a graph; `octavo.layers.chain` runs several layers as
one. The functions read nothing but their arguments: no module, no global, no environment, no clock. A config holds no
tensors, and no shapes but the widths that gradients of users' operations are checked against; it crosses into a graph
as the string that `octavo.values.parse` reads back.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from octavo import values
from octavo.wgrad.targets import Writes

C = TypeVar("C")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}  # as configs name them
NAMES = {dtype: name for name, dtype in DTYPES.items()}
Tensors = tuple[Tensor | None, ...]


class Made(NamedTuple):
    """The result of a forward. Of `abstract`, the same with a TensorProto for each tensor."""

    outputs: tuple[Any, ...]  # the caller's, differentiable
    extras: tuple[Any, ...]  # the caller's, without a gradient: amaxes to remember, codes of a quantized output
    fresh: tuple[Any, ...]  # for backward alone


class Nothing(NamedTuple):
    """No fields."""


class Layer:
    """All that a layer may be asked. A subclass defines what has no default here, and has one instance, made of the
    layer's values.

    Each of `Inputs`, `Fresh`, `Saved` and `Buffers` is a NamedTuple of tensors, None where a call has none. How many
    tensors cross a node follows from their fields.
    """

    scales: ClassVar[tuple[str, ...]] = ()  # fields of Fresh that are scales: they leave a node flat
    forks: ClassVar[bool] = False  # the second output is x itself
    takes_memory: ClassVar[bool] = False  # `Inputs.out` and `Buffers.dgrad_out` are the caller's memory for y and dx

    def __init__(
        self, config: Any, inputs: Any, fresh: Any = Nothing, saved: Any = Nothing, buffers: Any = Nothing
    ) -> None:
        self.Config = config  # a registered Value: all that decides what a call does, but for its tensors
        self.Inputs = inputs  # x is the first field; a field may be a tuple of tensors
        self.Fresh = fresh  # tensors that forward makes for backward alone
        self.Saved = saved  # tensors that backward needs
        self.Buffers = buffers  # tensors that backward writes to besides its results
        self.config: Callable[[str], Any] = _reader(config)  # parses a config's string, and remembers
        LAYERS[config.registered_name] = self

    # -- the four that every layer defines -----------------------------------------------------------------------------

    def forward(self, config: Any, inputs: Any) -> Made:
        """Compute the outputs. It writes to nothing but an input that is the caller's memory for y, or outside of
        graphs a running amax of x or of a weight."""
        raise NotImplementedError

    def abstract(self, config: Any, inputs: Any) -> Made:
        """The shapes, dtypes and strides that forward would make, from inputs that are TensorProtos."""
        raise NotImplementedError

    def save(self, config: Any, inputs: Any, made: Made) -> Tensors:
        """Select the tensors that backward needs, out of inputs and what forward made. It makes none: a compiler asks a
        few times, on tensors without data, and never at a step."""
        return ()

    def backward(self, config: Any, saved: Any, buffers: Any, grads: Tensors, writes: Writes | None = None) -> Tensors:
        """One gradient for each input, None where there is none. `grads` has one entry for each output. `writes` takes
        what is to be written to `buffers`, until a whole chain is through; None: it is written here."""
        raise NotImplementedError

    # -- gradients -----------------------------------------------------------------------------------------------------

    def wants(self, config: Any) -> tuple[bool, ...]:
        """Whether backward returns a gradient, for each input."""
        raise NotImplementedError

    def abstract_gradients(self, config: Any, saved: Any, *grads: Any) -> tuple[Any, ...]:
        """The shapes and dtypes that backward would return, from saved tensors and gradients without data."""
        raise NotImplementedError

    def passed(self, config: Any) -> dict[int, int]:
        """Inputs whose gradient is another tensor: that of the output at -1 - value, or of the input at value. A
        graph's node returns no tensor twice."""
        return {}

    def returned_elsewhere(self, config: Any) -> dict[int, int]:
        """Inputs whose gradient lies in one of the buffers, by the buffer's place."""
        return {}

    def has_backward(self, config: Any) -> bool:
        """Whether backward has anything to do, which may be a write to a buffer alone."""
        return any(self.wants(config)) or config.grads != ""

    # -- how many tensors there are ------------------------------------------------------------------------------------

    def outputs(self, config: Any) -> int:
        """The number of outputs: y, and those that the layer gives away besides."""
        return 1

    def extras(self, config: Any) -> int:
        """The number of extras."""
        return 0

    def fresh_size(self, config: Any) -> int:
        """The number of fresh tensors, with those that are None."""
        return len(self.Fresh._fields)

    def saved_size(self, config: Any) -> int:
        """The number of saved tensors, with those that are None."""
        return len(self.Saved._fields)

    def buffers_size(self, config: Any) -> int:
        """The number of buffers, with those that are None."""
        return len(self.Buffers._fields)

    def inputs_of(self, config: Any, fields: Sequence[Any]) -> Any:
        """The layer's Inputs, of these fields."""
        return self.Inputs._make(fields)

    # -- graphs --------------------------------------------------------------------------------------------------------

    def graph_buffers(self, config: Any, *fields: Any) -> Any:
        """The buffers, from the tensors that a graph passes along: one for each field of Buffers."""
        return self.Buffers._make(fields)

    def fills(self, config: Any) -> bool:
        """Whether backward writes to tensors that forward made."""
        return False

    def flat_places(self, config: Any) -> tuple[int, ...]:
        """The places among the fresh tensors that are scales. A graph has them flat: the size of a scale with two dims
        is specialised for small batches."""
        return tuple(self.Fresh._fields.index(name) for name in self.scales)

    def decided_by_layout(self, config: Any, side: str) -> bool:
        """Whether the config and the layout of the tensors (shapes, strides, dtypes, alignment) decide all that
        "forward" or "backward" launches: not where a user's code takes part, or where it depends on which tensors of
        the caller overlap, or follow each other in memory."""
        return True

    def flops(self, config: Any, inputs: Any) -> int:
        """Floating-point operations of forward's GEMMs."""
        return 0

    def gradient_flops(self, config: Any, saved: Any, *grads: Any) -> int:
        """Floating-point operations of backward's GEMMs."""
        return 0

    # -- eager mode ----------------------------------------------------------------------------------------------------

    def forward_and_save(self, config: Any, inputs: Any, saving: bool) -> tuple[Made, Tensors]:
        """Forward, and what backward needs if it is `saving`, at once. A chain lets go of values that nothing keeps."""
        made = self.forward(config, inputs)
        return made, self.save(config, inputs, made) if saving else ()


class WeightLayer(Layer):
    """A layer with a weight that recipes quantize: the weight may arrive as codes, and dw may be computed later."""

    def abstract_weight(self, config: Any, weight: Any) -> tuple[Any, Any]:
        """Row and column codes of a weight, without data; None for an orientation that the recipe does not use."""
        raise NotImplementedError

    def weight_values(self, config: Any, row: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The weight that row codes stand for."""
        raise NotImplementedError

    def refresh(
        self, config: Any, weight: Tensor, row: Sequence[Tensor], column: Sequence[Tensor], amaxes: Sequence[Tensor],
        scaling: Sequence[Tensor], skip: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Overwrite cached codes of a weight, unless `skip`, on the device, says not to. Delayed: `scaling` is w's
        multiplier, and if it is measured what it has seen; `amaxes` those of x and w so far, if they are observed."""
        raise NotImplementedError

    def posted_operands(self, config: Any, mail: tuple[Tensor, ...], x: tuple[Tensor, ...], weight: Tensor) -> Any:
        """The operands of a dw that a graph put off, from what it posted; from `x` where no codes of it were made."""
        raise NotImplementedError

    def weight_gradient(self, config: Any, operands: Any, target: Any, writes: Writes | None = None) -> Tensor | None:
        """dw from its operands: a tensor, or what stands for one that goes to the buffers of `target`."""
        raise NotImplementedError


LAYERS: dict[str, Any] = {}  # by the registered name of their configs


def _reader(kind: type[C]) -> Callable[[str], C]:
    """A function that parses a config's string, and remembers."""

    @lru_cache(maxsize=4096)
    def config(key: str) -> C:
        found = values.parse(key)
        assert isinstance(found, kind)
        return found

    return config
