"""The compilations of activations into codes: tiles, casts, activations, optional inputs."""

from typing import Any

import torch

from octavo.formats import E4M3, E5M2
from octavo.kernels.activation import ACTIVATIONS, Function
from octavo.kernels.activation.cast.passes import Kind
from octavo.kernels.activation.cast.triton import (
    CONFIGS,
    GATED_CONFIGS,
    GROUP_CONFIGS,
    MEASURING,
    ROWS_ALONE,
    _backward_kernel,
    _forward_kernel,
    _woven_kernel,
    again_constants,
    backward_configs,
    function_constants,
    tile_constants,
)
from octavo.kernels.tile_cast import triton as tile_casts
from octavo.quant import tile
from octavo.quant.block import Block1D, Block2D
from octavo.quant.quantizer import Quantizer
from octavo.quant.tensorwise import Tensorwise
from octavo.quant.tensorwise.triton import is_transposable
from octavo.quant.tile import Config, Variant
from tests.kernel_variants import pointer_types


def variants() -> list[Variant]:
    """Lists the compilations: every tile, every kind of cast, every activation and its optional inputs."""
    swiglu, clamped, gelu = (ACTIVATIONS[name] for name in ("swiglu", "clamped-swiglu", "gelu"))
    given, gradient, rows, square = Tensorwise(), Tensorwise(E5M2), Block1D(), Block2D(E4M3, "fp32")
    half = torch.bfloat16
    found = [_forward_variant("swiglu", swiglu, given, half, config=config) for config in CONFIGS]
    found += [_forward_variant(name, fn, given, half) for name, fn in ACTIVATIONS.items() if name != "swiglu"]
    found += [_forward_variant("swiglu", swiglu, spec, half) for spec in (rows, square)]
    found += [_forward_variant("swiglu", swiglu, spec, torch.float32) for spec in (given, rows, square)]
    found += [
        _forward_variant("swiglu", swiglu, given, torch.float16),
        _forward_variant("swiglu", swiglu, given, half, sides="row", config=ROWS_ALONE),
        _forward_variant("swiglu", swiglu, rows, half, sides="column"),
        _forward_variant("clamped-swiglu by 32", clamped._replace(interleave=32), rows, half, "scales"),
        _forward_variant("gelu", gelu, given, half, "bias"),
        _forward_variant("gelu with dropout", gelu._replace(drop=0.1), given, half, "seed"),
    ]
    found += [_backward_variant("swiglu", swiglu, gradient, half, config, again=given) for config in GATED_CONFIGS]
    found += [_backward_variant(name, fn, gradient, half) for name, fn in ACTIVATIONS.items()]
    found += [
        _backward_variant("swiglu", swiglu, gradient, half, extra="bias", again=given),
        _backward_variant("swiglu", swiglu, gradient, torch.float16, again=given),
        _backward_variant("swiglu", swiglu, gradient, torch.float32, again=given),
        _backward_variant("swiglu", swiglu, gradient, half, sides="row", again=given),
        _backward_variant("clamped-swiglu", clamped, gradient, half, extra="scales", again=given),
        _backward_variant("gelu with dropout", gelu._replace(drop=0.1), gradient, half, extra="seed"),
        _backward_variant("gelu", gelu, rows, half, extra="bias", again=rows),
        _backward_variant("gelu", gelu, square, half, extra="bias", again=square),
        _backward_variant("gelu", gelu, square, torch.float32, extra="bias"),
    ]
    by_32, situ = clamped._replace(interleave=32), ACTIVATIONS["situglu"]
    found += [
        _woven_variant("clamped-swiglu by 32", by_32, gradient, half),
        _woven_variant("clamped-swiglu by 32", by_32, gradient, half, "scales"),
        _woven_variant("clamped-swiglu by 32", by_32, gradient, torch.float16, "bias"),
        _woven_variant("situglu by 32", situ._replace(interleave=32), gradient, half, "scales"),
    ]
    # the curves that need the most registers, with the options that need the most
    found += [_backward_variant("situglu", situ, gradient, half, config, again=given) for config in GATED_CONFIGS]
    found += [_forward_variant("situglu", situ, spec, torch.float32) for spec in (given, rows, square)]
    found += [
        _forward_variant("situglu", situ, rows, half, "scales"),
        _backward_variant("situglu", situ, gradient, half, extra="bias", again=given),
        _backward_variant("situglu", situ, gradient, torch.float32, again=given),
    ]
    found += [
        variant for way in ("one measure", "one measured") for variant in (
            _forward_variant("swiglu", swiglu, given, half, way=way),
            _forward_variant("situglu", situ, given, torch.float32, way=way),
            _woven_variant("clamped-swiglu by 32", by_32, gradient, half, "scales", way),
        )
    ]  # fmt: skip
    for name, fn in (("swiglu", swiglu), ("situglu", situ), ("gelu", gelu)):
        found += [
            _backward_variant(name, fn, gradient, half, MEASURING, again=given, way="one measure"),
            _backward_variant(name, fn, gradient, half, MEASURING, way="one measure"),
            _backward_variant(name, fn, gradient, half, again=given, way="one measured"),
            _backward_variant(name, fn, gradient, torch.float32, again=given, way="one measured"),
        ]
    ragged = {"width": 72}  # of no tile
    found += [
        _forward_variant("swiglu, ragged", swiglu, given, half, "scales", **ragged),
        _backward_variant("swiglu, ragged", swiglu, gradient, half, again=given, **ragged),
        _backward_variant("situglu, ragged", situ, gradient, half, None, "scales, of scales", given, **ragged),
        _woven_variant("clamped-swiglu by 32, ragged", by_32, gradient, half, "scales", **ragged),
    ]
    return found + _group_variants()


