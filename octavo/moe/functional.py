"""`octavo.grouped_linear`: the product of `octavo.GroupedLinear` as a function, of weights that the caller keeps."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from octavo._torch.fakes import FakeTensor
from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape, check_choice
from octavo.formats import FLOATS
from octavo.ops.grouped_inputs import splits_on
from octavo.ops.grouped_linear_layer import Buffers, Inputs
from octavo.ops.inputs import arrived, check_input, check_weight
from octavo.ops.linear_config import call_key
from octavo.ops.quantized import UNQUANTIZED, wanted
from octavo.quant.groups import MAX_GROUPS
from octavo.recipes import Recipe
from octavo.recipes.ambient import ambient, autocast
from octavo.runtime.call import Stage, call, takes_nodes
from octavo.runtime.contract import DTYPE_NAMES


def grouped_linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    sizes: Tensor | list[int],
    bias: Tensor | None = None,
    *,
    recipe: str | Recipe | None = None,
    tail: str = "zero",
) -> Tensor:
    """Multiply each group of rows by its own weight: y[g] = x[g] · W[g]ᵀ + b[g].

    It computes what `octavo.GroupedLinear` computes, bit for bit. Use the layer for what it remembers from call to
    call: delayed scaling, the stochastic rounding of nvfp4, cached weights, `main_grad`.

    Args:
        x: the rows of all groups, one group after the other [..., K]; leading dims are folded into rows. Rows after
            the last group are not read.
        weight: one tensor [groups, N, K], or a weight [N, K] for each group, which are stacked.
        sizes: the number of rows of each group, int32 or int64 on the device of x. A list, or a tensor elsewhere, is
            copied there, except in a graph, where it raises.
        bias: None, the default, or one tensor [groups, N].
        recipe: how to quantize: a name such as "fp8-block", a canonical string or a `Recipe`. None, the default,
            follows `octavo.autocast`, and does not quantize outside of it.
        tail: rows of y and dx after the last group: "zero" writes zeros, "untouched" leaves any values there.

    Returns:
        y [..., N], in the dtype of x or of torch.autocast where that is on.

    Raises:
        UnsupportedConfig: the recipe needs state; `tail` is unknown; or `sizes` cannot be in
            a graph.
        UnsupportedShape: a tensor has the wrong shape.
        UnsupportedDtype: a tensor has the wrong dtype.
        UnsupportedDevice: x and the weight are on two devices.

    Example:
        >>> x, weight = torch.ones(6, 16), torch.ones(2, 8, 16)
        >>> y = octavo.grouped_linear(x, weight, torch.tensor([2, 3]), recipe="fp8-block")
        >>> y.shape, y[5].count_nonzero().item()
        (torch.Size([6, 8]), 0)
    """
    check_choice(tail, ("zero", "untouched"), what="tail")
    x, weight = arrived(x), _stacked(weight)
    check_input("grouped_linear", x)
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    _check(x, weight, bias)
    rows = x.flatten(0, -2)
    splits = splits_on(weight.device, sizes, weight.shape[0], rows.shape[0], "sizes")
    grads = wanted(rows.requires_grad, (weight,), bias)
    key = call_key(
        "grouped-linear", _stateless(recipe, any(grads)), dtype=DTYPE_NAMES[x.dtype],
        weight_dtype=DTYPE_NAMES[weight.dtype], bias_dtype="" if bias is None else DTYPE_NAMES[bias.dtype],
        wants_dx=grads.dx, wants_dw=grads.dw, wants_db=grads.db, tail=tail,
    )  # fmt: skip
    as_nodes = takes_nodes() or isinstance(rows, FakeTensor) or rows.is_meta  # those two have shapes only
    inputs = Inputs(rows, weight, bias, splits)[1:]
    buffers = (() if as_nodes else None, *[None] * (len(Buffers._fields) - 1))
    stage = Stage("grouped-linear", key, inputs, buffers, any(grads))
    return call(stage, rows, as_nodes)[0].view(*x.shape[:-1], weight.shape[1])


def _stacked(weight: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(weight, Tensor):
        check_weight("grouped_linear", weight, "its weight")
        return weight
    parts = list(weight) if isinstance(weight, Iterable) else [weight]
    for part in parts:
        if not isinstance(part, Tensor):
            raise UnsupportedDtype(
                f"grouped_linear takes one weight [groups, N, K], or one [N, K] per group, got {type(part).__name__}."
            )
        check_weight("grouped_linear", part, "its weight")
        if part.shape != parts[0].shape:
            raise UnsupportedShape(
                f"grouped_linear takes weights of one shape, got {tuple(parts[0].shape)} and {tuple(part.shape)}."
            )
    if not parts:
        raise UnsupportedShape("grouped_linear takes a weight for each group, got none.")
    return torch.stack(parts)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.dtype not in FLOATS or (bias is not None and bias.dtype not in FLOATS):
        got = weight.dtype if bias is None else f"{weight.dtype} and {bias.dtype}"
        raise UnsupportedDtype(
            f"grouped_linear takes a float32, bfloat16 or float16 weight and bias, got {got}. Cast them."
        )
    if weight.dim() != 3 or not 1 <= weight.shape[0] <= MAX_GROUPS:
        raise UnsupportedShape(
            f"grouped_linear takes a weight [groups, N, K] of 1 to {MAX_GROUPS} groups, got {tuple(weight.shape)}."
        )
    if x.dim() < 2 or x.shape[-1] != weight.shape[2]:
        raise UnsupportedShape(
            f"This weight takes x [..., {weight.shape[2]}] of two dims or more, got {tuple(x.shape)}. Check the layer "
            "before it, or the weight."
        )
    if bias is not None and tuple(bias.shape) != tuple(weight.shape[:2]):
        raise UnsupportedShape(f"The bias of this weight is {tuple(weight.shape[:2])}, got {tuple(bias.shape)}.")
    if x.device != weight.device or (bias is not None and bias.device != x.device):
        raise UnsupportedDevice(f"x is on {x.device} and the weight on {weight.device}. Move them together.")


def _stateless(recipe: str | Recipe | None, trains: bool) -> Recipe:
    """Return the recipe of a call, which must need nothing from the call before."""
    found = ambient.recipe if recipe is None else autocast(recipe).recipe  # which knows how to parse in a graph
    if found is None:
        return UNQUANTIZED
    if found.stateful:
        raise UnsupportedConfig(
            f"{found} scales by what it measured in earlier calls, and a function keeps nothing. Use "
            "octavo.GroupedLinear, or fp8-current."
        )
    if trains and found.linear().is_stochastic:
        raise UnsupportedConfig(
            f"{found} rounds gradients from a counter that advances, and a function keeps nothing. Use "
            "octavo.GroupedLinear, or nvfp4(stochastic=False)."
        )
    return found
