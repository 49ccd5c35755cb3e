"""The layer of a Linear whose tensors `octavo.debug` changes: each GEMM runs by itself, with its own operands.

A Linear casts x once for fprop and wgrad, and dy once for dgrad and wgrad. Here forward keeps x and w as they came, and
backward casts them again for the GEMM that it computes, so that a change in one GEMM leaves the others alone. A GEMM
without a change has the bits of the Linear's.

The changes are not in the config: a graph has the number of a table, and the table says at each call what applies.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.errors import UnsupportedShape
from octavo.inspection.changes import Call, Change, HighPrecision, Place, Quantize
from octavo.kernels.column_sums import column_sums
from octavo.kernels.gemm import product
from octavo.ops import linear_layer
from octavo.ops.linear_layer import Buffers, Inputs
from octavo.ops.matmul import deliver, quantized, quantized_dy
from octavo.ops.operands import DENSE, BackwardCall, flat
from octavo.ops.operands import Saved as LinearSaved
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import QTensor
from octavo.runtime.contract import DTYPES, ForwardResult, Layer, Nothing, Tensors
from octavo.runtime.gradient_targets import Writes, advance
from octavo.scaling.delayed_scaling import RunningAmaxes
from octavo.values import Value, register

LINEAR = linear_layer.layer


class Table:
    """The changes of one layer in one block."""

    def __init__(self, layer: str, changes: Sequence[Change], block: Any) -> None:
        self.layer, self.changes = layer, tuple(changes)
        self.block: Callable[[], Any] = (lambda: None) if block is None else weakref.ref(block)

    def of(self, gemm: str) -> "GemmChanges":
        """Return what applies to a GEMM in this step."""
        block = self.block()
        step = 0 if block is None else block._step
        return GemmChanges(self.layer, gemm, step, [c for c in self.changes if c.gemm == gemm and c.is_on(step)])


class GemmChanges(NamedTuple):
    """The changes that apply to a GEMM."""

    layer: str
    gemm: str
    step: int
    changes: list[Change]

    @property
    def in_high_precision(self) -> bool:
        return any([isinstance(c, HighPrecision) for c in self.changes])

    def quantizer(self, tensor: str) -> Quantize | None:
        """Return the last change of an operand's quantizer."""
        found = [c for c in self.changes if isinstance(c, Quantize) and c.tensor == tensor]
        return found[-1] if found else None

    @property
    def is_emulated(self) -> bool:
        """Whether the product is not that of the recipe's codes."""
        return self.in_high_precision or any([isinstance(c, Quantize) for c in self.changes])

    def calls(self, tensor: str) -> bool:
        return any([isinstance(c, Call) and c.tensor == tensor for c in self.changes])

    def replaced(self, tensor: str, found: Tensor) -> Tensor:
        """Return the tensor that takes this one's place."""
        place = Place(self.layer, self.gemm, tensor, self.step)
        for change in self.changes:
            if isinstance(change, Call) and change.tensor == tensor:
                assert callable(change.function)
                with torch.no_grad():
                    made = change.function(found, place)
                if made is None:
                    continue
                if not isinstance(made, Tensor) or made.shape != found.shape:
                    got = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
                    raise UnsupportedShape(
                        f"A function of octavo.debug returns {tensor} of {self.gemm} as {tuple(found.shape)}, or None; "
                        f"got {got}."
                    )
                found = made.to(found.dtype)
        return found


TABLES: dict[str, Table] = {}  # of the blocks that are entered
NONE = Table("", (), None)


@register("changed-linear")
class Config(Value):
    """The settings of the Linear's call, and the number of the table."""

    call: linear_layer.Config = linear_layer.Config()  # a frozen value
    table: str = ""


