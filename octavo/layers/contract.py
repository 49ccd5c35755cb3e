"""What a differentiable layer is: a frozen config and four pure functions over tensors, in one file.

    forward (config, inputs)                   -> Made: outputs, extras, fresh
    protos  (config, inputs without data)      -> the same, data-free
    save    (config, inputs, made)             -> the tensors backward needs, out of inputs and made
    backward(config, saved, buffers, grads)    -> one gradient for each input, None where there is none

`inputs` is the layer's own NamedTuple, None for what a call does not have. `grads` has one entry for each output.
`buffers` is a NamedTuple of what backward writes besides its results, in place: a gradient buffer to add to, a running
amax, a random counter. Forward never sees them; all it may write to is an input that is the caller's memory for y, or
outside of graphs a running amax of x or of a weight.

A graph asks for more, all of it without data: `gradient_protos` (what backward returns, given one for each output),
`wants` (which inputs have a gradient), `flat_places` (which fresh tensors are scales), `graph_buffers` (buffers from
plain tensors), `fills` (whether backward writes to what forward made), `returned_elsewhere` (inputs whose gradient is
one of the buffers), `passed` (inputs whose gradient is that of an output, or of another input), `flops` and
`gradient_flops`. A chain of layers (`octavo.layers.chain`) also asks for `counts`, and the driver whether `forward` or
`backward` `replays`: whether it may be put on a tape (`octavo.lower.tape`), as it may not where somebody else's code
takes part, or where it asks how memory of the caller's lies.

These functions read nothing but their arguments: no module, no global, no environment, no clock. A config holds no
tensors, and no shapes but the widths that gradients of somebody else's operations are checked against; it crosses into
a graph as the string that `octavo.values.parse` reads back. `octavo.lower` runs
the contract, in eager mode and elsewhere.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from octavo import values

C = TypeVar("C")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}  # as configs say them
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def reader(kind: type[C]) -> Callable[[str], C]:
    """A layer's `config`: the config whose string this is, remembered."""

    @lru_cache(maxsize=4096)
    def config(key: str) -> C:
        found = values.parse(key)
        assert isinstance(found, kind)
        return found

    return config


class Made(NamedTuple):
    """What forward made. Of `protos`, the same with a TensorProto for each tensor."""

    outputs: tuple[Any, ...]  # the caller's, differentiable
    extras: tuple[Any, ...]  # the caller's, without a gradient: amaxes to remember, codes of a quantized output
    fresh: tuple[Any, ...]  # for backward alone


class Counts(NamedTuple):
    """How many entries a layer's tuples have."""

    extras: int
    fresh: int
    saved: int
    buffers: int


class Layer(Protocol):
    """A module of `octavo.layers`."""

    Inputs: Any  # the NamedTuple of its inputs

    def forward(self, config: Any, inputs: Any) -> Made: ...

    def protos(self, config: Any, inputs: Any) -> Made: ...

    def returned_elsewhere(self, config: Any) -> dict[int, int]: ...

    def replays(self, config: Any, side: str) -> bool: ...

    def save(self, config: Any, inputs: Any, made: Made) -> tuple[Tensor | None, ...]: ...

    def backward(
        self, config: Any, saved: tuple[Tensor | None, ...], buffers: Any, grads: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]: ...
