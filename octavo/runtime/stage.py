"""A call of a layer without its x, as a value."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class WantedGradients(NamedTuple):
    """The gradients that a call's backward may compute."""

    dx: bool = False
    dw: bool = False
    db: bool = False
    ds: bool = False  # of the scales of the bias


class Stage(NamedTuple):
    """One operation's part in one call: all of a layer's call but x."""

    name: str  # of the layer
    key: str  # of its config
    inputs: tuple[Any, ...]  # but for x
    buffers: tuple[Any, ...]  # that backward writes to besides its results
    needs: bool  # whether it wants any gradient
    width: int | None = None  # y's last dim; None: x's
    outputs: tuple[Any, ...] = ()  # y and side outputs, as Edges, of an operation that describes them itself
    writes_in_backward: bool = False  # backward must run for its writes, though no input takes a gradient
    unchanged: Sequence[Tensor] = ()  # tensors that must not be written to before backward
    out: Tensor | None = None  # the caller's memory for y
    after: Any = None  # called with its auxiliary outputs, once forward has run
    # of the operation's `Lookup`, by which the call cache did not find this call; None if the operation made none
    settings: tuple[Any, ...] | None = None
