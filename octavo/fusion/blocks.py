"""LayerNormLinear and LayerNormMLP, two blocks of a transformer: Sequentials that require their fusions."""

from collections.abc import Mapping
from contextlib import nullcontext
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.utils.checkpoint import checkpoint

from octavo.communication.groups import Group
from octavo.errors import UnsupportedConfig, check_choice, check_whole
from octavo.foreign_keywords import refuse, refused
from octavo.fusion.recomputation import FirstRun
from octavo.fusion.rules import conditions
from octavo.fusion.runs import RECAST
from octavo.fusion.sequential import Sequential
from octavo.kernels.activation import ACTIVATIONS
from octavo.ops import activation as activations
from octavo.ops.inputs import refuse_symbol
from octavo.ops.linear import Flag, Linear
from octavo.ops.norm import LayerNorm, RMSNorm
from octavo.ops.recipe_of_layers import RecipeOfLayers
from octavo.ops.views import MakeExtraOutput
from octavo.quant import QTensor
from octavo.recipes import Recipe
from octavo.recipes.ambient import ambient, autocast

RETURNED = "returned"  # the operation of a block that returns the norm's output
NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
KINDS: dict[str, Any] = {
    kind.NAME: kind
    for kind in vars(activations).values()
    if isinstance(kind, type) and issubclass(kind, activations.Activation) and "NAME" in kind.__dict__
    and kind.NAME != "linear"
}  # fmt: skip


SETTINGS = [name for name, p in signature(Linear).parameters.items() if p.kind is p.KEYWORD_ONLY]
OF_BLOCKS = ("parallel_mode", "column_blocks")  # keywords of Linear that LayerNormMLP sets itself


def _check_settings(block: type, settings: Mapping[str, Any], *, but: tuple[str, ...] = ()) -> None:
    """Raise for keywords that neither the block nor its Linears take."""
    title, own = block.__name__, signature(block).parameters
    names = [name for name in (*own, *SETTINGS) if name not in ("settings", *but)]
    for name in settings:
        if name not in names:
            refuse(title, name, names)


def fc1_width(activation: str, ffn_hidden_size: int) -> int:
    """Return the output features of a layer before this activation: a gated one takes twice as many as it returns."""
    check_choice(activation, tuple(KINDS), what="activation")
    check_whole(ffn_hidden_size, what="ffn_hidden_size")
    return ffn_hidden_size * (2 if ACTIVATIONS[activation].gated else 1)


def _activation(name: str, params: Mapping[str, Any] | None) -> Any:
    kind = KINDS[name]
    try:
        return kind(**(params or {}))
    except TypeError:
        takes = ", ".join(signature(kind).parameters)
        raise UnsupportedConfig(
            f"activation_params of {name!r} are keywords of octavo.ops.{kind.__name__} ({takes}), got {params!r}."
        ) from None


def _norm(kind: str, size: int, eps: float, zero_centered: bool, device: Any, dtype: Any) -> Any:
    check_choice(kind, tuple(NORMS), what="normalization")
    return NORMS[kind](size, eps=eps, zero_centered_gamma=zero_centered, device=device, dtype=dtype)


def _share(norm: Any, linear: Linear, sequence_parallel: bool, group: Group) -> None:
    """Tell a norm of the ranks that have it too."""
    if sequence_parallel:
        norm.sum_gradients_over(group)
    elif linear.parallel is not None:
        norm.shared_by = linear.parallel.group


def _required(fusions: tuple[str, ...], return_layernorm_output: bool) -> tuple[str, ...]:
    """Return the fusions that a block requires: a norm whose output is returned writes it, and writes no codes."""
    return tuple([name for name in fusions if not (return_layernorm_output and name == "norm-linear")])