class ChangedLinear(Layer):
    """Compute what a Linear computes, GEMM by GEMM."""

    def forward(self, config: Any, inputs: Any) -> ForwardResult:
        call, changes = config.call, TABLES.get(config.table, NONE).of("fprop")
        alone = _only(call)
        if not changes.changes:
            return _outputs(LINEAR.forward(alone, inputs))
        x, w = (changes.replaced(name, _values(alone, inputs, name)) for name in ("x", "w"))
        given = _with_values(inputs, x, w)
        plain = replace(alone, x="plain", weight="plain")
        if changes.is_emulated:
            if call.observe:  # the amaxes of x and w that delayed scaling needs for the other GEMMs
                LINEAR.forward(alone, inputs)
            a, b = _operands(changes, plain, given, (flat(x), w), ("x", "w"))
            y = product(a, b, call.y_dtype, inputs.bias, "precise").view(*x.shape[:-1], w.shape[0])
            made = ForwardResult((y,), (), ())
            if call.output_parts:
                codes = tuple(call.quant.fprop.left.quantize(y).tensors())
                made = ForwardResult((y.new_zeros(1).expand(y.shape),), codes, ())
        else:
            made = _outputs(LINEAR.forward(plain, given))
        if changes.calls("y"):
            made = made._replace(outputs=(changes.replaced("y", made.outputs[0]),))
        return made

    def abstract(self, config: Any, inputs: Any) -> ForwardResult:
        return _outputs(LINEAR.abstract(_only(config.call), inputs))

    def save(self, config: Any, inputs: Any, made: ForwardResult) -> Tensors:
        kept = inputs.x if config.call.x == "plain" else None
        return inputs._replace(x=kept, bias=None, running_amaxes=(), all_reduced=())

    def backward(self, config: Any, saved: Any, buffers: Any, grads: Tensors, writes: Writes | None = None) -> Tensors:
        call, table, dy = config.call, TABLES.get(config.table, NONE), grads[0]
        if dy is None:
            return LINEAR.gradients(None, None, None)
        inputs = Inputs._make(saved)
        of_dx, of_dw = table.of("dgrad"), table.of("wgrad")
        if not of_dx.changes and not of_dw.changes:
            return _own_backward(call, inputs, buffers, dy, writes)
        dx = dw = db = None
        if call.wants_db:
            db = column_sums(flat(dy), DTYPES[call.bias_dtype])
        if call.wants_dx:
            dx = _input_gradient(_only(call, wants_dx=True), of_dx, inputs, _same_draws(buffers), dy)
        if call.wants_dw:
            dw = _weight_gradient(call, of_dw, inputs, _same_draws(buffers), dy, writes)
        if call.is_stochastic and buffers.seed is not None:
            advance(buffers.seed)
        return LINEAR.gradients(dx, dw, db)

    def wants(self, config: Any) -> tuple[bool, ...]:
        return LINEAR.wants(config.call)

    def has_backward(self, config: Any) -> bool:
        return LINEAR.has_backward(config.call)

    def abstract_gradients(self, config: Any, saved: Any, dy: Any) -> tuple[TensorProto | None, ...]:
        call = config.call
        (n, k), device = Inputs._make(saved).weight.shape[-2:], dy.device
        return LINEAR.gradients(
            TensorProto((*dy.shape[:-1], k), dy.dtype, device) if call.wants_dx else None,
            TensorProto((n, k), DTYPES[call.weight_dtype], device) if call.returns_dw else None,
            TensorProto((n,), DTYPES[call.bias_dtype], device) if call.wants_db else None,
        )

    def auxiliary(self, config: Any) -> int:
        return LINEAR.auxiliary(config.call)

    def keeps_state(self, config: Any) -> bool:
        return True

    def graph_buffers(self, config: Any, *fields: Any) -> Any:
        return LINEAR.graph_buffers(config.call, *fields)

    def decided_by_layout(self, config: Any, side: str) -> bool:
        return False  # the program's functions and the step take part


layer = ChangedLinear(Config, Inputs, Nothing, Inputs, Buffers)


def _same_draws(buffers: Any) -> Any:
    """Return the buffers with a copy of the random counter: both GEMMs of a backward draw from one step of it."""
    return buffers if buffers.seed is None else buffers._replace(seed=buffers.seed.clone())


def _outputs(made: ForwardResult) -> ForwardResult:
    return made._replace(intermediates=())


def _only(call: Any, *, wants_dx: bool = False, wants_dw: bool = False) -> Any:
    """Return the settings of a call for some of its gradients. Nothing is written but by backward's casts."""
    settings = {"wants_dx": wants_dx, "wants_dw": wants_dw, "wants_db": False, "x_columns": "forward"}
    return replace(call, **settings, main_grad="", dummy_grad=False, recompute_w_columns=False)


def _values(call: Any, inputs: Any, name: str) -> Tensor:
    """Return x or w as it came, or the values of its codes."""
    if name == "x":
        if call.x == "plain":
            return inputs.x
        values = DENSE.given_x(call, inputs).dequantize()
        return values if inputs.x is None else values.view(inputs.x.shape)
    if call.weight != "quantized":
        return inputs.weight
    return LINEAR.weight_values(call, inputs.w_row, tuple(inputs.weight.shape), DTYPES[call.weight_dtype])


def _with_values(inputs: Any, x: Tensor, w: Tensor) -> Any:
    return inputs._replace(x=x, weight=w, x_codes=(), x_column=(), w_row=(), w_column=())


