"""`octavo.Linear`: an `nn.Linear` whose three GEMMs follow a recipe.

The parameters, their names, their initialisation and the state dict are `nn.Linear`'s. What a recipe needs besides is
kept in buffers that no checkpoint of weights sees: codes of the weight (`weights.py`), delayed scaling's memory
(`scaling.py`), the counter of stochastic rounding. `forward` gathers these and calls `octavo.layers.linear`.
"""

import copy
import ctypes
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.formats import FLOATS
from octavo.layers import linear as layer
from octavo.lower import (
    DIGEST,
    is_inside_ddp,
    is_inside_operator,
    is_watched,
    recomputes,
    refresh_in_graph,
    run,
    run_in_graph,
    saved_elsewhere,
    while_tracing,
)
from octavo.modules import scaling, weights
from octavo.modules.ambient import ambient
from octavo.modules.mailbox import Mailbox, Posted
from octavo.modules.main_grad import MainGrad, graph_buffer, has_buffer
from octavo.quant import DelayedState, QTensor
from octavo.recipes import BF16, Recipe
from octavo.recipes import recipe as resolve

UNQUANTIZED = BF16()
_NAMES = {dtype: name for name, dtype in layer.DTYPES.items()}
SEED = "rounding_seed"


class Linear(nn.Linear):
    """y = x · Wᵀ + b in low precision.

    recipe                     a name, a canonical string or a Recipe; None follows `octavo.autocast`, else bf16
    return_bias                forward returns (y without the bias, bias)
    fuse_wgrad_accumulation    dW is added to `weight.main_grad` (octavo.modules.main_grad)
    delay_wgrad_compute        dW waits until `backward_dw()`
    strict                     what torch.compile cannot hold is an error; otherwise it runs outside, and says so
    """

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
        strict: bool = True,
        parallel_mode: str | None = None,
        sequence_parallel: bool = False,
        tp_group: Any = None,
    ) -> None:
        _refuse_parallel(parallel_mode, sequence_parallel, tp_group)
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set_up(recipe, return_bias, fuse_wgrad_accumulation, delay_wgrad_compute, strict)

    def _set_up(
        self,
        recipe: str | Recipe | None,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        strict: bool = True,
        path: str = "",
    ) -> None:
        """What makes an nn.Linear an octavo.Linear."""
        self.return_bias = return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.strict = strict
        self._path = path  # for messages
        self._warned = False
        self._codes = weights.Codes()
        self._scaling = scaling.Scaling()
        self._mailbox = Mailbox()
        self._recipe: Recipe | None = None
        self._follows = False  # whether it ever ran in an ambient recipe
        self._pending: dict[str, Tensor] = {}  # state loaded before the recipe it belongs to was seen
        self._seed = _seed_of(self, path)
        self.recipe = recipe  # type: ignore[assignment]

    def _tear_down(self) -> None:
        """The opposite: nothing is left but an nn.Linear's own."""
        self.release_codes()
        self._codes.drop(self)
        self._scaling.drop(self)
        weights.drop_buffers(self, [SEED])
        for name in (
            "return_bias", "fuse_wgrad_accumulation", "delay_wgrad_compute", "strict",
            "_codes", "_scaling", "_mailbox", "_recipe", "_follows", "_pending", "_seed", "_path", "_warned",
        ):  # fmt: skip
            del self.__dict__[name]

    @property
    def recipe(self) -> Recipe | None:
        return self._recipe

    @recipe.setter
    def recipe(self, spec: str | Recipe | None) -> None:
        found = None if spec is None else resolve(spec)
        if why := self.refusal(found):
            raise UnsupportedConfig(f"This layer cannot run in {found}: {why}. octavo.revert(model) starts afresh.")
        if found is not None:
            if not found.stateful:
                self._scaling.drop(self)
            self._prepare(found)
        self._recipe = found

    def refusal(self, recipe: Recipe | None) -> str:
        """Why this layer cannot take over a recipe; empty if it can."""
        if self._codes.held and recipe != self._codes.recipe:
            return f"its weight is held as codes of {self._codes.recipe}"
        if self.weight.dtype not in FLOATS:
            return f"its weight is {self.weight.dtype}, and float32, bfloat16 or float16 can be quantized"
        return self._scaling.refusal(recipe) if recipe is not None and recipe.stateful else ""

    def _prepare(self, recipe: Recipe) -> None:
        """The buffers that a recipe needs, made when they are missing."""
        if torch.compiler.is_compiling():
            self._make_state(recipe.key)
        else:
            self._install(recipe)

    def _install(self, recipe: Recipe) -> None:
        remembers = recipe.stateful and self._scaling.recipe != recipe
        draws = SEED not in self._buffers and recipe.linear().draws
        if remembers or draws:  # asked at every forward of a layer that follows an ambient recipe, and seldom true
            with weights.as_real_as(self.weight), torch.inference_mode(False):  # made there, it must still train
                if remembers:
                    self._scaling.install(self, recipe, self.weight)
                if draws:
                    seed = torch.tensor([self._seed, 0], device=self.weight.device)
                    self.register_buffer(SEED, seed, persistent=False)
        if self._pending:
            self._pending = self.load_recipe_state(self._pending)

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(  # type: ignore[override]
        self, x: Tensor | QTensor, is_first_microbatch: bool | None = None, fp8_output: bool = False
    ) -> Any:
        if torch.compiler.is_compiling() and (why := self._graph_refusal()):
            if is_inside_operator():
                self._refuse_now(why)  # what follows would not be reached: all of the operator falls back to eager
            torch._dynamo.graph_break(msg=why)  # under fullgraph=True this is the error
            return _outside(self, why, x, is_first_microbatch, fp8_output)
        recipe = self._recipe or self._followed(ambient.recipe)
        weight, bias = self.weight, self.bias
        added = None if self.return_bias else bias
        source, codes, dtype, shape = _input(x, recipe, weight)
        grads = _wanted(source, weight, added)
        observe = recipe.stateful and self.training and torch.is_grad_enabled()
        kind = self._weight_codes(weight, recipe, is_first_microbatch, grads, observe)
        main_grad, dummy = self._gradient_target(weight) if "w" in grads else ("", False)
        delayed = self.delay_wgrad_compute and "w" in grads
        tracing = torch.compiler.is_compiling()
        # what backward does with Python objects an operator cannot, so that a mode that watches does not see it
        as_nodes = tracing or (is_watched() and not delayed and not main_grad and not saved_elsewhere())
        delay = "" if not delayed else "post" if tracing else "mailbox"
        if fp8_output and recipe.linear().fprop.left is None:
            raise UnsupportedConfig(
                f"fp8_output=True quantizes y as the next layer's fprop would, and {recipe} quantizes nothing there. "
                "Leave fp8_output out, or choose a recipe with a quantized fprop."
            )
        key = (
            f"linear(recipe={recipe.key},dtype='{_NAMES[dtype]}',weight_dtype='{_NAMES[weight.dtype]}',"
            f"bias_dtype='{'' if added is None else _NAMES[added.dtype]}',grads='{grads}',"
            f"x='{'codes' if codes else 'plain'}',weight='{kind}',observe={observe},quantize_output={fp8_output},"
            f"main_grad='{main_grad}',dummy_grad={dummy},delay='{delay}')"
        )
        # a weight whose gradient goes elsewhere stays out of the graph: its hooks would see a gradient of None
        elsewhere = delay != "" or (main_grad != "" and not dummy)
        stored = self._codes
        inputs = layer.Inputs(
            source, weight.detach() if elsewhere else weight, added, codes,
            stored.parts(self, "row") if kind != "plain" else (),
            stored.parts(self, "column") if kind != "plain" else (),
            self._scaling.inputs(self) if recipe.stateful else (),
        )  # fmt: skip
        amax = self._buffers[scaling.NAMES["backward"]["current"]] if observe and grads else None
        seed = self._buffers.get(SEED) if grads else None
        if as_nodes:
            target = graph_buffer(weight) if main_grad and not delay else None
            # equal calls would be one node to a compiler, with room for one dy; what torch.empty makes is never merged
            mark = torch.empty(0, device=weight.device) if delay else None
            made = run_in_graph("linear", key, inputs._replace(weight=weight), (target, amax, seed, mark))
            if delay:
                self._post(key, made, codes)
        else:
            config = layer.config(key)
            buffers = layer.Buffers(
                MainGrad(weight) if main_grad else None, amax, seed, self._mailbox if delay else None
            )
            made = run(layer, config, inputs, buffers, differentiable=grads != "", anchored=elsewhere)  # type: ignore[arg-type,assignment]
        parts = () if not fp8_output else tuple(made[1 : 1 + recipe.linear().parts])
        if observe:
            self._remember(made[1 + len(parts)], weight, tracing)
        y = made[0] if shape is None else made[0].view(*shape, made[0].shape[-1])
        out = _quantized_output(recipe, parts, y) if fp8_output else y
        return (out, bias) if self.return_bias else out

    def _graph_refusal(self) -> str:
        """Why a graph that is being traced cannot hold this layer; empty if it can."""
        if not self.weight.requires_grad or not torch.is_grad_enabled():
            return ""
        why = ""
        fused = self.fuse_wgrad_accumulation
        if self.delay_wgrad_compute and (is_inside_operator() or recomputes()):
            why = (
                "delay_wgrad_compute=True inside torch.utils.checkpoint, or with a memory budget below 1, would leave "
                "the operands of dw with a forward that is run again. Leave one of the two out"
            )
        elif self.delay_wgrad_compute and is_inside_ddp():
            why = (
                "delay_wgrad_compute=True inside DistributedDataParallel, which would take a graph's backward for the "
                "end of this weight's, and never reduce its gradient. Leave it out"
            )
        elif fused and not self.delay_wgrad_compute and not has_buffer(self.weight):
            why = (
                "fuse_wgrad_accumulation=True needs weight.main_grad, or weight.get_main_grad(), before forward. "
                "Set it first"
            )
        elif (
            self.delay_wgrad_compute or (fused and not hasattr(self.weight, "grad_added_to_main_grad"))
        ) and self._has_hooks():
            why = (
                "its weight has hooks, and gets its gradient elsewhere (delay_wgrad_compute, fuse_wgrad_accumulation), "
                "so that every backward of a graph would call them with None. Remove the hooks, or set "
                "weight.grad_added_to_main_grad, with which they get zeros"
            )
        return why and f"{self._title()} does not compile: {why}, or build the layer with strict=False, to run outside."

    def _refuse(self, why: str) -> None:
        if self.strict:
            raise UnsupportedConfig(why)
        if not self._warned:
            self._warned = True
            warnings.warn(f"Running outside the graph. {why}", stacklevel=3)

    @while_tracing
    def _refuse_now(self, why: str) -> bool:
        self._refuse(why)
        return True

    @while_tracing
    def _has_hooks(self) -> bool:
        weight: Any = self.weight
        return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)

    @while_tracing
    def _make_state(self, recipe_key: str) -> bool:
        """The buffers of a recipe that the layer meets for the first time in a graph."""
        self._install(resolve(recipe_key))
        return True

    @while_tracing
    def _make_cache(self, recipe_key: str, column: bool, observe: bool) -> bool:
        """The cache that a graph is about to use."""
        recipe, stored = resolve(recipe_key), self._codes
        if stored.recipe != recipe or stored.is_cold or (column and not stored.has(self, "column")):
            self._refresh(self.weight, recipe, column=column, observe=observe)
        return True

    def _title(self) -> str:
        sizes = f"Linear({self.in_features}, {self.out_features})"
        return f"{sizes} at {self._path!r}" if self._path else sizes

    def _post(self, key: str, made: Any, codes: layer.Parts) -> None:
        """Leave what dw needs for `backward_dw`. The mailbox is written without being read: a read is a guard."""
        start, stop = _post_span(key)
        box = self._mailbox
        box.posted = (Posted(key, tuple(made[start:stop]), codes), box.posted)

    def _followed(self, recipe: Recipe | None) -> Recipe:
        """The ambient recipe, for a layer without one of its own."""
        if recipe is None:
            if self._follows and torch._C._current_graph_task_id() != -1:
                raise UnsupportedConfig(
                    "This layer follows octavo.autocast, and is run during a backward, by a checkpoint that "
                    "recomputes, where no recipe is in force. Enter octavo.autocast inside the checkpointed function, "
                    "or give the layer its recipe: octavo.convert(model, recipe)."
                )
            return UNQUANTIZED
        self._prepare(recipe)
        if not torch.compiler.is_compiling() and not self._follows:  # a graph would guard on it
            self._follows = True
        return recipe

    def _weight_codes(self, weight: Tensor, recipe: Recipe, first: bool | None, grads: str, observe: bool) -> str:
        """How the layer gets the weight: "plain", "codes" (from the cache, filled or refreshed here) or "held"."""
        stored = self._codes
        if stored.held:
            if not weights.is_token(weight):
                raise UnsupportedConfig(
                    f"This layer's weight is held as codes, and it was given another of {tuple(weight.shape)}, which "
                    "forward would not read. octavo.revert(model) first, or load_state_dict, which quantizes."
                )
            return "held"
        if first is None:
            return "plain"
        quant = recipe.linear()
        if quant.fprop.right is None and quant.dgrad.right is None:
            return "plain"
        column = "x" in grads and quant.dgrad.right is not None
        if torch.compiler.is_compiling():
            self._refresh_in_graph(weight, recipe, first, column, observe)
            return "codes"
        if not first and stored.recipe == recipe and not stored.is_cold:
            stored.check_fresh(weight)
            if not column or stored.has(self, "column"):
                return "codes"
        self._refresh(weight, recipe, column=column, observe=observe)
        return "codes"

    def _refresh(self, weight: Tensor, recipe: Recipe, *, column: bool, observe: bool) -> None:
        amaxes, slots = self._weight_scaling(recipe, observe)
        self._codes.fill(self, weight, recipe, column=column, amaxes=amaxes, scaling=slots)

    def _refresh_in_graph(self, weight: Tensor, recipe: Recipe, first: bool, column: bool, observe: bool) -> None:
        """The same, while a graph is traced: buffers that are missing are made and filled now, once; the graph
        refreshes them where it is told to. Whether a weight has changed is not for a graph to see."""
        self._make_cache(recipe.key, column, observe and not first)
        stored = self._codes.recipe
        if stored is None or stored.key != recipe.key:  # never now; read here, it is a guard of the graph
            raise UnsupportedConfig(f"The weight cache holds codes of {stored}, and {recipe} is in force.")
        if first:
            amaxes, slots = self._weight_scaling(recipe, observe)
            row, columns = self._codes.parts(self, "row"), self._codes.parts(self, "column")
            key = DIGEST + "|linear(recipe=" + recipe.key + ")"
            with torch.no_grad():
                refresh_in_graph(weight.detach(), list(row), list(columns), amaxes, slots, key)

    def _weight_scaling(self, recipe: Recipe, observe: bool) -> tuple[list[Tensor], list[Tensor]]:
        """What delayed scaling brings to a weight's cast: amaxes to raise, and w's multiplier."""
        current = self._buffers.get(scaling.NAMES["forward"]["current"])
        slots = self._scaling.inputs(self)[1::3] if recipe.stateful else ()
        return [current] if observe and current is not None else [], list(slots)

    def _gradient_target(self, weight: Tensor) -> tuple[str, bool]:
        if not self.fuse_wgrad_accumulation:
            return "", False
        mode = "overwrite" if getattr(weight, "overwrite_main_grad", False) else "add"
        return mode, hasattr(weight, "grad_added_to_main_grad")

    def _remember(self, amax: Tensor, weight: Tensor, tracing: bool) -> None:
        current = self._buffers[scaling.NAMES["forward"]["current"]]
        assert current is not None
        if tracing:
            current.copy_(torch.maximum(current, amax))
        else:
            torch.maximum(current, amax, out=current)
            self._scaling.watch(weight)

    # -- gradients put off -----------------------------------------------------------------------------------------

    def backward_dw(self) -> None:
        """Compute the weight gradient of the oldest backward that left it out, and add it to `weight.grad` or to
        `weight.main_grad`. Hooks of the weight fire here, once."""
        weight = self.weight
        if not self.delay_wgrad_compute or not weight.requires_grad:
            return
        config, dy, x = self._mailbox.take(weight)
        with torch.no_grad():
            dw = layer.weight_gradient(config, dy, x, MainGrad(weight) if config.main_grad else None)
        if dw is not None:
            torch.autograd.backward(weight, dw)  # accumulates as any backward does, hooks included

    # -- what a checkpoint keeps besides the weights ----------------------------------------------------------------

    def recipe_state(self) -> dict[str, Tensor]:
        """Copies of the state that recipes made here: delayed scaling's memory, the counter of stochastic rounding."""
        found: dict[str, Tensor] = {}
        if self._scaling.recipe is not None:
            for side in scaling.SIDES:
                kept = self._scaling.state(self, side).export()
                found |= {f"scaling.{side}.{name}": tensor for name, tensor in kept.items()}
        if SEED in self._buffers:
            found["rounding.seed"] = self.get_buffer(SEED).clone()
        return found

    def _places(self, state: dict[str, Tensor]) -> Iterator[tuple[DelayedState, str]]:
        """(memory, prefix of its keys) for each side that the state has in full."""
        if self._scaling.recipe is not None:
            for side in scaling.SIDES:
                memory, prefix = self._scaling.state(self, side), f"scaling.{side}."
                if all(prefix + name in state for name in memory.export()):
                    yield memory, prefix

    def check_recipe_state(self, state: dict[str, Tensor]) -> None:
        """Refuse what `load_recipe_state` could not write."""
        for memory, prefix in self._places(state):
            memory.check({name: state[prefix + name] for name in memory.export()})
        seed = state.get("rounding.seed")
        if "rounding.seed" in state and not (
            isinstance(seed, Tensor) and seed.shape == (2,) and seed.dtype == torch.int64
        ):
            raise UnsupportedShape(f"rounding.seed is an int64 tensor [seed, step], got {seed!r}.")

    def load_recipe_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take over what there is a place for, and return the rest."""
        self.check_recipe_state(state)
        rest = dict(state)
        for memory, prefix in self._places(state):
            memory.restore({name: rest.pop(prefix + name) for name in memory.export()})
        if SEED in self._buffers and "rounding.seed" in rest:
            self.get_buffer(SEED).copy_(rest.pop("rounding.seed"))
        return rest

    # -- weights held as codes -------------------------------------------------------------------------------------

    def hold_codes(self) -> None:
        """Keep the weight as codes of this layer's recipe, in both orientations, and let the rest of it go."""
        recipe = self._recipe
        if self._codes.held:
            return
        if recipe is None or recipe.linear().fprop.right is None:
            raise UnsupportedConfig(
                f"A weight is held as the codes its fprop multiplies, and this layer's recipe is {recipe}. "
                "Give it one whose fprop is quantized: octavo.convert(model, recipe) or Linear(recipe=...)."
            )
        self._codes.drop(self)
        # scaled by the weight itself, whatever a delayed recipe has seen so far: there is no second chance
        self._codes.fill(self, self.weight, recipe, column=True)
        self._codes.held = True
        self.weight = weights.token(self.weight)

    def release_codes(self) -> None:
        """Back to a weight, of the values that the codes stand for."""
        if self._codes.held:
            values = self._codes.values(self, self.weight.dtype)
            self._codes.held = False
            self._codes.drop(self)
            self.weight = nn.Parameter(values, requires_grad=self.weight.requires_grad)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._codes.held:
            destination[prefix + "weight"] = self._codes.values(self, self.weight.dtype)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        key = prefix + "weight"
        loaded = state_dict.get(key)
        if not self._codes.held or loaded is None or loaded.shape != self.weight.shape:
            super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[no-untyped-call]
            return
        recipe = self._codes.recipe
        assert recipe is not None
        self._codes.fill(self, loaded.to(self.weight.device, self.weight.dtype), recipe, column=True)
        # the rest of nn.Linear's loading sees a weight that already is what it would become
        super()._load_from_state_dict({**state_dict, key: self.weight.detach()}, prefix, *rest)  # type: ignore[no-untyped-call]

    # -- what nn.Module does to a module ------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> "Linear":
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        if new._scaling.recipe is not None:
            scaling.listen(new)
        if new._codes.held:  # a parameter's copy is dense
            new.weight = weights.token(new.weight)
        return new

    def reset_parameters(self) -> None:
        if "_codes" in self.__dict__ and self._codes.held:
            raise UnsupportedConfig("A weight held as codes is not drawn anew. octavo.revert(model) first.")
        super().reset_parameters()
        if "_seed" in self.__dict__:  # nn.Linear's constructor calls this before there is one
            self._seed = _seed_of(self, "")
            if SEED in self._buffers:
                self.get_buffer(SEED).copy_(torch.tensor([self._seed, 0]))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Linear":
        """Buffers follow the module's device, never its dtype: a scale in half precision is another scale."""
        if not self._codes.held:
            self._codes.drop(self)
        unborn = self.weight.is_meta
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = self._buffers[name]
            if after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        if self._codes.held and not weights.is_token(self.weight):
            self.weight = weights.token(self.weight)
        if unborn and not self.weight.is_meta:
            self._reset_state()
        return self

    def _reset_state(self) -> None:
        """State as it was at construction: storage that comes from the meta device holds nothing yet."""
        remembered = self._scaling.recipe
        self._scaling.drop(self)
        self._buffers.pop(SEED, None)
        for recipe in (remembered, self._recipe):
            if recipe is not None:
                self._prepare(recipe)

    def extra_repr(self) -> str:
        recipe = "from octavo.autocast" if self._recipe is None else self._recipe.key
        return f"{super().extra_repr()}, recipe={recipe}" + (", weight held as codes" if self._codes.held else "")