class _Block(RecipeOfLayers, Sequential):
    """A Sequential that requires its fusions if the recipe quantizes."""

    _allowed_unsupported = (*Sequential._allowed_unsupported, conditions.QUANTIZED, conditions.KEPT_AS_CODES, RECAST)
    _way_out = "A plain octavo.Sequential of the same modules runs without it."

    activation_recompute = False
    _last = ""  # the name of the last Linear
    _modes: ClassVar[dict[str, str]] = {}  # by the name of a Linear: its parallel_mode in a block that is split

    def set_tensor_parallel_group(self, group: Group, sequence_parallel: bool | None = None) -> None:
        """Split a block over ranks, or over another group. Its weights and biases are taken as this rank's parts.

        Args:
            group: the ranks: a ProcessGroup, its name, a DeviceMesh of one dim or (mesh, dim); None is the default
                group.
            sequence_parallel: as in the constructor; None keeps the block's own.

        Raises:
            UnsupportedConfig: torch knows no such group.

        Example:
            >>> block = octavo.LayerNormMLP(64, 96, activation="swiglu")
            >>> block.set_tensor_parallel_group(None)
            >>> block.fc1.parallel.mode, block.fc1.parallel.blocks, block.fc2.parallel.mode
            ('column', 2, 'row')
        """
        layers = [self._modules[name] for name in self._modes]
        for layer, mode in zip(layers, self._modes.values(), strict=True):
            layer.set_tensor_parallel_group(group, mode, sequence_parallel)  # type: ignore[union-attr, operator]
        norm: Any = self._modules["norm"]
        norm.sums_gradients = False
        _share(norm, layers[0], layers[0].parallel.sequence, group)  # type: ignore[arg-type, union-attr]

    def _check_required(self, layout: Any, records: list[Any]) -> None:
        layers = [module for module in self.children() if isinstance(module, Linear) and module.parallel is not None]
        if not any([layer._split_over_ranks() is not None for layer in layers]):
            super()._check_required(layout, records)  # collectives between the modules keep some from fusing

    def reset_parameters(self) -> None:
        """Initialise the parameters of all modules as their constructors do."""
        for module in self.children():
            reset: Any = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()

    def _keywords(self, op_kwargs: Any, is_first_microbatch: Flag) -> Any:
        """Return op_kwargs with this keyword for every Linear."""
        if is_first_microbatch is None:
            return op_kwargs
        own = {module: {"is_first_microbatch": is_first_microbatch} for module in self if isinstance(module, Linear)}
        return {**own, **(op_kwargs or {})}

    def _returns_bias_of(self) -> Linear | None:
        """Return the Linear whose bias the block returns; None if it returns none."""
        last: Any = self._modules.get(self._last)
        return last if isinstance(last, Linear) and last.return_bias and last.bias_by_block else None

    def _flattens(self) -> bool:
        if self.activation_recompute or self._returns_bias_of() is not None:
            return False
        return super()._flattens() and RETURNED not in self._modules

    def _with_bias(self, made: Any) -> Any:
        """Return y, with return_bias=True the bias of the last Linear, and then the norm's output if it is returned."""
        last = self._returns_bias_of()
        if last is None:
            return made
        y, *more = made if isinstance(made, tuple) else (made,)
        return y, last._bias_of_caller(), *more

    @classmethod
    def _plain_forward(cls) -> Any:
        return _Block.forward

    def forward(  # type: ignore[override]
        self,
        input: Tensor | QTensor,
        *extra_inputs: Tensor,
        is_first_microbatch: Flag = None,
        op_kwargs: Mapping[nn.Module | int, dict[str, Any]] | None = None,
    ) -> "Tensor | QTensor | tuple[Any, ...]":
        """Run the block. With `activation_recompute=True` it saves only x, and backward runs forward again.

        Args:
            input: x [..., in_features].
            *extra_inputs: extra inputs, if the block was edited and its operations take any.
            is_first_microbatch: as in `octavo.Linear.forward`, for all Linears.
            op_kwargs: keywords for single operations of this call, as in `Sequential.forward`.

        Returns:
            y [..., out_features], in the dtype of x. With `return_bias=True` it is a tuple of y without the bias of the
            last Linear, and the bias. With `return_layernorm_output=True` the norm's output is the last of a tuple.
        """
        if type(input) is not Tensor and isinstance(input, Proxy):
            refuse_symbol(type(self).__name__)
        op_kwargs = self._keywords(op_kwargs, is_first_microbatch)
        if self.activation_recompute and torch.is_grad_enabled():
            run, recipe = super().forward, ambient.recipe

            first: FirstRun | None = None

            def again(x: Tensor) -> Any:
                nonlocal first
                ambient_again = nullcontext() if recipe is None else autocast(recipe)  # backward may run outside of it
                with ambient_again, nullcontext() if first is None else first.again():
                    y = run(x, *extra_inputs, op_kwargs=op_kwargs)
                if first is None and not torch.compiler.is_compiling():  # a graph saves its inputs as they are
                    first = FirstRun(self, (x, *extra_inputs))
                return y

            return self._with_bias(checkpoint(again, input, use_reentrant=False))
        return self._with_bias(super().forward(input, *extra_inputs, op_kwargs=op_kwargs))