def _operands(
    changes: GemmChanges, call: Any, inputs: Any, operands: tuple[Tensor, Tensor], names: tuple[str, str],
    dy: tuple[Any, Tensor] | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return the values that a GEMM multiplies: of the codes of the quantizers that changes name, or of the recipe's.
    The operands are matrices that are contracted over their last dim."""
    found = []
    for name, operand in zip(names, operands, strict=True):
        change = changes.quantizer(name)
        if changes.in_high_precision:
            operand = operand.to(call.y_dtype)
        elif change is not None:
            operand = operand if change.quantizer is None else change.quantizer.quantize(operand).dequantize()  # type: ignore[union-attr]
        elif (q := _own_codes(changes.gemm, call, inputs, name, dy)) is not None:
            operand = q.dequantize()
        found.append(operand)
    dtype = torch.promote_types(found[0].dtype, found[1].dtype)
    return [operand.to(dtype) for operand in found]


def _own_codes(gemm: str, call: Any, inputs: Any, name: str, dy: tuple[Any, Tensor] | None) -> QTensor | None:
    """Return the recipe's codes of an operand, in the orientation of the GEMM; None if it multiplies none."""
    place = 1 if gemm == "wgrad" or (gemm == "dgrad" and name == "w") else 0
    if name == "dy":
        assert dy is not None
        return quantized_dy(*dy)[place]
    amaxes = RunningAmaxes(*inputs.running_amaxes)
    of_x, of_w = (call.x_cast, inputs.x, amaxes.x), (call.w_cast, inputs.weight, amaxes.w)
    cast, operand, running = of_x if name == "x" else of_w
    return quantized(call, inputs, cast, operand, DENSE, running)[place]


def _own_backward(call: Any, inputs: Any, buffers: Any, dy: Tensor, writes: Writes | None) -> Tensors:
    """Run the Linear's forward for what it keeps, then its backward."""
    call = replace(call, quantize_output=False)
    made = LINEAR.forward(call, inputs)
    return LINEAR.backward(call, LINEAR.save(call, inputs, made), buffers, (dy,), writes)


def _input_gradient(call: Any, changes: GemmChanges, inputs: Any, buffers: Any, dy: Tensor) -> Tensor:
    if not changes.changes:
        return _own_backward(call, inputs, buffers, dy, None)[0]  # type: ignore[return-value]
    dy, w = changes.replaced("dy", dy), changes.replaced("w", _values(call, inputs, "w"))
    x = inputs.weight.new_empty(0, w.shape[1])  # no GEMM of dx reads x
    given, plain = _with_values(inputs, x, w), replace(call, x="plain", weight="plain")
    if changes.is_emulated:
        found = _product(changes, plain, given, (flat(dy), w.T), ("dy", "w"), buffers, dy, dy.dtype)
        found = found.view(*dy.shape[:-1], w.shape[1])
    else:
        found = _own_backward(plain, given, buffers, dy, None)[0]  # type: ignore[assignment]
    return changes.replaced("dx", found)


def _weight_gradient(
    call: Any, changes: GemmChanges, inputs: Any, buffers: Any, dy: Tensor, writes: Writes | None
) -> Tensor | None:
    """Compute dw, and add it to main_grad if the call does."""
    if not changes.changes:
        own = replace(call, wants_dx=False, wants_db=False)
        return _own_backward(own, inputs, buffers, dy, writes)[1]
    alone = _only(call, wants_dw=True)
    dy, x = changes.replaced("dy", dy), changes.replaced("x", _values(call, inputs, "x"))
    w = _values(call, inputs, "w")
    given, plain = _with_values(inputs, x, w), replace(alone, x="plain", weight="plain")
    if changes.is_emulated:
        operands, dtype = (flat(dy).T, flat(x).T), DTYPES[call.weight_dtype]
        dw = _product(changes, plain, given, operands, ("dy", "x"), buffers, dy, dtype)
    else:
        dw = _own_backward(plain, given, buffers._replace(main_grad=None), dy, None)[1]  # type: ignore[assignment]
    dw = changes.replaced("dw", dw)
    if buffers.main_grad is None:
        return dw
    return deliver(call, dw, buffers.main_grad, writes)


def _product(
    changes: GemmChanges, call: Any, inputs: Any, operands: tuple[Tensor, Tensor], names: tuple[str, str],
    buffers: Any, dy: Tensor, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Multiply the values of two operands in backward. A cast of dy reads its part of delayed scaling."""
    scale, count = (*inputs.scaling[call.dy_scaling], None, None)[:2]
    saved: Any = LinearSaved(dy_inverse_scale=scale, dy_amax_count=count)
    of_dy = BackwardCall(call, saved, buffers, None, DENSE), dy
    left, right = _operands(changes, call, inputs, operands, names, of_dy)
    return product(left, right, dtype, None, "precise")
