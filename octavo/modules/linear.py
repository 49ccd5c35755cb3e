"""`octavo.Linear`: an `nn.Linear` whose three GEMMs follow a recipe.

The parameters, their names, their initialisation and the state dict are `nn.Linear`'s; what a recipe needs besides is
`octavo.modules.quantized`'s. `forward` gathers both and calls `octavo.layers.linear`.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from octavo._torch.tracing import is_inside_operator, is_watched, saved_elsewhere
from octavo.ambient import ambient
from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.formats import FLOATS
from octavo.fuser.inputs import arrived, check_input, check_weight
from octavo.fuser.operation import Edge, FusibleOperation, Stage
from octavo.kernels.gemm import spec_route
from octavo.layers.contract import NAMES
from octavo.layers.linear import Config, Inputs, layer
from octavo.layers.linear_config import call_key
from octavo.modules.quantized import Quantized, outside, wanted
from octavo.quant import QTensor
from octavo.quant.qtensor import Parts
from octavo.quant.quantizer import Quantizer
from octavo.recipes import Recipe
from octavo.values import Value
from octavo.weights.held import HeldWeight, linked_token, parameter
from octavo.wgrad.graph_refusal import graph_refusal


class Linear(FusibleOperation, Quantized, nn.Linear):
    """y = x · Wᵀ + b in low precision.

    recipe                     a name, a canonical string or a Recipe; None follows `octavo.autocast`, else bf16
    return_bias                forward returns (y without the bias, bias)
    fuse_wgrad_accumulation    dW is added to `weight.main_grad` (octavo.wgrad.main_grad)
    delay_wgrad_compute        dW waits until `backward_dw()`
    keep_weight_codes          False: the weight's codes for dX are made again in backward, from the weight itself: half
                               its size is not kept, for one more read of it
    strict                     what torch.compile cannot hold is an error; otherwise it runs outside, and says so
    """

    LAYER: ClassVar[Any] = layer
    NAME: ClassVar[str] = "linear"
    return_bias = False
    keep_weight_codes = True  # for dgrad, from forward to backward; otherwise they are made again there

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | Recipe | None = None,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        keep_weight_codes: bool = True,
        strict: bool = True,
        parallel_mode: str | None = None,
        sequence_parallel: bool = False,
        tp_group: Any = None,
    ) -> None:
        _refuse_parallel(parallel_mode, sequence_parallel, tp_group)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.return_bias = return_bias
        self.keep_weight_codes = keep_weight_codes
        self._set_up(recipe, fuse_wgrad_accumulation, delay_wgrad_compute, strict)

    def weight_names(self) -> list[str]:
        return ["weight"]

    def whole_weight(self) -> Tensor:
        return self.weight

    def set_weights(self, whole: Tensor) -> None:
        old = self.weight
        self.weight = parameter(whole, old) if isinstance(whole, HeldWeight) else nn.Parameter(whole, old.requires_grad)

    def describe(self) -> str:
        sizes = f"Linear({self.in_features}, {self.out_features})"
        return f"{sizes} at {self._path!r}" if self._path else sizes

    def route(self, left: Quantizer | None, right: Quantizer | None, device: torch.device) -> str:
        return spec_route(left, right, device)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._reset_seed()

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(  # type: ignore[override]
        self, input: Tensor | QTensor, is_first_microbatch: bool | Tensor | None = None, fp8_output: bool = False
    ) -> Any:
        tracing = torch.compiler.is_compiling()
        if tracing and (why := graph_refusal(self)):
            if is_inside_operator():
                self._refuse_now(why)  # what follows would not be reached: all of the operator falls back to eager
            torch._dynamo.graph_break(msg=why)  # under fullgraph=True this is the error
            return outside(self, why, input, is_first_microbatch, fp8_output)
        if tracing:
            self._settle_now()
        elif self._unborn:
            self._settle()
        recipe = self._recipe or self._followed(ambient.recipe)
        weight = self.weight
        source, codes, dtype, shape = _input(input, recipe, weight)
        needs_dx = source is not None and source.requires_grad
        call = self._prepared(recipe, weight, dtype, needs_dx, codes, is_first_microbatch, fp8_output, tracing)
        # what backward does with Python objects an operator cannot, so that a mode that watches does not see it
        as_nodes = tracing or (is_watched() and not call.delay and not call.main_grad and not saved_elsewhere())
        made = self._call(
            call.key, call.inputs._replace(x=source), grads=call.grads, observe=call.observe, main_grad=call.main_grad,
            dummy=call.dummy, delay=call.delay, as_nodes=as_nodes, codes=codes,
        )  # fmt: skip
        parts = () if not fp8_output else tuple(made[1 : 1 + recipe.linear().parts])
        if call.observe == "returned":
            self._remember(made[1 + len(parts)], tracing)
        y = made[0] if shape is None else made[0].view(*shape, made[0].shape[-1])
        out = _quantized_output(recipe, parts, y) if fp8_output else y
        return (out, self.bias) if self.return_bias else out

    def _prepared(
        self, recipe: Recipe, weight: Tensor, dtype: torch.dtype, needs_dx: bool, codes: Parts,
        is_first_microbatch: bool | Tensor | None, fp8_output: bool, tracing: bool,
    ) -> "_Call":  # fmt: skip
        """All of a call but x. The weight is read once a call: somebody may make it then (a parametrization)."""
        added = None if self.return_bias else self.bias
        if added is not None and type(added) is not nn.Parameter:
            check_weight("Linear, as its bias,", added)
        grads = wanted(needs_dx, [weight], added)
        observe = self._observes(recipe, weight)
        kind = self._weight_codes(recipe, (weight,), is_first_microbatch, grads, observe != "")
        measured = self._measures(kind, grads, len(codes) > 0) if recipe.stateful and self._scaling.cold else ""
        main_grad, dummy = self._gradient_target() if "w" in grads else ("", False)
        delayed = self._puts_off(grads)
        delay = "" if not delayed else "buffers" if tracing else "mailbox"
        if fp8_output and recipe.linear().fprop.left is None:
            raise UnsupportedConfig(
                f"fp8_output=True quantizes y as the next layer's fprop would, and {recipe} quantizes nothing there. "
                "Leave fp8_output out, or choose a recipe with a quantized fprop."
            )
        key = call_key(
            self.NAME, recipe, dtype=NAMES[dtype], weight_dtype=NAMES[weight.dtype],
            bias_dtype="" if added is None else NAMES[added.dtype], grads=grads, x="codes" if codes else "plain",
            weight=kind, observe=observe, measured=measured, quantize_output=fp8_output, main_grad=main_grad,
            dummy_grad=dummy, deferred_wgrad=delay, recompute_w_columns=not self.keep_weight_codes,
        )  # fmt: skip
        given = linked_token((weight,)) if kind == "held" else weight
        inputs = Inputs(
            None, given, added, codes,
            *(self._parts(kind, weight) if kind != "plain" else ((), ())),
            self._scaling.inputs(self, measured) if recipe.stateful else (),
            self._scaling.seen(self) if observe == "in_place" else (),
        )  # fmt: skip
        return _Call(key, inputs, grads, observe, main_grad, dummy, delay)

    # -- as an operation of a Sequential ---------------------------------------------------------------------------

    op_keywords = ("is_first_microbatch", "fp8_output")

    @classmethod
    def op_matches(cls, config: Value) -> bool:
        return isinstance(config, Config)

    def why_not_fusible(self, x: Any) -> str:
        if self.return_bias:
            return "return_bias=True hands its bias to the caller"
        if torch.compiler.is_compiling():
            if self.delay_wgrad_compute:
                return "its dW is put off, and in a graph that takes a node of its own"
            if graph_refusal(self):
                return "it does not compile"
        return ""

    def op_call(self, x: Any, extras: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(x, QTensor):
            recipe = self._recipe or self._followed(ambient.recipe)
            if x.spec != recipe.linear().fprop.left:
                x = x.dequantize()  # codes of another kind: their values are quantized as this layer would
        return self(x, **kwargs)

    def op_stage(self, x: Edge, extras: tuple[Tensor, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        if kwargs.get("fp8_output"):
            raise UnsupportedConfig(
                "fp8_output=True is for a layer outside of runs: within one, codes pass by themselves."
            )
        first, tracing = kwargs.get("is_first_microbatch"), torch.compiler.is_compiling()
        if tracing:
            self._settle_now()
        elif self._unborn:
            self._settle()
        recipe = self._recipe or self._followed(ambient.recipe)
        weight = self.weight
        check_input("Linear", x)
        check_features(x, weight)
        call = self._prepared(recipe, weight, x.dtype, x.needs, (), first, False, tracing)
        elsewhere = not as_nodes and (call.delay != "" or (call.main_grad != "" and not call.dummy))
        inputs = call.inputs
        if elsewhere:
            inputs = inputs._replace(weight=inputs.weight.detach())
        return Stage(
            call.key, tuple(inputs[1:]), self._writes(call.grads, call.observe, call.main_grad, call.delay, as_nodes),
            x.to(weight.shape[0], call.grads != ""), call.grads != "",
            anchored=elsewhere, after=self._observed if call.observe == "returned" else None,
        )  # fmt: skip

    def _observed(self, extras: Sequence[Tensor]) -> None:
        self._remember(extras[0], torch.compiler.is_compiling())

    # -- state dicts -----------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._codes.held:
            destination[prefix + "weight"] = self._codes.values(self)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        key = prefix + "weight"
        loaded = state_dict.get(key)
        if not self._codes.held or loaded is None or loaded.shape != self.weight.shape:
            super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[no-untyped-call]
            return
        self._take([loaded], assign=rest[0].get("assign_to_params_buffers", False))
        # the rest of nn.Linear's loading sees a weight that already is what it would become
        super()._load_from_state_dict({**state_dict, key: self.weight.detach()}, prefix, *rest)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        recipe = "from octavo.autocast" if self._recipe is None else self._recipe.key
        return f"{super().extra_repr()}, recipe={recipe}" + (", weight held as codes" if self._codes.held else "")


class _Call(NamedTuple):
    """All of a call but x."""

    key: str
    inputs: Inputs
    grads: str
    observe: str
    main_grad: str
    dummy: bool
    delay: str


def _refuse_parallel(parallel_mode: str | None, sequence_parallel: bool, tp_group: Any) -> None:
    for name, value in (
        ("parallel_mode", parallel_mode),
        ("sequence_parallel", sequence_parallel),
        ("tp_group", tp_group),
    ):
        if value not in (None, False):
            raise UnsupportedConfig(
                f"Linear({name}={value!r}) asks for tensor parallelism, which is not part of this version. "
                "Leave it out, and shard with FSDP or DDP."
            )


def _input(
    x: Tensor | QTensor, recipe: Recipe, weight: Tensor
) -> tuple[Tensor | None, Parts, torch.dtype, tuple[int, ...] | None]:
    """(tensor or token, codes, dtype of y, leading dims if the token does not tell them)."""
    if isinstance(x, QTensor):
        spec = recipe.linear().fprop.left
        if x.spec != spec:
            raise UnsupportedConfig(
                f"This layer's fprop takes codes of {spec} ({recipe}), and the input was quantized by {x.spec}. "
                "Use one recipe for both layers, or pass x.dequantize()."
            )
        check_features(x, weight)
        lead = None if x.token is not None or len(x.shape) == 2 else x.shape[:-1]
        return x.token, tuple(x.tensors()), x.dtype, lead
    x = x if type(x) is Tensor else arrived(x)
    check_input("Linear", x)
    check_features(x, weight)
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    return x, (), x.dtype, None


def check_features(x: Any, weight: Tensor) -> None:
    """`x` is anything with a shape and a device; a shape of nothing is not known, if there is something like it."""
    if type(weight) is not nn.Parameter or weight.layout is not torch.strided:
        check_weight("Linear, as its weight,", weight)
    if not x.shape and getattr(x, "like", None) is None:
        raise UnsupportedShape(f"This Linear takes inputs [..., {weight.shape[1]}], got (). Check the layer before it.")
    if x.shape and x.shape[-1] != weight.shape[1]:
        found = tuple([len(range(n)) for n in x.shape])  # numbers, also where a compiler thinks in symbols
        raise UnsupportedShape(
            f"This Linear takes inputs [..., {weight.shape[1]}], got {found}. "
            "Check the layer before it, or in_features."
        )
    if x.device != weight.device:
        raise UnsupportedDevice(f"x is on {x.device} and the weight on {weight.device}. Move them together.")
    if weight.dtype not in FLOATS:
        raise UnsupportedDtype(f"Linear takes float32, bfloat16 or float16 weights, got {weight.dtype}. Cast them.")


def _quantized_output(recipe: Recipe, parts: Parts, token: Tensor) -> QTensor:
    spec = recipe.linear().fprop.left
    assert spec is not None
    q = spec.assemble(parts, tuple(token.shape), token.dtype)
    return QTensor(q.codes, q.scale, spec, q.shape, q.dtype, q.global_scale, token=token)