def _group_variants() -> list[Variant]:
    """Lists the compilations for rows in groups, and for the gradient of row scales."""
    swiglu, clamped, situ, srelu = (ACTIVATIONS[name] for name in ("swiglu", "clamped-swiglu", "situglu", "srelu"))
    given, gradient, rows, square = Tensorwise(), Tensorwise(E5M2), Block1D(), Block2D(E4M3, "fp32")
    half, ways = torch.bfloat16, ("given", "measure", "measured")
    every, ragged = "scales, of scales, bias", {"way": "given", "width": 72}
    found = [_forward_variant("swiglu", swiglu, given, half, "scales", way=way) for way in ways]
    found += [_forward_variant("swiglu", swiglu, spec, half, "scales", way="given") for spec in (rows, square)]
    found += [_forward_variant("situglu", situ, spec, torch.float32, "scales", way="given") for spec in (given, rows)]
    found += [
        _forward_variant("swiglu", swiglu, given, half, sides="row", config=ROWS_ALONE, way="given"),
        _forward_variant("swiglu", swiglu, rows, half, sides="column", way="given"),
        _forward_variant("srelu", srelu, given, torch.float16, "scales", way="measured"),
        _forward_variant("clamped-swiglu by 32", clamped._replace(interleave=32), rows, half, "scales", way="given"),
    ]
    for name, fn in (("swiglu", swiglu), ("situglu", situ)):
        found += [
            _backward_variant(name, fn, gradient, half, config, every, given, way="given") for config in GROUP_CONFIGS
        ]
        found += [
            _backward_variant(name, fn, gradient, half, MEASURING, "scales", given, way="measure"),
            _backward_variant(name, fn, gradient, half, None, every, given, way="measured"),
            _backward_variant(name, fn, gradient, torch.float32, None, every, given, way="given"),
            _backward_variant(name, fn, gradient, half, None, "scales, of scales", given),
        ]
    found += [
        _backward_variant("clamped-swiglu", clamped, gradient, torch.float16, None, every, given, way="given"),
        _backward_variant("swiglu", swiglu, gradient, half, None, "", given, way="given"),
        _backward_variant("swiglu", swiglu, given, half, None, every, given, way="measured"),
        _backward_variant("srelu", srelu, gradient, half, None, every, given, way="given"),
        _backward_variant("srelu", srelu, gradient, half, None, every, given, way="measured"),
        _backward_variant("srelu", srelu, rows, half, None, every, rows, way="given"),
        _backward_variant("srelu", srelu, rows, torch.float32, None, every, way="given"),
        _backward_variant("srelu", srelu, square, half, None, every, square, way="given"),
    ]
    found += [
        _forward_variant("situglu, ragged", situ, given, half, "scales", **ragged),
        _backward_variant("swiglu, ragged", swiglu, gradient, half, None, every, given, **ragged),
        _backward_variant("situglu, ragged", situ, gradient, half, None, every, given, **ragged),
        _backward_variant("situglu, ragged", situ, gradient, torch.float32, None, every, given, **ragged),
    ]
    by_32, situ_by_32 = clamped._replace(interleave=32), situ._replace(interleave=32)
    found += [_woven_variant("clamped-swiglu by 32", by_32, gradient, half, every, way) for way in ways[::2]]
    found += [_woven_variant("clamped-swiglu by 32", by_32, gradient, half, "scales", "measure")]
    found += [_woven_variant("situglu by 32", situ_by_32, gradient, half, every, way) for way in ways[::2]]
    found += [_woven_variant("clamped-swiglu by 32", by_32, gradient, torch.float16, every)]
    return found


def _variant(title: str, kernel: Any, kinds: dict[str, Any], fixed: dict[str, Any], config: Config) -> Variant:
    signature = {name: kinds[name] for name in kernel.arg_names if kinds.get(name) is not None}
    own = {name: fixed.get(name) for name in kernel.arg_names if name not in signature}
    return Variant(f"{title} {config}", kernel, signature, own, config.warps)


