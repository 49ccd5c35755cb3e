"""`octavo.GroupedLinear`: one linear layer for each group of rows, such as the tokens of each expert."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape, check_choice
from octavo.formats import FLOATS
from octavo.layers import grouped_linear as layer
from octavo.layers.linear import DTYPES
from octavo.lower import is_watched, run, run_in_graph
from octavo.modules.ambient import ambient
from octavo.modules.main_grad import MainGrad, graph_buffer, has_buffer
from octavo.recipes import BF16, Recipe
from octavo.recipes import recipe as resolve

UNQUANTIZED = BF16()
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class GroupedLinear(nn.Module):
    """y[g] = x[g] · W[g]ᵀ + b[g] for ragged groups of rows, whose sizes stay on the device.

    recipe                     a name, a canonical string or a Recipe; None follows `octavo.autocast`, else bf16
    fuse_wgrad_accumulation    dW is added to `weight.main_grad` (octavo.modules.main_grad)
    tail                       rows of y and dx after the last group: "zero", or "untouched", which may be anything
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: str | Recipe | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        single_grouped_weight: bool = True,
        single_grouped_bias: bool = True,
        scale_bias: bool = False,
        delay_wgrad_compute: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tail: str = "zero",
    ) -> None:
        super().__init__()
        check_choice(tail, ("zero", "untouched"), what="GroupedLinear.tail")
        _refuse_later(
            single_grouped_weight=(single_grouped_weight, True),
            single_grouped_bias=(single_grouped_bias, True),
            scale_bias=(scale_bias, False),
            delay_wgrad_compute=(delay_wgrad_compute, False),
        )
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.tail = tail
        self.weight = nn.Parameter(torch.empty(num_groups, out_features, in_features, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(num_groups, out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.recipe = None if recipe is None else _checked(resolve(recipe))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As nn.Linear draws them, for each group."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self,
        x: Tensor,
        m_splits: Tensor | list[int],
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """y [..., N] of x [..., K], whose rows, leading dims folded, belong to groups of `m_splits` rows each.

        out [rows, N] and dgrad_out [rows, K] are buffers of the caller's that y and the gradient of x are written to,
        and their tails left alone. What comes back is `out` itself, as part of the graph: for the next step, pass
        `out.detach()`. `dgrad_out` is the whole gradient only if x is used nowhere else."""
        _refuse_later(is_first_microbatch=(is_first_microbatch, None), scales=(scales, None))
        recipe = self.recipe or _checked(ambient.recipe or UNQUANTIZED)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        self._check(x)
        splits = self._splits(m_splits)
        rows = x.reshape(-1, x.shape[-1])
        grads = self._wanted(rows)
        self._check_buffers(recipe, rows, grads, out, dgrad_out)
        main_grad, dummy = self._gradient_target() if "w" in grads else ("", False)
        key = (
            f"grouped-linear(recipe={recipe.key},dtype='{_NAMES[x.dtype]}',weight_dtype='{_NAMES[self.weight.dtype]}',"
            f"bias_dtype='{'' if self.bias is None else _NAMES[self.bias.dtype]}',grads='{grads}',"
            f"main_grad='{main_grad}',dummy_grad={dummy},tail='{self.tail}')"
        )
        # what backward does with Python objects an operator cannot, so that a mode that watches does not see it
        plain = main_grad == "" and out is None and dgrad_out is None
        if torch.compiler.is_compiling() or (is_watched() and plain):
            inputs = layer.Inputs(rows, self.weight, self.bias, splits)
            y = run_in_graph("grouped-linear", key, inputs, (self._graph_buffer() if main_grad else None,))[0]
        else:
            elsewhere = main_grad != "" and not dummy
            inputs = layer.Inputs(rows, self.weight.detach() if elsewhere else self.weight, self.bias, splits, out)
            buffers = layer.Buffers(MainGrad(self.weight) if main_grad else None, dgrad_out)
            y = run(
                layer, layer.config(key), inputs, buffers, differentiable=grads != "", anchored=elsewhere  # type: ignore[arg-type]
            )[0]  # fmt: skip
        return y.view(*x.shape[:-1], self.out_features)

    def _wanted(self, x: Tensor) -> str:
        """Which gradients can be asked for."""
        if not torch.is_grad_enabled():
            return ""
        bias = self.bias is not None and self.bias.requires_grad
        return ("x" if x.requires_grad else "") + ("w" if self.weight.requires_grad else "") + ("b" if bias else "")

    def _gradient_target(self) -> tuple[str, bool]:
        if not self.fuse_wgrad_accumulation:
            return "", False
        mode = "overwrite" if getattr(self.weight, "overwrite_main_grad", False) else "add"
        return mode, hasattr(self.weight, "grad_added_to_main_grad")

    def _graph_buffer(self) -> Tensor:
        if not has_buffer(self.weight):
            raise UnsupportedConfig(
                "GroupedLinear(fuse_wgrad_accumulation=True) compiles with weight.main_grad, or get_main_grad(), in "
                "place before forward. Set it first."
            )
        return graph_buffer(self.weight)

    def _check(self, x: Tensor) -> None:
        if x.dtype not in FLOATS:
            raise UnsupportedDtype(f"GroupedLinear takes float32, bfloat16 or float16, got {x.dtype}. Cast x first.")
        if x.dim() < 2 or x.shape[-1] != self.in_features:
            raise UnsupportedShape(
                f"This GroupedLinear takes inputs [..., {self.in_features}] of two dims or more, got {tuple(x.shape)}. "
                "Check the layer before it, or in_features."
            )
        if x.device != self.weight.device:
            raise UnsupportedDevice(f"x is on {x.device} and the weight on {self.weight.device}. Move them together.")

    def _check_buffers(
        self, recipe: Recipe, x: Tensor, grads: str, out: Tensor | None, dgrad_out: Tensor | None
    ) -> None:
        """By what they say of themselves: nothing is read."""
        given = [(name, b) for name, b in (("out", out), ("dgrad_out", dgrad_out)) if b is not None]
        if given and (torch.compiler.is_compiling() or recipe.linear().fprop.left is None):
            raise UnsupportedConfig(
                f"GroupedLinear({given[0][0]}=...) works in eager mode with a quantized recipe in this "
                "version. Leave it out."
            )
        for name, buffer in given:
            want = (x.shape[0], self.out_features if name == "out" else self.in_features)
            if (
                tuple(buffer.shape) != want or buffer.dtype != x.dtype or buffer.device != x.device
                or not buffer.is_contiguous() or buffer.requires_grad
            ):  # fmt: skip
                raise UnsupportedShape(
                    f"{name} must be {x.dtype} {want} on {x.device}, contiguous, without requires_grad; got "
                    f"{buffer.dtype} {tuple(buffer.shape)} on {buffer.device}, strides {buffer.stride()}, "
                    f"requires_grad={buffer.requires_grad}. For a buffer that was returned before, pass it detached."
                )
        if dgrad_out is not None and "x" not in grads:
            raise UnsupportedConfig("dgrad_out is for the gradient of x, and x needs none here. Leave it out.")

    def _splits(self, splits: Tensor | list[int]) -> Tensor:
        """On the device; from elsewhere they are copied there, which a graph would do only once, at capture."""
        device = self.weight.device
        if not isinstance(splits, Tensor) or splits.device != device:
            captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if torch.compiler.is_compiling() or captured:
                raise UnsupportedConfig(
                    f"In a graph m_splits must be a tensor on {device}: the sizes of a list, or of a tensor elsewhere, "
                    "would be those of this moment for ever. Put them in a device tensor and overwrite it."
                )
            splits = torch.as_tensor(splits).to(device, non_blocking=True)
        if splits.dim() != 1 or splits.shape[0] != self.num_groups:
            raise UnsupportedShape(
                f"m_splits has one size for each of the {self.num_groups} groups, got {tuple(splits.shape)}."
            )
        return splits

    def extra_repr(self) -> str:
        recipe = "from octavo.autocast" if self.recipe is None else self.recipe.key
        sizes = f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, recipe={recipe}, tail={self.tail}"


def _checked(recipe: Recipe) -> Recipe:
    if why := layer.refusal(recipe):
        raise UnsupportedConfig(f"GroupedLinear cannot run in {recipe}: {why}. Use fp8-block or bf16.")
    return recipe


def _refuse_later(**settings: tuple[Any, Any]) -> None:
    """What the signature has, and this version does not."""
    for name, (value, only) in settings.items():
        if value is not only:
            raise UnsupportedConfig(f"GroupedLinear({name}=...) is not part of this version. Leave it at {only}.")
