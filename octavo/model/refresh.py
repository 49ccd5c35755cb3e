"""`octavo.refresh_weights` and `octavo.quantize_weights`: refresh a model's cached codes, or keep only codes."""

from collections.abc import Iterable

from torch import nn

from octavo.errors import UnsupportedConfig
from octavo.model.layer_lookup import check_model, joined, layers
from octavo.ops.quantized import Quantized


def refresh_weights(model: nn.Module) -> None:
    """Quantize every cached weight again, in place.

    Call it after the optimizer has changed the weights, or let `octavo.attach` call it. A layer has a cache once it was
    called with `is_first_microbatch=True`, or in `octavo.microbatch(first=True)`.

    Args:
        model: a module with Octavo layers.

    Raises:
        UnsupportedDtype: `model` is no module.

    Example:
        >>> layer = octavo.Linear(16, 8, recipe="fp8-block")
        >>> y = layer(torch.ones(4, 16), is_first_microbatch=True)
        >>> with torch.no_grad():
        ...     _ = layer.weight.mul_(2)
        >>> octavo.refresh_weights(layer)
        >>> layer(torch.ones(4, 16), is_first_microbatch=False).shape
        torch.Size([4, 8])
    """
    check_model(model, "refresh_weights")
    refresh_layers([module for _, module in layers(model)])


def refresh_layers(modules: Iterable[Quantized]) -> None:
    """Do the same as `refresh_weights`, for the given layers."""
    for module in modules:
        stored = module._codes
        if stored.recipe is not None and not stored.has_quantized_weight:
            observe = stored.recipe.stateful and module.training
            stored.refresh(module, stored.recipe, column=False, observe=observe)


def quantize_weights(
    model: nn.Module, trainable: bool = False, keep_columns: bool = False, preserve_high_precision: bool = False
) -> None:
    """Keep the weights of a model only as codes, to save memory: a byte a weight in FP8, and the scales.

    It changes every Octavo layer whose own recipe quantizes. The new parameters read as the dequantized values, and
    quantize the values that are written to them. Build optimizers afterwards. `octavo.revert` makes weights of the
    values again.

    Args:
        model: a module with Octavo layers, changed in place.
        trainable: let optimizers update the weights. `octavo.optim.AdamW` keeps the values that codes are made of in
            its state; for any other torch optimizer Octavo keeps them in float32 from its first step on, since an
            update is mostly smaller than the distance of two codes. With False a step of an optimizer on such a weight
            raises.
        keep_columns: keep the codes of wᵀ, which dx multiplies, beside those of w, in twice the memory. With False
            backward makes them where that is a transpose of bytes (fp8-delayed, fp8-current, fp8-block, nvfp4), in
            memory that it frees. Where it is not (fp8-rowwise, mxfp8), backward multiplies dy by the values of the
            codes, without a cast of dy: the weight is rounded once, and dx takes the time of a GEMM in bf16.
        preserve_high_precision: keep the present values on the host, as `weight.high_precision_init`, until the first
            step of `octavo.optim.AdamW`, whose master copy then begins with them: training goes on as if the weights
            had stayed. Without it the master copy begins with the values of the codes. For `trainable=True` only.

    Raises:
        UnsupportedDtype: `model` is no module.
        UnsupportedConfig: no layer's own recipe quantizes; a weight is shared by several layers, sharded or
            parametrized; or values are to be preserved for an optimizer of frozen weights. The model is then unchanged.

    Example:
        >>> model = nn.Sequential(octavo.Linear(16, 8, recipe="fp8-block"))
        >>> octavo.quantize_weights(model)
        >>> model
        Sequential(
          (0): Linear(in_features=16, out_features=8, bias=True, recipe=fp8-block, weight that is codes)
        )
    """
    check_model(model, "quantize_weights")
    if preserve_high_precision and not trainable:
        raise UnsupportedConfig(
            "quantize_weights(preserve_high_precision=True) keeps values for an optimizer, and trainable=False has "
            "none. Write trainable=True, or leave preserve_high_precision out."
        )
    quantized = [
        (path, module)
        for path, module in layers(model)
        if module.recipe is not None and module.recipe.linear().fprop.right is not None
    ]
    if not quantized:
        raise UnsupportedConfig(
            "quantize_weights found no layer whose own recipe quantizes. Call octavo.convert(model, recipe) first."
        )
    names = _names_of_parameters(model)
    for path, module in quantized:
        module._check_may_be_codes()
        for weight in module._weight_parts():
            _refuse_tied(path, names[id(weight)])
    for _, module in quantized:
        module._replace_weight_by_codes(trainable, keep_columns, preserve_high_precision)


def _names_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    """Return all names that each parameter has in the model, by its id."""
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            names.setdefault(id(parameter), []).append(joined(path, name))
    return names


def _refuse_tied(path: str, names: list[str]) -> None:
    """Raise if a weight of the layer at `path` has several names."""
    if len(names) > 1:
        first, *others = sorted(names, key=lambda name: not name.startswith(path))
        raise UnsupportedConfig(
            f"quantize_weights takes weights that one layer has, and {first} is also {', '.join(others)}. Untie them, "
            "or convert that layer with the recipe bf16."
        )
