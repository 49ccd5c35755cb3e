"""The contract of a differentiable layer: a frozen config, and pure functions over tensors, in one file for each layer.

`octavo.runtime` runs the contract, in eager mode and as nodes of a graph; `octavo.runtime.chain` runs several layers as
one. The functions read nothing but their arguments: no module, no global, no environment, no clock. A config holds no
tensors, and no shapes but the widths that gradients of users' operations are checked against; it crosses into a graph
as the string that `octavo.values.parse` reads back.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from octavo import values
from octavo.quant.proto import TensorProto
from octavo.runtime.gradient_targets import Writes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}  # as configs name them
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Tensors = tuple[Tensor | None, ...]


class ForwardResult(NamedTuple):
    """The results of `forward`. Those of `abstract` have a TensorProto in place of each tensor.

    Args:
        outputs: for the caller, differentiable.
        auxiliary: for the caller, without a gradient: amaxes to remember, codes of a quantized output.
        intermediates: for backward alone.
    """

    outputs: tuple[Any, ...]
    auxiliary: tuple[Any, ...]
    intermediates: tuple[Any, ...]


class Nothing(NamedTuple):
    """A tuple without fields: the default of Intermediates, Saved and Buffers."""


class Deferral(NamedTuple):
    """Two places among a layer's buffers."""

    # of an `OperandQueue`: given one, backward puts the operands of dw there, and returns None for the weight
    queue: int
    target: int  # of the memory that dw is added to in place of `.grad`; there may be none