@while_tracing
def _post_span(key: str) -> tuple[int, int]:
    """Where in what a node makes the post is."""
    return layer.config(key).posted


@torch.compiler.disable(reason="octavo: this layer cannot be part of a graph")  # type: ignore[untyped-decorator,no-untyped-call]
def _outside(module: "Linear", why: str, *arguments: Any) -> Any:
    """What a graph cannot hold: an error, or eager mode with a word about it."""
    module._refuse(why)
    return module.forward(*arguments)


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
) -> tuple[Tensor | None, layer.Parts, torch.dtype, tuple[int, ...] | None]:
    """(tensor or token, codes, dtype of y, leading dims if the token does not tell them)."""
    if isinstance(x, QTensor):
        spec = recipe.linear().fprop.left
        if x.spec != spec:
            raise UnsupportedConfig(
                f"This layer's fprop takes codes of {spec} ({recipe}), and the input was quantized by {x.spec}. "
                "Use one recipe for both layers, or pass x.dequantize()."
            )
        _check_fits(x, weight)
        lead = None if x.token is not None or len(x.shape) == 2 else x.shape[:-1]
        return x.token, tuple(x.tensors()), x.dtype, lead
    if x.dtype not in FLOATS:
        raise UnsupportedDtype(f"Linear takes float32, bfloat16 or float16 activations, got {x.dtype}. Cast x first.")
    _check_fits(x, weight)
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    return x, (), x.dtype, None