def _kinds(
    fn: Function, spec: Quantizer, dtype: torch.dtype, extra: str, sides: str, way: str, config: Config
) -> tuple[Any, Any]:
    """Returns (signature, constants) of the parameters that all kernels share."""
    pointer = tile.POINTERS[dtype]
    there, fixed = _cast_signature(spec, sides != "column", sides != "row", way)
    numbers = dict.fromkeys(("M", "H", "stride_m", "dy_stride_m"), "i32")
    signature = there | numbers | {
        "dy": pointer, "x": pointer, "scales": "*fp32" if "scales" in extra else None,
        "bias": pointer if extra == "bias" else None, "parts": "*fp32" if "bias" in extra else None,
        "seed": "*i64" if extra == "seed" else None, "ds_parts": "*fp32" if "of scales" in extra else None,
    }  # fmt: skip
    if _in_groups(way):
        signature |= {**dict.fromkeys(("owner", "source_row", "used_rows"), "*i32"), "G": "i32"}
    constants = _kind(spec, dtype, way).constants(is_transposable(config))
    return signature, fixed | {"stride_k": 1, "dy_stride_k": 1, "G": 1, **function_constants(fn), **constants}


def _in_groups(way: str) -> bool:
    """Whether rows are in groups: `way` is how a group's inverse scale is found, or "one " and how that of all rows is;
    "" is given, for all rows."""
    return way != "" and not way.startswith("one ")


def _kind(spec: Quantizer, dtype: torch.dtype, way: str) -> Kind:
    return Kind(spec, dtype, way.removeprefix("one ") or "given")


def _cast_signature(spec: Quantizer, row: bool, column: bool, way: str) -> tuple[dict[str, Any], dict[str, Any]]:
    there, fixed = pointer_types.signature(spec, row, column)
    way = way.removeprefix("one ")
    if way == "measure":
        return {"running_amax": "*fp32"}, dict.fromkeys((*fixed, *there), 0) | dict.fromkeys(_POINTERS)
    if way == "measured":
        return there | {"inverse_scale": None, "running_amax": None, "measured": "*fp32"}, fixed
    return there, fixed


_POINTERS = ("row", "column", "row_scale", "column_scale", "inverse_scale")


def _title(what: str, spec: Quantizer, dtype: torch.dtype, extra: str, sides: str, way: str) -> str:
    groups = f"groups {way}" if _in_groups(way) else way
    return ", ".join(filter(None, (f"{what} {dtype} to {spec}", extra, sides and f"{sides} alone", groups)))


def _forward_variant(name, fn, spec, dtype, extra="", config=None, sides="", way="", width=0):
    config = config or tile_casts.fitting(CONFIGS, spec)
    kinds, fixed = _kinds(fn, spec, dtype, extra, sides, way, config)
    title = _title(f"activation quantize {name}", spec, dtype, extra, sides, way)
    return _variant(title, _forward_kernel, kinds, fixed | tile_constants(config, width or config.columns), config)


def _backward_variant(name, fn, spec, dtype, config=None, extra="", again=None, sides="", way="", width=0):
    more = way != "" or "of scales" in extra
    config = config or tile_casts.fitting(backward_configs(fn.gated, more, dtype), spec, again)
    kinds, fixed = _kinds(fn, spec, dtype, extra, sides, way, config)
    title = _title(f"activation quantize backward {name}", spec, dtype, extra, sides, way)
    fixed |= again_constants(None if again is None else _kind(again, dtype, way), is_transposable(config))
    fixed |= {"again_stride": 0, "again_block_stride": 0}
    if again is not None:
        title += f", again {again.fmt}"
        there, steps = _cast_signature(again, False, True, way)
        kinds |= {"again": there.get("column"), "again_scale": there.get("column_scale")}
        kinds |= {f"again_{n}": there.get(n) for n in ("inverse_scale", "running_amax", "measured")}
        kinds |= {f"again{n[6:]}": there.get(n) for n in pointer_types.STRIDES[2:]}
        fixed |= {f"again{n[6:]}": steps.get(n) for n in pointer_types.STRIDES[2:]}
    return _variant(title, _backward_kernel, kinds, fixed | tile_constants(config, width or config.columns), config)


def _woven_variant(name, fn, spec, dtype, extra="", way="", width=0):
    config = tile_casts.fitting(CONFIGS, spec)
    kinds, fixed = _kinds(fn, spec, dtype, extra, "", way, config)
    title = _title(f"activation quantize backward, woven {name}", spec, dtype, extra, "", way)
    return _variant(title, _woven_kernel, kinds, fixed | tile_constants(config, width or config.columns), config)