class Layer:
    """The interface of a layer. A subclass defines the members without a default here, and has one instance,
    constructed from the layer's config and tuple classes.

    Each of `Inputs`, `Intermediates`, `Saved` and `Buffers` is a NamedTuple of tensors, None where a call has none.
    Their fields determine how many tensors cross a node.
    """

    scales: ClassVar[tuple[str, ...]] = ()  # fields of Intermediates that are scales: they leave a node flat
    forks: ClassVar[bool] = False  # both outputs are x itself: a chain passes x on, and keeps it only once

    def __init__(
        self, config: Any, inputs: Any, intermediates: Any = Nothing, saved: Any = Nothing, buffers: Any = Nothing
    ) -> None:
        self.Config = config  # a registered Value: with the tensors, it decides what a call does
        self.Inputs = inputs  # x is the first field; a field may be a tuple of tensors
        self.Intermediates = intermediates  # tensors that forward makes for backward alone
        self.Saved = saved  # tensors that backward needs
        self.Buffers = buffers  # tensors that backward writes to besides its results
        self.config: Callable[[str], Any] = lru_cache(maxsize=4096)(values.parse)  # parses a config's string
        self.title: str = config.registered_name  # for messages and reports
        LAYERS[config.registered_name] = self

    def title_of(self, config: Any) -> str:
        """Return the name of a call in reports."""
        return self.title

    # -- the four that every layer defines -----------------------------------------------------------------------------

    def forward(self, config: Any, inputs: Any) -> ForwardResult:
        """Compute the outputs. It writes to nothing but an input that is the caller's memory for y, or outside of
        graphs a running amax of x or of a weight."""
        raise NotImplementedError

    def abstract(self, config: Any, inputs: Any) -> ForwardResult:
        """Return the shapes, dtypes and strides of forward's results, from inputs that are TensorProtos."""
        raise NotImplementedError

    def save(self, config: Any, inputs: Any, made: ForwardResult) -> Tensors:
        """Select the tensors that backward needs, out of the inputs and forward's results. It creates none: a compiler
        calls it a few times, on tensors without data, and never at a step."""
        return ()

    def backward(self, config: Any, saved: Any, buffers: Any, grads: Tensors, writes: Writes | None = None) -> Tensors:
        """Return one gradient for each input, None where there is none. `grads` has one entry for each output. `writes`
        collects the writes to `buffers` until the backward of a whole chain is done; if it is None, backward writes at
        once. A layer without gradients leaves this and the next two as they are."""
        return (None,) * len(self.Inputs._fields)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def wants(self, config: Any) -> tuple[bool, ...]:
        """Return, for each input, whether backward returns its gradient."""
        return (False,) * len(self.Inputs._fields)

    def abstract_gradients(self, config: Any, saved: Any, *grads: Any) -> tuple[Any, ...]:
        """Return the shapes and dtypes of backward's results, from saved tensors and gradients without data."""
        return (None,) * len(self.Inputs._fields)

    def gradient_aliases(self, config: Any) -> dict[int, int]:
        """Map each input whose gradient is another's to that one: the gradient of the output at -1 - value, or of the
        input at value. A graph's node returns no tensor twice."""
        return {}

    def gradients_in_buffers(self, config: Any) -> dict[int, int]:
        """Map each input whose gradient lies in a buffer to the place of that buffer."""
        return {}

    def out_place(self, config: Any) -> int | None:
        """Return the place among the inputs of the caller's memory for y; None if the layer takes none."""
        return None

    def deferrable_gradients(self, config: Any) -> dict[int, "Deferral"]:
        """Map each weight whose gradient backward can leave to a later pass to the buffers that are about it."""
        return {}

    def has_backward(self, config: Any) -> bool:
        """Return whether backward has anything to do, which may be a write to a buffer alone."""
        return any(self.wants(config))

    # -- how many tensors there are ------------------------------------------------------------------------------------

    def outputs(self, config: Any) -> int:
        """Return the number of outputs: y and the side outputs."""
        return 1

    def auxiliary(self, config: Any) -> int:
        """Return the number of auxiliary outputs."""
        return 0

    def intermediates_size(self, config: Any) -> int:
        """Return the number of intermediates, with those that are None."""
        return len(self.Intermediates._fields)

    def saved_size(self, config: Any) -> int:
        """Return the number of saved tensors, with those that are None."""
        return len(self.Saved._fields)

    def buffers_size(self, config: Any) -> int:
        """Return the number of buffers, with those that are None."""
        return len(self.Buffers._fields)

    # -- graphs --------------------------------------------------------------------------------------------------------

    def graph_buffers(self, config: Any, *fields: Any) -> Any:
        """Return the buffers, from the tensors that a graph passes along: one for each field of Buffers."""
        return self.Buffers._make(fields)

    def keeps_state(self, config: Any) -> bool:
        """Return whether a call reads or writes more than its inputs and outputs, such as main_grad or running amaxes.
        If so, a user's fused operation cannot replace the layer."""
        return False

    def fills(self, config: Any) -> bool:
        """Return whether backward writes to tensors that forward made."""
        return False

    def flat_places(self, config: Any) -> tuple[int, ...]:
        """Return the places among the intermediates that are scales. A graph has them flat: the size of a scale with
        two dims is specialised for small batches."""
        return tuple(self.Intermediates._fields.index(name) for name in self.scales)

    def decided_by_layout(self, config: Any, side: str) -> bool:
        """Return whether the config and the layout of the tensors (shapes, strides, dtypes, alignment) determine all
        launches of "forward" or "backward". They do not where a user's code takes part, or where launches depend on
        which tensors of the caller overlap or are adjacent in memory."""
        return True

    def flops(self, config: Any, inputs: Any) -> int:
        """Return floating-point operations of forward's GEMMs."""
        return 0

    def gradient_flops(self, config: Any, saved: Any, *grads: Any) -> int:
        """Return floating-point operations of backward's GEMMs."""
        return 0

    # -- eager mode ----------------------------------------------------------------------------------------------------

    def forward_and_save(self, config: Any, inputs: Any, saving: bool) -> tuple[ForwardResult, Tensors]:
        """Run forward and, if `saving`, select what backward needs. A chain frees values that no stage keeps."""
        made = self.forward(config, inputs)
        return made, self.save(config, inputs, made) if saving else ()


class WeightCast(NamedTuple):
    """A cast of a weight into cached codes."""

    weight: Tensor
    row: Sequence[Tensor]  # the codes to overwrite, empty for an orientation that is not cached
    column: Sequence[Tensor]
    amaxes: Sequence[Tensor] = ()  # delayed: one tensor, of x's and w's amaxes so far, if they are observed
    scaling: Sequence[Tensor] = ()  # delayed: w's inverse scale, and if it is measured how many amaxes it has seen
    skip: Tensor | None = None  # on the device: where it is not zero, nothing is written
    all_reduced: Sequence[Tensor] = ()  # the weight's amaxes by row and by column, where they are all-reduced


