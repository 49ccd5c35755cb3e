"""Measure one call of a layer: its casts, as the layer makes them, and its GEMMs beside a high-precision float32
reference.

The float32 reference is the same layer in float32 without quantization, on the same x, w and dy: one GEMM each for y,
dx and dw. The layer's own dw may go to a buffer, or be computed later. So it is computed here once more, by the layer's
functions from the same tensors, which gives the same bits."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.communication.all_reduced_amaxes import all_reduced_cast
from octavo.inspection.statistics import Cast, record_operand, record_result
from octavo.ops.grouped_linear_layer import given_rows
from octavo.quant import scale_blocks
from octavo.quant.casts import as_matrix, quantize_pair
from octavo.quant.grouped import GroupedTensor, groups_amax, quantize_groups
from octavo.quant.groups import BLOCK, Groups, split
from octavo.quant.groups.reference import pack
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import Parts, QTensor
from octavo.quant.quantizer import Quantizer
from octavo.quant.tensorwise import Tensorwise
from octavo.recipes import BF16
from octavo.recipes import recipe as resolve
from octavo.runtime.contract import LAYERS, ForwardResult, WeightCast, packing
from octavo.scaling.delayed_scaling import DY, cast_args, part_of

# settings of a call without writes
PLAIN = {"observe": False, "main_grad": "", "dummy_grad": False, "deferred_wgrad": ""}
ALIGNED = 16  # columns of grouped codes
FLOAT32_MAX = torch.finfo(torch.float32).max


class Call(NamedTuple):
    """One call of a layer, as its stage describes it."""

    layer: Any
    config: Any  # of a call that writes nothing but its results
    wgrad: Any  # the same, of a call for dw alone
    float32_reference: Any  # the config of the float32 reference
    inputs: Any
    seed: Tensor | None
    groups: Groups | None
    recorded: str  # "x" if that was recorded before it was gathered

    @classmethod
    def of(cls, text: str, tensors: Sequence[Tensor]) -> "Call":
        """Parse the string of `octavo.inspection.inspected_layer`; `tensors` are what it packed."""
        _, name, presence, recorded, key = text.split("|", 4)
        layer, (config, wgrad, float32_reference) = LAYERS[name], _configs(name, key)
        *fields, seed = packing(presence).unpack(tensors)
        inputs = layer.Inputs._make(fields)
        groups = split(inputs.splits, inputs.x.shape[0]) if name == "grouped-linear" else None
        return cls(layer, config, wgrad, float32_reference, inputs, seed, groups, recorded)

    # -- forward -------------------------------------------------------------------------------------------------------

    def record_forward(self, stats: Tensor, y: Tensor) -> None:
        """Record x, w and the y that the layer returned."""
        x, w = self.x(), self.w()
        x_cast, w_cast = self.x_cast(x), self.w_cast()
        if "x" not in self.recorded:
            record_operand(stats, "x", x, x_cast)
        record_operand(stats, "w", None if w is None else as_matrix(w), w_cast)
        made = self.layer.forward(self.float32_reference, self._exact(x, x_cast, w, w_cast))
        record_result(stats, "y", self.live(as_matrix(y)), self.live(as_matrix(made.outputs[0])))

    def x(self) -> Tensor | None:
        """Return x before the cast; None if it arrived as codes."""
        return None if self.config.x == "codes" else self.live(as_matrix(self.inputs.x))

    def x_cast(self, x: Tensor | None) -> Cast | None:
        """Return the cast of x, or the codes that arrived; None if the recipe does not quantize x."""
        spec, inputs = self.config.quant.fprop.left, self.inputs
        if x is None:
            return self._given_x(spec)
        scaling = inputs.scaling[self.config.x_scaling]
        return self._cast(x, spec, scaling, None, inputs.all_reduced[self.config.x_cast.all_reduced])

    def w(self) -> Tensor | None:
        """Return the weight; None if it is a quantized weight, which has codes alone."""
        weight: Tensor = self.inputs.weight
        return None if self.config.weight == "quantized" else weight

    def w_cast(self) -> Cast | None:
        """Return the cast of the weight: the codes in use if there are some. None if the recipe does not quantize
        it."""
        config, inputs, layer = self.config, self.inputs, self.layer
        weight, spec, parts = inputs.weight, config.quant.fprop.right, inputs.w_row
        if spec is None or spec.basis:
            return None
        if config.weight == "plain":
            proto = layer.abstract_weight(config, TensorProto.of(weight))[0]
            parts = tuple(proto.empty().tensors())
            scaling, all_reduced = inputs.scaling[config.w_scaling], inputs.all_reduced[config.w_cast.all_reduced]
            layer.refresh(config, WeightCast(weight, parts, (), scaling=scaling, all_reduced=all_reduced))
        return read(layer.weight_codes(config, parts, tuple(weight.shape), torch.float32), weight.shape[-1])

    # -- backward ------------------------------------------------------------------------------------------------------

    def record_backward(self, stats: Tensor, dy: Tensor) -> Tensor | None:
        """Record dy and dw. Return the float32 reference's dx; None if x takes no gradient."""
        config, layer = self.config, self.layer
        rows = self.live(as_matrix(dy))
        intermediates = not self.inputs.scaling or getattr(config, "scales_dy_alone", False)
        scaling = () if intermediates else self.inputs.scaling[part_of(DY, config.measures_dy)]
        record_operand(stats, "dy", rows, self._cast(rows, config.quant.dgrad.left, scaling, self.seed))
        x, w = self.x(), self.w()
        exact = self._exact(x, None if x is not None else self.x_cast(x), w, None if w is not None else self.w_cast())
        dx: Tensor | None
        dx, dw, *_ = layer.backward(self.float32_reference, self._saved(exact), layer.Buffers(), (rows.float(),))
        if config.wants_dw:
            given = self.inputs if x is None else self.inputs._replace(x=as_matrix(self.inputs.x))
            _, saved = layer.forward_and_save(self.wgrad, given, True)
            seed = None if self.seed is None else self.seed.clone()
            own = layer.backward(self.wgrad, saved, layer.Buffers(seed=seed), (rows.to(config.y_dtype),))[1]
            record_result(stats, "dw", own, dw)
        if dx is None or self.groups is None:
            return dx
        return torch.where(self._is_live(dx), dx, float("nan"))  # the tail: see `record_input_gradient`

    # -- parts ---------------------------------------------------------------------------------------------------------

    def live(self, rows: Tensor) -> Tensor:
        """Return the rows, with zeros after the last group."""
        return rows if self.groups is None else torch.where(self._is_live(rows), rows, 0.0)

    def _is_live(self, rows: Tensor) -> Tensor:
        assert self.groups is not None
        return (torch.arange(rows.shape[0], device=rows.device, dtype=torch.int64) < self.groups.start[-1])[:, None]

    def _cast(
        self, x: Tensor, spec: Quantizer | None, scaling: Sequence[Tensor], seed: Tensor | None, all_reduced: Parts = ()
    ) -> Cast | None:
        """Return the cast that the layer makes of x or dy, by delayed scaling's inverse scale in use if there is one,
        or by the all-reduced amaxes."""
        if spec is None or spec.basis:
            return None
        groups, part = self.groups, scaling if self.groups is None else [t.view(self.groups.number) for t in scaling]
        if all_reduced:
            args = all_reduced_cast(
                self.config.recipe, (spec, None), part, all_reduced, None, of_groups=groups is not None
            )
        else:
            seed = seed if spec.is_stochastic else None
            args = cast_args(self.config.recipe, (spec, None), part, partial(self._amax, x), None, seed)
        if groups is None:
            return read(quantize_pair(x, spec, None, args)[0], x.shape[1])
        wide = F.pad(x, (0, -x.shape[1] % ALIGNED))
        return read(quantize_groups(wide, spec, None, groups, args)[0], x.shape[1])

    def _amax(self, x: Tensor, spec: Tensorwise, skip: Tensor) -> Tensor:
        if self.groups is None:
            return spec.amax(x).view(1)
        amax = groups_amax(x, spec, None, self.groups)[0]
        assert amax is not None
        return amax

    def _given_x(self, spec: Quantizer) -> Cast | None:
        inputs, k = self.inputs, self.inputs.weight.shape[-1]
        if self.groups is not None:
            return read(given_rows(spec, inputs.x_codes, self.groups, k, self.config.y_dtype), k)
        shape = (inputs.x_codes[0].shape[0], k)
        return read(spec.assemble(inputs.x_codes, shape, self.config.y_dtype), k)

    def _saved(self, exact: Any) -> Any:
        """Select the tensors that the float32 reference's backward needs, without running its forward: unquantized,
        forward makes no tensor for backward but the places of groups."""
        intermediates = dict.fromkeys(self.layer.Intermediates._fields)
        if self.groups is not None:
            intermediates |= dict(zip(Groups._fields, self.groups.tensors(), strict=False))
            intermediates["width"] = exact.weight.new_empty(0, exact.weight.shape[-1])
        return self.layer.save(
            self.float32_reference, exact, ForwardResult((), (), self.layer.Intermediates(**intermediates))
        )

    def _exact(self, x: Tensor | None, x_cast: Cast | None, w: Tensor | None, w_cast: Cast | None) -> Any:
        """Return the inputs of the float32 reference: float32, from the codes' values where only codes are left."""
        found = {
            "x": (x if x is not None else x_cast.values).float(),  # type: ignore[union-attr]
            "weight": (w if w is not None else w_cast.values.view(self.inputs.weight.shape)).float(),  # type: ignore[union-attr]
        }
        for name in ("bias", "scales"):
            given = getattr(self.inputs, name, None)
            if given is not None:
                found[name] = given.float()
        if self.groups is not None:
            found["splits"] = self.inputs.splits
        return self.layer.Inputs(**{"bias": None, **found})


