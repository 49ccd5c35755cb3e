"""Operands of a layer of GEMMs: how their rows lie, and the tensors of them that cross from forward to backward.

The rows of x, y and their gradients are one matrix (`Dense`), or come in groups with a weight for each (`Ragged`, in
`octavo.ops.grouped_linear_layer`). What differs between the two, how a tensor is cast, how codes are assembled, how a
product is made, is a method of the kind; `octavo.ops.matmul` has the rest, once. Codes are QTensors for both: `Ragged`
adds the places of its groups where a kernel needs them.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo._torch.operators import unsafe_view
from octavo.kernels.column_sums import column_sums
from octavo.kernels.gemm import product
from octavo.quant.casts import as_matrix, empty_pair, fill_pair, in_order, measure_pair, quantize_pair
from octavo.quant.orientation import column_axis
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import Parts, QProto, QTensor
from octavo.quant.quantizer import CastArgs, Quantizer, QuantizerPair
from octavo.quant.tensorwise import Tensorwise
from octavo.runtime.contract import DTYPES
from octavo.runtime.gradient_targets import Writes

Operand = Tensor | QTensor
Pair = tuple[QTensor | None, QTensor | None]  # codes of an operand's rows and of its columns
WHOLE = (None, None)  # the block of a quantizer with one scale for a tensor


class XCodes(NamedTuple):
    """The tensors of an x that arrived as codes."""

    row: Parts = ()
    column: Parts = ()  # for dw, if the caller has them


NO_X_CODES = XCodes()


# -- tensors that cross -----------------------------------------------------------------------------------------------
# An operand that backward keeps is a plain tensor or the tensors of its codes. Both take three fields, so that the
# number of tensors that cross a node is fixed.


class Intermediates(NamedTuple):
    """Codes of x and w that forward makes and backward needs, and where groups are. A deferred dw reads x and the
    places of groups, which therefore follow each other (`LinearSettings.deferred_span`)."""

    x_codes: Any = None
    x_scale: Any = None
    x_global_scale: Any = None
    start: Any = None  # these five as of octavo.quant.groups.Groups; None if x is dense
    block: Any = None
    owner: Any = None
    source: Any = None
    live: Any = None
    w_codes: Any = None
    w_scale: Any = None
    w_global_scale: Any = None
    width: Any = None  # [0, K], for its shape alone
    x_amax: Any = None  # [1, 1] float32: what forward measured, if backward makes column codes of x or w
    w_amax: Any = None


class Saved(NamedTuple):
    """x as dw needs it, w as dx needs it (a QTensor's tensors, or one plain tensor in the place of its codes), the
    arguments of casts in backward, and where groups are."""

    x_codes: Tensor | None = None
    x_scale: Tensor | None = None
    x_global_scale: Tensor | None = None
    w_codes: Tensor | None = None
    w_scale: Tensor | None = None
    w_global_scale: Tensor | None = None
    width: Tensor | None = None  # [0, K], for its shape alone
    dy_inverse_scale: Tensor | None = None  # delayed: dy's inverse scale, and if it is uncalibrated ...
    dy_amax_count: Tensor | None = None  # ... how many amaxes it has seen
    x_inverse_scale: Tensor | None = None  # delayed inverse scales of x's and w's columns, if backward makes those
    w_inverse_scale: Tensor | None = None
    x_amax: Tensor | None = None  # their amaxes, if one was measured; as bits, if it is all-reduced
    w_amax: Tensor | None = None
    bias: Tensor | None = None  # for the gradient of the bias' scales
    scales: Tensor | None = None  # of the bias, for the gradient of the bias
    start: Tensor | None = None  # these five as of octavo.quant.groups.Groups; None if x is dense
    block: Tensor | None = None
    owner: Tensor | None = None
    source: Tensor | None = None
    live: Tensor | None = None
    dy_buffer: Tensor | None = None  # for a deferred dw in a graph: dy itself, or its codes and the rest
    dy_buffer_1: Tensor | None = None
    dy_buffer_2: Tensor | None = None
    dy_buffer_3: Tensor | None = None

    @property
    def dy_scaling(self) -> Parts:
        """Delayed: dy's part of `scaling`."""
        if self.dy_inverse_scale is None:
            return ()
        inverse_scale, count = self.dy_inverse_scale, self.dy_amax_count
        return (inverse_scale,) if count is None else (inverse_scale, count)


X_PARTS, W_PARTS, PLACES, DY_BUFFERS = slice(3), slice(3, 6), slice(15, 20), slice(20, 24)  # of Saved


class Operands(NamedTuple):
    """The operands of dw."""

    dy: Operand
    x: Operand
    rows: "Dense"
    shape: tuple[int, ...]  # of dw


class BackwardCall(NamedTuple):
    """One call of backward: its settings, the tensors that forward saved, the buffers that it writes to, and how the
    rows of x and dy lie."""

    config: Any
    kept: Any  # Saved
    buffers: Any
    writes: Writes | None
    rows: "Dense"

    def write(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Write to a buffer, now or when the chain around this layer is done."""
        if self.writes is None:
            function(*arguments)
        else:
            self.writes.defer(function, *arguments)

    def seed(self) -> Tensor | None:
        """Return the random counter from which a cast of dy draws; None if none does."""
        seed: Tensor | None = self.buffers.seed if self.config.is_stochastic else None
        return seed if seed is None or self.writes is None else self.writes.drawn(seed)


# -- kinds of operands -------------------------------------------------------------------------------------------------


def flat(x: Tensor) -> Tensor:
    """Reshape [..., K] to [M, K]."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


class Dense:
    """The rows of one matrix. `Ragged` overrides what is different for rows in groups."""

    groups: Any = None  # octavo.quant.groups.Groups
    places: tuple[Any, ...] = (None,) * 5  # the tensors of the groups
    lead: tuple[int, ...] = ()  # the dims of a weight in front of [N, K]

    # -- casts

    # row and column codes of x, by the two quantizers and the cast's arguments
    quantize: Callable[[Tensor, Quantizer | None, Quantizer | None, CastArgs], Pair] = staticmethod(
        partial(quantize_pair, one_scale=True)
    )

    # the codes that a cast of a tensor like this one writes
    empty_pair: Callable[[Tensor | TensorProto, QuantizerPair], Pair] = staticmethod(
        partial(empty_pair, one_scale=True)
    )

    def fill(self, x: Tensor, pair: Pair, arguments: CastArgs) -> None:
        """Cast x into existing codes."""
        fill_pair(as_matrix(x), pair, arguments)

    def amax(self, x: Tensor, source: Tensor | None, spec: Tensorwise, skip: Tensor) -> Tensor:
        """Measure x, or the rows of x that `source` names. If `skip` is not zero, the result is not used."""
        return spec.amax(x, skip=skip).view(1)

    def amaxes(self, x: Tensor, row: Quantizer | None, column: Quantizer | None, none: Tensor) -> list[Tensor]:
        """Measure x for both quantizers, from one read if one kernel serves both; `none` for one that needs nothing."""
        return [none if amax is None else amax.reshape(1) for amax in measure_pair(as_matrix(x), row, column)]

    # -- codes

    def proto(self, spec: Quantizer, side: str, like: Any) -> QProto:
        """Describe the codes of a tensor `like` this, without data."""
        return spec.proto(like, column_axis(len(like.shape)) if side == "column" else -1)

    def assemble(
        self, spec: Quantizer, parts: Sequence[Any], side: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> QTensor:
        """Return the QTensor with these tensors and that shape."""
        return spec.assemble(parts, shape, dtype)

    def restored(
        self, spec: Quantizer, parts: Sequence[Any], side: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> QTensor:
        """Assemble saved tensors, in the strides that kernels read: a hook may have returned them in others."""
        q = spec.assemble(parts, shape, dtype)
        if spec.block == WHOLE and q.codes.is_contiguous():  # a single scale has no order
            return q
        return in_order(q, spec._scale_strides(*q.scale.shape))

    def given_x(self, config: Any, inputs: Any) -> QTensor:
        """Return x that arrived as row codes."""
        shape = (inputs.x_codes[0].shape[0], inputs.weight.shape[1])
        return self.assemble(config.quant.fprop.left, inputs.x_codes, "row", shape, config.y_dtype)

    # -- weights

    @staticmethod
    def of_weight(weight: Tensor) -> "tuple[Tensor, Dense]":
        """Return the matrix that a cast of the weight reads, and how its rows lie."""
        return weight, DENSE

    @staticmethod
    def weight_proto(spec: Quantizer, side: str, weight: Any) -> QProto:
        return spec.proto(weight, 0 if side == "column" else -1)

    @staticmethod
    def weight_codes(spec: Quantizer, row: Sequence[Any], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """Return the QTensor or GroupedTensor of a weight of that shape."""
        return spec.assemble(row, shape, dtype)

    @staticmethod
    def transposed(codes: Any) -> QTensor:
        """Transpose row codes of square blocks to column codes."""
        return codes.transpose()

    # -- products

    def readable(self, dy: Tensor) -> Tensor:
        """Return dy in the strides that kernels of this kind read."""
        return dy

    def output(
        self, config: Any, inputs: Any, x: QTensor | None, w: QTensor | None, lead: tuple[int, ...] | None
    ) -> Tensor:
        """Compute y, from the codes of x and w where there are some."""
        y = product(
            flat(inputs.x).to(config.y_dtype) if x is None else x,
            inputs.weight.to(config.y_dtype) if w is None else w,
            config.y_dtype,
            inputs.bias,
            config.quant.fprop.accumulation,
        )
        if lead is None and inputs.x is not None and inputs.x.dim() != 2:
            lead = tuple(inputs.x.shape[:-1])
        if lead is None or len(lead) == 1:
            return y
        return unsafe_view(y, (*lead, y.shape[-1]))  # no view: the matrix has no other holder

    def input_product(self, call: BackwardCall, dy: Any, row: QTensor | None, weight: Operand) -> Tensor:
        """Compute dx, from dy's row codes or from dy."""
        dx = product(flat(dy) if row is None else row, weight, dy.dtype, None, call.config.quant.dgrad.accumulation)
        return dx if len(dy.shape) == 2 else dx.view(*dy.shape[:-1], dx.shape[-1])

    def bias_gradients(self, call: BackwardCall, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Compute the gradients of the bias and of its scales."""
        config, rows = call.config, dy if dy.dim() == 2 else flat(dy)
        return column_sums(rows, DTYPES[config.bias_dtype]) if config.wants_db else None, None

    def wgrad_operand(self, x: Tensor) -> Tensor:
        """Return an unquantized x or dy as dw's GEMM takes it: dense, it is contracted over its last dim."""
        return flat(x).T

    def x_of_rows(self, config: Any, parts: Sequence[Any], k: int, dtype: torch.dtype) -> Operand:
        """Return x as dw needs it, of row codes."""
        q = self.restored(config.quant.fprop.left, parts, "row", (parts[0].shape[0], k), dtype)
        return self.transposed(q) if config.wgrad_mode == "quantized" else q.dequantize().T

    def weight_product(self, config: Any, operands: Operands, dtype: torch.dtype) -> Tensor:
        """Compute dw."""
        return product(operands.dy, operands.x, dtype, None, config.quant.wgrad.accumulation)

    def prepared(self, config: Any, operands: Operands, dtype: torch.dtype) -> Any:
        """Compute what `store` adds to a buffer of that dtype, as far as it can be before the buffer is written to."""
        return self.weight_product(config, operands, dtype)

    def store(self, config: Any, out: Tensor, dw: Any) -> None:
        """Add dw to a buffer, or write it there."""
        out.add_(dw) if config.main_grad == "add" else out.copy_(dw)


DENSE = Dense()