class FusedStep(Protocol):
    """Run several stages of a chain at once: forward, backward or both. Where a function is None, each stage runs its
    own. The functions are those of a layer, with a list in place of each argument. A
    `octavo.fusion.rule.FusedOperation` that defines them is a FusedStep."""

    title: str
    # configs and inputs of each stage: x is the first one's, None in the others
    step_forward: Callable[[Sequence[Any], Sequence[Any]], list[ForwardResult]] | None
    # configs, saved, buffers and grads of each stage; writes. Returns the gradients of each stage: a tuple with one for
    # each input, or a dict by name
    step_backward: Callable[..., list[Any]] | None


LAYERS: dict[str, Any] = {}
"""The registry of everything that a graph calls by name: layers by the names of their configs, and fused steps.

Octavo and users register in the same way. An operation is a Layer. A fused operation is a FusedStep over stages, as
Octavo's own are, or a Layer in place of them. `octavo.fusion.custom.user_layer` has the Layers of users' functions.

Additions that the registry is designed for:

    legacy fuser_forward, extra outputs       `octavo.fusion.custom.legacy` has one call for single and fused
                                              operations, with an entry for each operation: extra inputs become fields
                                              beside its parameters, extra outputs an entry of what forward returns
    operations that emit codes                kinds of outputs in UserConfig, as it has kinds of intermediates:
                                              `returned_values` packs and counts them, auxiliary outputs carry them out
"""


def import_layers(room: str, path: Iterable[str]) -> None:
    """Import each file `*_layer.py` of a room: a layer enters LAYERS when its file is imported, and calls name it. No
    list of layers is kept, so that a new file is found."""
    for module in iter_modules(path):
        if module.name.endswith("_layer"):
            import_module(f"{room}.{module.name}")


def wanted_protos(
    dy: Any, wants: Sequence[bool], *found: tuple[tuple[int, ...], Any]
) -> tuple[TensorProto | None, ...]:
    """Describe the gradients that are wanted, of the device of dy, each by its shape and its dtype or the name of it;
    None for the others."""
    return tuple([
        TensorProto(found[i][0], DTYPES.get(found[i][1], found[i][1]), dy.device) if want else None
        for i, want in enumerate(wants)
    ])  # fmt: skip


# -- named fields as a flat list of tensors, and back: the way a node of a graph and a recorded call take them ---------


def pack(fields: Iterable[Any], tensors: list[Any]) -> str:
    """Append the tensors of these fields to a list. Return which there are: a mark for each field, "0" for None, "1"
    for a tensor, "t2" for a tuple of two."""
    marks: list[str] = []
    for field in fields:
        if field is None:
            marks.append("0")
        elif isinstance(field, tuple):
            if field:
                marks.append("t" + str(len(field)))
                tensors.extend(field)
            else:
                marks.append("t0")  # most of a call's
        else:
            marks.append("1")
            tensors.append(field)
    return ",".join(marks)


class Packing:
    """The places of each field's tensors in the list."""

    def __init__(self, marks: str) -> None:
        self.marks = marks
        self.starts: list[int] = []
        self.count = 0  # tensors of all fields
        self.singles: list[int] = []  # fields that are one tensor, the last first,
        self.single_places: list[int] = []  # and the places of these tensors
        self.places: list[int | slice | None] = []
        for mark in marks.split(",") if marks else ():
            self.starts.append(self.count)
            size = int(mark.removeprefix("t"))
            end = self.count + size
            self.places.append(slice(self.count, end) if mark[0] == "t" else self.count if size else None)
            if mark == "1":
                self.singles.insert(0, len(self.starts) - 1)
                self.single_places.insert(0, self.count)
            self.count = end

    def unpack(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the fields, from the head of the list."""
        row = tuple(tensors)
        return [None if place is None else row[place] for place in self.places]


@lru_cache(maxsize=4096)
def packing(marks: str) -> Packing:
    return Packing(marks)