def _check_fits(x: Tensor | QTensor, weight: Tensor) -> None:
    if not x.shape or x.shape[-1] != weight.shape[1]:
        found = tuple([len(range(n)) for n in x.shape])  # numbers, also where a compiler thinks in symbols
        raise UnsupportedShape(
            f"This Linear takes inputs [..., {weight.shape[1]}], got {found}. "
            "Check the layer before it, or in_features."
        )
    if x.device != weight.device:
        raise UnsupportedDevice(f"x is on {x.device} and the weight on {weight.device}. Move them together.")
    if weight.dtype not in FLOATS:
        raise UnsupportedDtype(f"Linear takes float32, bfloat16 or float16 weights, got {weight.dtype}. Cast them.")


def _wanted(x: Tensor | None, weight: Tensor, bias: Tensor | None) -> str:
    """Which gradients can be asked for."""
    if not torch.is_grad_enabled():
        return ""
    return (
        ("x" if x is not None and x.requires_grad else "")
        + ("w" if weight.requires_grad else "")
        + ("b" if bias is not None and bias.requires_grad else "")
    )


def _quantized_output(recipe: Recipe, parts: layer.Parts, token: Tensor) -> QTensor:
    spec = recipe.linear().fprop.left
    assert spec is not None
    q = spec.assemble(parts, tuple(token.shape), token.dtype)
    return QTensor(q.codes, q.scale, spec, q.shape, q.dtype, q.global_scale, token=token)


def _seed_of(module: nn.Linear, path: str) -> int:
    """The seed of stochastic rounding, from where torch's generator stands after the parameters were drawn and from the
    layer's place. It draws nothing, so that parameters and dropout come out as they would without it."""
    generator = torch.get_rng_state()
    state = zlib.crc32(ctypes.string_at(generator.data_ptr(), generator.nbytes))  # real, also among fake tensors
    return state << 30 | zlib.crc32(f"{path} {module.out_features}x{module.in_features}".encode()) >> 2