class LayerNormLinear(_Block):
    """A norm and a linear layer that run as one: the norm writes the codes that the Linear multiplies.

    It is a `Sequential` of `norm` and `linear` that requires its fusion. A call in which the norm cannot write the
    codes raises an error that says why; a plain `Sequential` of the same modules runs such a call unfused. Three kinds
    of calls may run unfused without an error: those in a recipe that does not quantize fprop (bf16) or keeps x
    unquantized for wgrad, the first step of fp8-delayed, and those in a torch.autocast that casts x.

    Args:
        in_features: the size of the last dim of x, over which the norm is taken.
        out_features: the size of the last dim of y.
        eps: added to the variance, or to the mean square in RMSNorm, before the root is taken.
        bias: whether the Linear has a bias.
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: the norm multiplies by 1 + its weight instead of its weight.
        recipe: the recipe of the Linear: a name, a canonical string or a `Recipe`. None follows `octavo.autocast`.
        device: the device of the parameters.
        dtype: the dtype of the parameters.
        parallel_mode: "column" gives each rank of `tp_group` a part of the output features, as in `octavo.Linear`;
            None does not split them. The norm needs all input features, so "row" is refused.
        sequence_parallel: each rank has a part of the rows of x, which are gathered after the norm. The gradients of
            the norm's parameters are summed over ranks.
        tp_group: the ranks, as in `octavo.Linear`.
        return_layernorm_output: return the norm's output too, after y and the bias. It is written then, and the norm
            does not write codes in its place.
        **settings: further keywords of `octavo.Linear`, such as `keep_weight_codes` and `return_bias`.

    Raises:
        UnsupportedConfig: `normalization`, the recipe or a setting is unknown.

    Example:
        >>> block = octavo.LayerNormLinear(64, 32, normalization="RMSNorm", recipe="fp8-block")
        >>> block(torch.ones(8, 64)).shape
        torch.Size([8, 32])
        >>> block.explain(torch.ones(8, 64)).fired
        ('norm-linear',)
    """

    _last = "linear"
    _modes: ClassVar[dict[str, str]] = {"linear": "column"}

    @refused
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        recipe: str | Recipe | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        sequence_parallel: bool = False,
        tp_group: Group = None,
        return_layernorm_output: bool = False,
        **settings: bool,
    ) -> None:
        _check_settings(LayerNormLinear, settings)
        if parallel_mode == "row":
            raise UnsupportedConfig(
                "LayerNormLinear(parallel_mode='row') gives each rank a part of x's features, and the norm needs all "
                "of them. Use a norm, then octavo.Linear(parallel_mode='row') where x is split."
            )
        norm = _norm(normalization, in_features, eps, zero_centered_gamma, device, dtype)
        linear = Linear(
            in_features, out_features, bias, device, dtype, recipe=recipe,
            parallel_mode=parallel_mode, sequence_parallel=sequence_parallel, tp_group=tp_group, **settings,  # type: ignore[arg-type]
        )  # fmt: skip
        _share(norm, linear, sequence_parallel, tp_group)
        linear.bias_by_block = linear.return_bias
        extra = {RETURNED: MakeExtraOutput()} if return_layernorm_output else {}
        require = _required(("norm-linear",), return_layernorm_output)
        super().__init__({"norm": norm, **extra, "linear": linear}, require=require)


