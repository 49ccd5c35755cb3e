"""`LAYOUTS`: the layouts of published codes, a row for each.

A row says which tensors a weight consists of, by what follows its name, and in which recipe Octavo trains codes like
these. The recipe's quantizer of weights decides the shapes, so a row has none.
"""

from dataclasses import dataclass, field
from typing import Any

from octavo.errors import warn_caller
from octavo.quant.quantizer import Quantizer
from octavo.recipes import Recipe
from octavo.recipes import recipe as resolve

FLOATS = ("F32", "BF16", "F16")
BYTES = ("F8_E8M0", "U8")

_FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
_FP4: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True}


def _compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    """Return the entry `quantization_config` of compressed-tensors, for all linear layers."""
    group = {
        "targets": ["Linear"], "format": form,
        "weights": {**weights, "dynamic": False}, "input_activations": activations, "output_activations": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """One layout of published codes."""

    name: str
    recipe: str  # in which Octavo trains such codes: its row codes are those of the file
    scale: str  # what follows the weight's name in the names of its other tensors
    config: dict[str, Any] = field(compare=False)  # the entry quantization_config, without the modules left out
    left_out: str = "ignore"  # the key of that entry which lists them
    codes: str = ""
    level2: str = ""  # of two-level schemes
    divides: bool = False  # the second level divides, where Octavo's multiplies
    scale_dtypes: tuple[str, ...] = FLOATS  # as files have them; Octavo writes the first
    one: tuple[int, ...] = (1,)  # the shape of a scale of the whole weight
    pow2: bool = False  # its float scales are powers of two
    activation_scale: str = "input_scale"  # of a module, where activations have one scale
    static: bool = False  # servers ask for a scale of each layer's activations, which training does not measure
    unpacks: bool = False  # four-bit codes, which become the E4M3 codes of the same values: read, and not written

    @property
    def quantizer(self) -> Quantizer:
        """The quantizer of weights whose codes these are."""
        recipe: Recipe = resolve(self.recipe)
        found = recipe.linear().fprop.right
        assert found is not None
        return found


FP8_BLOCK: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
_BLOCK, _TENSOR = "fp8-block(scale='fp32')", "fp8-current"
_CHANNEL, _MX = "fp8-rowwise(pow2=False)", "mxfp8"
_NV = "nvfp4(square_weights=False)"
_SKIP = "modules_to_not_convert"
_OF_MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "kv_cache_quant_algo": None}

_ROWS = (
    Layout("fp8-block", _BLOCK, "_scale_inv", FP8_BLOCK, _SKIP, activation_scale="activation_scale"),
    Layout(
        "fp8-block-ue8m0", "fp8-block", "_scale_inv", {**FP8_BLOCK, "scale_fmt": "ue8m0"}, _SKIP,
        scale_dtypes=(*BYTES, *FLOATS), pow2=True, activation_scale="activation_scale",
    ),
    Layout(
        "fp8-tensor", _TENSOR, "_scale_inv", {**FP8_BLOCK, "weight_block_size": None}, _SKIP, one=(),
        activation_scale="activation_scale",
    ),
    Layout(
        "mxfp8", _MX, "_scale_inv",
        {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
        _SKIP, scale_dtypes=("U8", "F8_E8M0"), activation_scale="activation_scale",
    ),
    Layout(
        "compressed-tensors-tensor", _TENSOR, "_scale",
        _compressed("float-quantized", {**_FP8, "strategy": "tensor"}, {**_FP8, "strategy": "tensor", "dynamic": True}),
    ),
    Layout(
        "compressed-tensors-channel", _CHANNEL, "_scale",
        _compressed("float-quantized", {**_FP8, "strategy": "channel"}, {**_FP8, "strategy": "token", "dynamic": True}),
    ),
    Layout(
        "compressed-tensors-block", _BLOCK, "_scale",
        _compressed(
            "float-quantized", {**_FP8, "strategy": "block", "block_structure": [128, 128]},
            {**_FP8, "strategy": "group", "group_size": 128, "dynamic": True},
        ),
    ),
    Layout(
        "compressed-tensors-mxfp8", _MX, "_scale",
        _compressed(
            "mxfp8-quantized", {**_FP8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
            {**_FP8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "dynamic": True},
        ),
        scale_dtypes=("U8", "F8_E8M0"),
    ),
    Layout(
        "compressed-tensors-nvfp4", _NV, "_scale",
        _compressed(
            "nvfp4-pack-quantized",
            {**_FP4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}, None,
        ),
        codes="_packed", level2="_global_scale", divides=True, scale_dtypes=("F8_E4M3",),
        activation_scale="input_global_scale",
    ),
    Layout("modelopt-fp8", _TENSOR, "_scale", {**_OF_MODELOPT, "quant_algo": "FP8"}, one=(), static=True),
    Layout(
        "modelopt-nvfp4", _NV, "_scale", {**_OF_MODELOPT, "quant_algo": "NVFP4", "group_size": 16},
        level2="_scale_2", scale_dtypes=("F8_E4M3",), one=(), static=True,
    ),
    Layout(
        "modelopt-mxfp8", _MX, "_scale", {**_OF_MODELOPT, "quant_algo": "MXFP8", "group_size": 32},
        scale_dtypes=("U8", "F8_E8M0"),
    ),
    Layout(
        "gpt-oss-mxfp4", _MX, "_scales", {"quant_method": "mxfp4"}, _SKIP, codes="_blocks", scale_dtypes=("U8",),
        unpacks=True,
    ),
)  # fmt: skip


def warn_of_static_scales(layout: Layout) -> None:
    """Warn that new files of this layout lack what some servers ask for."""
    if layout.static:
        warn_caller(
            f"{layout.name} has a scale for the activations of each layer ({layout.activation_scale}), and these files "
            "have none: training measures no such scales. Before a server loads them, calibrate them with ModelOpt, or "
            "choose a layout with dynamic scales, such as compressed-tensors-channel or fp8-block."
        )


LAYOUTS: dict[str, Layout] = {row.name: row for row in _ROWS}
