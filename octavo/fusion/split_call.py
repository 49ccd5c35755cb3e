"""`SplitCall`: the three functions of one call of an operation, forward, save and backward, for code that runs backward
itself. They are those that autograd's node runs (`octavo.runtime.eager`), and in a graph the two operators."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from octavo._torch.autograd import preserve_version_counter
from octavo._torch.tracing import while_tracing
from octavo.errors import UnsupportedConfig, UnsupportedDtype, UnsupportedShape
from octavo.fusion.custom.custom_plan import as_it_is, sketch
from octavo.ops.inputs import check_layout
from octavo.ops.operation import Edge, FusibleOperation
from octavo.quant.proto import TensorProto
from octavo.runtime.call import Stage, takes_nodes
from octavo.runtime.contract import LAYERS, ForwardResult
from octavo.runtime.graph_nodes import backward_node, forward_node
from octavo.text import plural


class SplitCall:
    """One call of an operation as three functions: forward, save and backward, without autograd.

    It is for schedules that run backward by hand: pipelines that keep what was saved, gradients that are exchanged
    before they are used, an autograd function of your own around several operations. The functions read nothing but
    their arguments and the state that the call was made with, and compute the bits that the operation computes with
    autograd, in eager mode and in graphs. None of them makes an autograd graph.

    Make a new SplitCall for each forward: delayed scales, a cached weight and main_grad are looked up here. Between
    forward and backward nobody may write to what was saved; autograd checks that, and these functions do not.

    Args:
        op: an `octavo.Linear`, an `octavo.GroupedLinear`, or another operation of `octavo.ops` or of your own.
        x: the input, or a tensor like it. Call forward with `inputs._replace(x=…)` for another of its dtype.
        *extra_inputs: the operation's extra inputs, such as the sizes of groups.
        dx: whether backward computes the gradient of x. Those of parameters and extra inputs follow `requires_grad`.
        **kwargs: keywords of the operation's call, such as `is_first_microbatch`.

    Attributes:
        inputs: the inputs by name: x, then those of the operation, such as weight and bias.
        wants: whether backward returns a gradient, for each input, by the same names.

    Raises:
        UnsupportedConfig: the operation has no functions of its own, as a Sequential has none; it works over ranks; or
            torch.autocast would cast x.

    Example:
        >>> layer = octavo.Linear(16, 8, recipe="fp8-current")
        >>> x, dy = torch.ones(4, 16), torch.ones(4, 8)
        >>> call = octavo.ops.SplitCall(layer, x)
        >>> made = call.forward(call.inputs)
        >>> saved = call.save(call.inputs, made)
        >>> gradients = call.backward(saved, dy)
        >>> made.outputs[0].shape, gradients.x.shape, gradients.weight.shape
        (torch.Size([4, 8]), torch.Size([4, 16]), torch.Size([8, 16]))
    """

    def __init__(self, op: nn.Module, x: Tensor, *extra_inputs: Tensor, dx: bool = True, **kwargs: object) -> None:
        if why := _unsupported(op, x):
            raise UnsupportedConfig(why)
        own: Any = op
        unknown = [name for name in kwargs if name not in own.op_keywords]
        if unknown:
            takes = ", ".join(own.op_keywords) or "none"
            raise TypeError(f"{type(op).__name__} takes these keywords in a SplitCall: {takes}. Got {unknown[0]!r}.")
        check_layout(type(op).__name__, x)
        self._as_nodes = takes_nodes((op,))
        # gradients follow requires_grad, whether or not autograd is on around this call
        with torch.enable_grad():
            like = Edge(tuple(x.shape), x.dtype, x.device, bool(dx and x.is_floating_point()), leads=True)
            stage: Stage = own.op_stage(like, extra_inputs, kwargs, self._as_nodes)
        if self._as_nodes and (stage.out is not None or stage.after is not None):
            raise UnsupportedConfig(
                f"In a graph, a SplitCall of {type(op).__name__} takes no memory of the caller's and defers no weight "
                "gradient. Leave out and delay_wgrad_compute out, or run it in eager mode."
            )
        self._stage = stage
        self._layer = LAYERS[stage.name]
        fields = [x, *stage.inputs]
        if stage.out is not None:
            fields[self._layer.out_place(self._config)] = stage.out
        self.inputs = self._layer.Inputs._make(fields)
        self.wants = self._layer.Inputs._make(_answer(stage.name, stage.key, "wants"))
        self._outputs_seen: set[tuple[Any, ...]] = set()  # shapes and dtypes of outputs, in eager mode

    @property
    def _config(self) -> Any:
        return self._layer.config(self._stage.key)

    def forward(self, inputs: tuple[Any, ...]) -> ForwardResult:
        """Compute the outputs. Delayed scaling's running amaxes of x and of the weight are raised in place.

        Args:
            inputs: named inputs, `self.inputs` or a copy of it with other tensors.

        Returns:
            A named tuple of `outputs` (y, then extra outputs), `auxiliary` and `intermediates`, tensors that `save`
            chooses from.

        Raises:
            TypeError: `inputs` are none of this call's.
            UnsupportedShape, UnsupportedDtype: x has another width, dtype or device than that of this call.

        Example:
            See `octavo.ops.SplitCall`.
        """
        if not isinstance(inputs, type(self.inputs)):
            raise TypeError(
                f"forward takes the named inputs of this call, got {type(inputs).__name__}. Pass call.inputs, or "
                "call.inputs._replace(x=...)."
            )
        with torch.no_grad():
            if not self._as_nodes:
                self._check_x(inputs[0])
                made: ForwardResult = self._layer.forward(self._config, inputs)
                self._outputs_seen.add(_described(made.outputs))
                return made
            found = iter(forward_node(self._stage, inputs))
            marks, _ = _selection(self._stage.name, self._stage.key, _sketches(inputs))
            return ForwardResult(*[tuple([next(found) if is_there else None for is_there in own]) for own in marks])

    def _check_x(self, x: Any) -> None:
        """Refuse an x that the operation would have refused when the call was made."""
        own = self.inputs[0]
        if not isinstance(x, Tensor) or x.dtype != own.dtype or x.device != own.device:
            found = f"{x.dtype} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
            raise UnsupportedDtype(
                f"This SplitCall was made for x in {own.dtype} on {own.device}, got {found}. "
                "Make another SplitCall for it."
            )
        if x.shape[-1:] != own.shape[-1:]:
            raise UnsupportedShape(
                f"This SplitCall was made for x [..., {own.shape[-1]}], got {tuple(x.shape)}. "
                "Make another SplitCall for it."
            )

    def save(self, inputs: tuple[Any, ...], made: ForwardResult) -> tuple[Any, ...]:
        """Select the tensors that backward needs. It computes nothing.

        Args:
            inputs: those of forward.
            made: what forward returned.

        Returns:
            A tuple of tensors, None where the call needs none. A layer's own fields have names; those of Linear are
            x_codes, x_scale, w_codes and so on.

        Example:
            See `octavo.ops.SplitCall`.
        """
        if not self._as_nodes:
            return self._layer.save(self._config, inputs, made)
        _, places = _selection(self._stage.name, self._stage.key, _sketches(inputs))
        groups = _flat(inputs), made.outputs, made.auxiliary, made.intermediates
        found = [None if place is None else groups[place[0]][place[1]] for place in places]
        named = self._layer.Saved
        return named._make(found) if len(named._fields) == len(found) else tuple(found)

    def backward(self, saved: Sequence[Any], *grads: Tensor) -> tuple[Any, ...]:
        """Compute the gradients. What a call of the layer writes besides is written: main_grad, the running amax of dy,
        the counter of stochastic rounding, the queue of `backward_dw()`.

        Args:
            saved: what `save` returned.
            *grads: the gradient of each output: dy, then those of extra outputs.

        Returns:
            The gradients by the names of `inputs`, None where there is none. They are not added to `.grad`.

        Raises:
            TypeError: there is not one gradient for each output.
            UnsupportedShape: in eager mode, a gradient has not the shape and dtype of its output.

        Example:
            See `octavo.ops.SplitCall`.
        """
        layer, stage = self._layer, self._stage
        outputs = _answer(stage.name, stage.key, "outputs")
        if len(grads) != outputs or not all([isinstance(g, Tensor) for g in grads]):
            raise TypeError(
                f"This call has {plural(outputs, 'output')}, and backward takes a tensor as the gradient of each, got "
                f"{len(grads)} arguments. Pass zeros for an output that is not used."
            )
        if self._outputs_seen and _described(grads) not in self._outputs_seen:
            wanted = " or ".join(sorted({str(own) for own in self._outputs_seen}))
            raise UnsupportedShape(
                f"The gradients have the shapes and dtypes {_described(grads)}, and the outputs of this call {wanted}. "
                "Pass a gradient like each output, or cast it."
            )
        with torch.no_grad():
            if self._as_nodes:
                gradients = backward_node(stage, self.inputs, tuple(saved), grads)
            else:
                written = [t for t in stage.buffers if isinstance(t, Tensor)]
                with preserve_version_counter(tuple(written)):
                    made = layer.backward(self._config, saved, layer.Buffers._make(stage.buffers), grads)
                gradients = list(made)
                for place, buffer in layer.gradients_in_buffers(self._config).items():
                    gradients[place] = stage.buffers[buffer]
        return layer.Inputs._make(gradients)


def _described(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple([(tuple(t.shape), t.dtype) for t in tensors])


def _unsupported(op: Any, x: Any) -> str:
    """Return why there is no SplitCall of this operation; empty if there is one."""
    title = type(op).__name__
    if not isinstance(op, FusibleOperation) or op.op_is_legacy or op.op_inner_outputs or not op.op_makes_node():
        return (
            f"{title} has no functions of its own: a SplitCall takes an octavo.Linear, an octavo.GroupedLinear or "
            "another operation of octavo.ops that computes by itself. Of a Sequential or a block, take the operations "
            "one by one."
        )
    if not isinstance(x, Tensor):
        return f"A SplitCall of {title} takes x as a plain tensor, got {type(x).__name__}. Pass its values."
    if op.parallel is not None and op.parallel.size() > 1:
        return (
            f"{title} works over ranks, with collectives before and after its functions. Take a layer with this rank's "
            "part of the weight, without parallel_mode, and call the collectives of octavo.ops around it."
        )
    if op.op_has_groups and x.dim() != 2:
        return f"A SplitCall of {title} takes rows, and x has {x.dim()} dims. Pass x.flatten(0, -2)."
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != x.dtype:
        return (
            f"torch.autocast is on, and a SplitCall of {title} takes x as it is. Cast x to "
            f"{torch.get_autocast_dtype(kind)} and make the call inside torch.autocast({kind!r}, enabled=False)."
        )
    return ""


@while_tracing
def _answer(name: str, key: str, question: str) -> Any:
    layer = LAYERS[name]
    return getattr(layer, question)(layer.config(key))


# -- graphs: what forward makes and what is saved follow from the config, so that both are constants -------------------


def _flat(inputs: Sequence[Any]) -> list[Any]:
    """Return the tensors of all fields, None for a field without one."""
    return [t for field in inputs for t in (field if isinstance(field, tuple) else (field,))]


def _sketches(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return inputs as they are described to `_selection`: the number of rows is made up."""
    width = inputs[0].shape[-1] if inputs[0].dim() else 0
    found: list[Any] = []
    for i, field in enumerate(inputs):
        if isinstance(field, tuple):
            found.append(("tuple", *[as_it_is(t) for t in field]))
        else:
            found.append(sketch(field, width) if i == 0 else as_it_is(field))
    return tuple(found)


@while_tracing
def _selection(name: str, key: str, sketches: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return which results of forward there are, and where each saved tensor comes from: (group, place), by identity of
    tensors without data."""
    layer = LAYERS[name]
    config = layer.config(key)
    protos = [
        tuple([TensorProto(*t[:3]) for t in own[1:]]) if own and own[0] == "tuple" else own and TensorProto(*own[:3])
        for own in sketches
    ]
    inputs = layer.Inputs._make(protos)
    made = layer.abstract(config, inputs)
    made = ForwardResult(*[tuple([t and replace(t) for t in own]) for own in made])  # each an object of its own
    groups = _flat(inputs), *made
    saved = layer.save(config, inputs, made)
    places = {id(t): (i, j) for i, own in enumerate(groups) for j, t in enumerate(own) if t is not None}
    return tuple(tuple(t is not None for t in own) for own in made), tuple(t and places[id(t)] for t in saved)