class LayerNormMLP(_Block):
    """The MLP of a transformer: a norm, a Linear, an activation and a Linear that run as one.

    The norm and the activation write the codes that the Linears multiply. It is a `Sequential` of `norm`, `fc1`,
    `activation` and `fc2` that requires these fusions, with the exceptions of `LayerNormLinear`.

    Args:
        hidden_size: the size of the last dim of x and of y.
        ffn_hidden_size: the size of the activated values. A gated activation makes `fc1` twice as wide.
        eps: added to the variance, or to the mean square in RMSNorm, before the root is taken.
        bias: whether the Linears have biases.
        normalization: "LayerNorm" or "RMSNorm".
        activation: "gelu", "qgelu", "relu", "srelu" or "silu"; or gated: "glu", "geglu", "qgeglu", "reglu", "sreglu",
            "swiglu", "clamped-swiglu" or "situglu".
        activation_params: keywords of that activation's class, such as {"limit": 7.0} of `octavo.ops.ClampedSwiGLU`.
        zero_centered_gamma: the norm multiplies by 1 + its weight instead of its weight.
        recipe: the recipe of both Linears: a name, a canonical string or a `Recipe`. None follows `octavo.autocast`.
        activation_recompute: save only x for backward, which runs forward again, with the parameters, scales and
            settings of the first run: it raises if one was changed in between. Choose it if memory is short.
        device: the device of the parameters.
        dtype: the dtype of the parameters.
        set_parallel_mode: split the block over the ranks of `tp_group`: `fc1` by its output features (each half of a
            gated activation's), `fc2` by its input features.
        sequence_parallel: each rank has a part of the rows of x and y. The gradients of the norm's parameters and of
            fc2's bias are summed over ranks.
        tp_group: the ranks, as in `octavo.Linear`.
        return_layernorm_output: return the norm's output too, as in `LayerNormLinear`.
        **settings: further keywords of `octavo.Linear`, for both; `return_bias` is that of `fc2`. Here
            `keep_weight_codes` is False by default: backward quantizes the weights again instead of keeping their
            codes.

    Raises:
        UnsupportedConfig: `normalization`, `activation`, the recipe or a setting is unknown, or `ffn_hidden_size` is no
            number from 1 up.

    Example:
        >>> mlp = octavo.LayerNormMLP(64, 96, normalization="RMSNorm", activation="swiglu", recipe="fp8-block")
        >>> mlp(torch.ones(8, 64)).shape
        torch.Size([8, 64])
        >>> mlp.fc1.weight.shape
        torch.Size([192, 64])
    """

    _last = "fc2"
    _modes: ClassVar[dict[str, str]] = {"fc1": "column", "fc2": "row"}

    @refused
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, Any] | None = None,
        zero_centered_gamma: bool = False,
        recipe: str | Recipe | None = None,
        activation_recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        set_parallel_mode: bool = False,
        sequence_parallel: bool = False,
        tp_group: Group = None,
        return_layernorm_output: bool = False,
        **settings: bool,
    ) -> None:
        _check_settings(LayerNormMLP, settings, but=OF_BLOCKS)
        shared: dict[str, Any] = {"keep_weight_codes": False, **settings, "recipe": recipe}
        shared |= {"bias": bias, "device": device, "dtype": dtype}
        shared |= {"sequence_parallel": sequence_parallel, "tp_group": tp_group}
        again = {"gather_again": shared.pop("gather_again", False)}  # of x, which fc1 alone gathers
        returned = {"return_bias": shared.pop("return_bias", False)}  # of fc2
        wide = fc1_width(activation, ffn_hidden_size)
        modes = ("column", "row") if set_parallel_mode else (None, None)
        modules = {
            "norm": _norm(normalization, hidden_size, eps, zero_centered_gamma, device, dtype),
            **({RETURNED: MakeExtraOutput()} if return_layernorm_output else {}),
            "fc1": Linear(
                hidden_size, wide, parallel_mode=modes[0], column_blocks=wide // ffn_hidden_size, **again, **shared
            ),
            "activation": _activation(activation, activation_params),
            "fc2": Linear(ffn_hidden_size, hidden_size, parallel_mode=modes[1], **returned, **shared),
        }
        modules["fc2"].bias_by_block = modules["fc2"].return_bias
        _share(modules["norm"], modules["fc1"], sequence_parallel, tp_group)
        self.activation_recompute = activation_recompute
        super().__init__(modules, require=_required(("norm-linear", "activation-linear"), return_layernorm_output))