def record_rows(stats: Tensor, x: Tensor, parts: Sequence[Tensor], recipe: str) -> None:
    """Record this rank's rows of x, and their codes, whose first tensor is given as bytes."""
    spec = resolve(recipe).linear().fprop.left
    assert spec is not None
    rows = as_matrix(x)
    q = spec.assemble((parts[0].view(spec.fmt.dtype), *parts[1:]), tuple(rows.shape), x.dtype)
    record_operand(stats, "x", rows, read(q, rows.shape[1]))


def record_input_gradient(stats: Tensor, dx: Tensor, exact: Tensor) -> None:
    """Record the dx that the layer returned beside the float32 reference's. In the tail of a grouped layer the float32
    reference's rows are NaN, and the layer's may be anything: both count as zeros."""
    dx, exact = as_matrix(dx), as_matrix(exact)
    tail = exact.isnan().all(1, keepdim=True)
    record_result(stats, "dx", torch.where(tail, 0.0, dx), torch.where(tail, 0.0, exact))


def read(q: QTensor | GroupedTensor | None, columns: int) -> Cast:
    """Return the values of codes and the largest ones that their scales can represent; of grouped codes, without
    padding."""
    assert q is not None
    groups, matrix = (q.groups, q.q) if isinstance(q, GroupedTensor) else (None, q)
    bare = replace(q, anchor=None, columns=None) if isinstance(q, GroupedTensor) else replace(q, anchor=None)
    values = as_matrix(bare.dequantize(torch.float32))[:, :columns]
    width = matrix.spec.block[1]
    across = 1 if width is None else scale_blocks.ceil_div(columns, width)
    return Cast(values, _limits(matrix, groups)[:, :across], width, matrix.spec.fmt)


