"""Parameters that are codes: made of values or of codes, moved with their module."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from octavo.errors import UnsupportedConfig
from octavo.quant.qtensor import Parts
from octavo.recipes import Recipe
from octavo.recipes import recipe as resolve
from octavo.runtime.contract import WeightCast
from octavo.weights.code_memory import Kind, codes_of, fill_columns, quantize_into, room_for
from octavo.weights.given_codes import check_codes, laid_out
from octavo.weights.quantized_weight import QuantizedWeight, as_parameter


def is_whole(parts: Sequence[Any]) -> bool:
    """Return whether these are one quantized weight, or all of its groups in their order."""
    first = parts[0]
    if len(parts) == 1 and first.group is None:
        return not first.steps
    same = [isinstance(p, QuantizedWeight) and p.row_codes is first.row_codes and not p.steps for p in parts]
    return all(same) and [p.group for p in parts] == list(range(first.kind.shape[0]))


def quantized(kind: Kind, weight: Tensor) -> QuantizedWeight:
    """Return a whole weight as codes, scaled by the weight itself."""
    with torch.inference_mode(False):  # made when inference mode is on, it must still serve training
        found = QuantizedWeight.of(kind, weight.dtype, weight.device, *room_for(kind, weight.dtype, weight.device))
    quantize_into(kind, WeightCast(weight, codes_of(found, "row"), codes_of(found, "column")))
    return found


def weight_from_codes(
    codes: Tensor, scale: Tensor, recipe: str | Recipe, *, global_scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16, trainable: bool = False, keep_columns: bool = False,
) -> nn.Parameter:  # fmt: skip
    """Return a parameter that is these codes, for a layer that runs in `recipe`.

    Assign it: `layer.weight = octavo.weight_from_codes(...)`. Its values are codes times scales, whatever made these;
    nothing is rounded. It keeps the memory of `codes` where a layer can read that, and copies the scales.

    Args:
        codes: [N, K], the weight of a `Linear`, or [G, N, K], that of a `GroupedLinear` with one parameter for all
            groups. In the dtype of the format, or as uint8. E2M1 packs two codes to a byte: [..., K / 2].
        scale: one for each block of the recipe's quantizer of w: [1, 1] in fp8-delayed and fp8-current, [N, 1] in
            fp8-rowwise, [ceil(N / 128), ceil(K / 128)] in fp8-block, [N, ceil(K / 32)] in mxfp8; with a dim for groups
            in front if codes have it. Dims of one element may be left out. A scale multiplies codes back to values,
            in float32 or a smaller float; those of mxfp8 and nvfp4 are bytes.
        recipe: a name, a canonical string or a `Recipe`; the layer's own, or that of its octavo.autocast.
        global_scale: the second level of nvfp4's scales, float32: one, or one for each group.
        dtype: the dtype that the parameter reports, and in which it is read.
        trainable: as in `octavo.quantize_weights`; the parameter then requires a gradient.
        keep_columns: as there. Only where the codes of wᵀ are those of w, transposed.

    Returns:
        The parameter.

    Raises:
        UnsupportedConfig: the recipe quantizes no weight, lacks or needs a `global_scale`, or has other codes by
            column.
        UnsupportedShape: the shapes of codes and scales do not fit.
        UnsupportedDtype: codes, scales or `dtype` have another dtype.
        UnsupportedDevice: codes and scales are on two devices.

    Example:
        >>> codes = torch.ones(256, 384).to(torch.float8_e4m3fn)
        >>> layer = octavo.Linear(384, 256, bias=False, recipe="fp8-block", device="meta")
        >>> layer.weight = octavo.weight_from_codes(codes, torch.full((2, 3), 0.5), "fp8-block")
        >>> layer
        Linear(in_features=384, out_features=256, bias=False, recipe=fp8-block, weight that is codes)
        >>> layer(torch.ones(2, 384, dtype=torch.bfloat16))[0, 0]
        tensor(192., dtype=torch.bfloat16)
    """
    found = resolve(recipe)
    spec = found.linear().fprop.right
    if spec is None:
        raise UnsupportedConfig(f"weight_from_codes makes a weight for {found}, which quantizes none. Choose another.")
    given = check_codes(spec, codes, scale, global_scale, dtype)
    shape = (*codes.shape[:-1], codes.shape[-1] * spec.fmt.packed)
    kind = Kind("linear" if codes.dim() == 2 else "grouped-linear", found.key, shape, trainable, keep_columns)
    if keep_columns and not kind.turns:
        raise UnsupportedConfig(
            f"The codes of a transposed weight in {found} are other codes, made of values that weight_from_codes does "
            "not have. Leave keep_columns out: backward then multiplies by the values of the codes."
        )
    row = laid_out(kind, spec, given, dtype)
    column: Parts = ()
    if keep_columns:
        column = room_for(kind, dtype, codes.device)[1]
        fill_columns(kind, row, column, dtype)
    return as_parameter(QuantizedWeight.of(kind, dtype, codes.device, row, column), trainable)


def parameter(weight: QuantizedWeight, like: Tensor) -> nn.Parameter:
    """Return a parameter with the attributes of the one whose place it takes."""
    new = as_parameter(weight, like.requires_grad)
    new.__dict__.update(like.__dict__)
    return new


def moved(weight: Any, fn: Any, done: dict[int, Tensor]) -> nn.Parameter:
    """Return a quantized weight after `fn` of `nn.Module._apply`: codes and scales follow to its device, and keep their
    dtype. `done` maps each inner tensor's id to its result, so that parameters that share codes still share them."""
    inner = {}
    for name, tensor in weight.tensors().items():
        if id(tensor) not in done:
            new = fn(tensor)
            cast = new.dtype != tensor.dtype and name != "element"
            done[id(tensor)] = tensor.to(new.device) if cast else new
        inner[name] = done[id(tensor)]
    if all(inner[name] is tensor for name, tensor in weight.tensors().items()):
        return weight
    found = parameter(weight.with_inner(inner), weight)
    if weight.grad is not None:
        found.grad = fn(weight.grad)
    return found


def with_values(weight: QuantizedWeight) -> Tensor:
    """Return a plain tensor with the values of a parameter, whose gradient is the parameter's."""
    return weight * 1 if torch.compiler.is_compiling() else weight.dequantize()


def refuse_codes(title: str) -> NoReturn:
    """Refuse a quantized weight as an activation: kernels read memory, and it has none of its own."""
    raise UnsupportedConfig(
        f"{title} takes an activation, got a weight that is stored as codes. Pass its values: weight.dequantize()."
    )