def _limits(q: QTensor, groups: Groups | None) -> Tensor:
    """Return the largest magnitude that each scale can represent, for each row, or one row if all rows share scales:
    what dequantize() makes of the largest code."""
    spec, height = q.spec, q.spec.block[0]
    limits = spec.fmt.max * spec.scale_values(q)
    if groups is None:
        limits = limits if q.global_scale is None else limits * q.global_scale
        return scale_blocks.spread(scale_blocks.no_larger(limits, FLOAT32_MAX), (height, None), q.rows, q.columns)
    owner = groups.owner.clamp_min(0)[:, None].expand(-1, BLOCK).reshape(-1)
    limits = (
        limits.index_select(0, owner) if height is None else scale_blocks.spread(limits, (height, None), *q.codes.shape)
    )
    limits = limits if q.global_scale is None else limits * q.global_scale[owner][:, None]
    return pack(scale_blocks.no_larger(limits, FLOAT32_MAX), groups)


@lru_cache(maxsize=4096)
def _configs(name: str, key: str) -> tuple[Any, Any, Any]:
    """Return the settings of a call without its writes, of one for dw alone, and of the float32 reference."""
    config = LAYERS[name].config(key)
    quiet = {**PLAIN, "wants_db": False, "wants_ds": False}
    quiet |= {"quantize_output": False} if name == "linear" else {"dgrad_out": False, "tail": "zero"}
    float32_reference: dict[str, Any] = {
        "recipe": BF16(), "dtype": "float32", "weight_dtype": "float32", "weight": "plain", "x": "plain",
        "measures_x": False, "measures_w": False, "measures_dy": False,
        "x_all_reduced": False, "w_all_reduced": False, "x_has_columns": False, "recompute_w_columns": False,
        "bias_dtype": config.bias_dtype and "float32",
    }  # fmt: skip
    if name != "linear":
        float32_reference["scales_dtype"] = config.scales_dtype and "float32"
    own = replace(config, **quiet)
    return own, replace(own, wants_dx=False, wants_dw=True), replace(own, **float32_reference)
