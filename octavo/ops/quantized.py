"""`Quantized`: a module with a weight that a recipe quantizes, the base class of Linear and GroupedLinear.

`RecipeState` keeps the recipe and its state. This class knows the weight: its part in one call (`_weight_side`), the
call cache's way around that (`_looked_up`), its gradient, and its codes in state dicts. The `forward` of a subclass
gathers these and calls its layer.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from octavo._torch.fakes import runs_on_shapes
from octavo._torch.modules import note_full_sharding
from octavo._torch.tensors import is_dtensor
from octavo._torch.tracing import Untraced
from octavo.communication.amax_reduction import all_reduce_amaxes
from octavo.communication.tensor_parallel import Parallel
from octavo.errors import UnsupportedConfig
from octavo.ops.linear_config import call_key
from octavo.ops.operands import XCodes
from octavo.ops.published_codes import refuse_codes
from octavo.ops.recipe_state import OVERWRITE_FIRST, RecipeState
from octavo.ops.recipe_state import UNQUANTIZED as UNQUANTIZED
from octavo.ops.recipe_state import unsupported_dtype_reason as unsupported_dtype_reason
from octavo.ops.rounding_seed import SEED as SEED
from octavo.quant.qtensor import Parts
from octavo.quant.quantizer import Quantizer
from octavo.recipes import LinearQuant, Recipe
from octavo.recipes import recipe as resolve
from octavo.recipes.ambient import ambient, process
from octavo.runtime import call_cache
from octavo.runtime.call import Stage, call, run_hit
from octavo.runtime.call_cache import Lookup
from octavo.runtime.contract import DTYPE_NAMES
from octavo.runtime.stage import WantedGradients
from octavo.scaling.delayed_scaling import BUFFER_NAMES, NO_OPERANDS, OperandMask
from octavo.values import Value
from octavo.weights.quantized_parameters import parameter, with_values
from octavo.weights.quantized_weight import QuantizedWeight
from octavo.weights.unsupported_wgrad import refuse_shards, unsupported_in_graph

DY_AMAX = BUFFER_NAMES["backward"]["running_amax"]  # the buffer in which backward observes dy


class WeightSide(NamedTuple):
    """The weight's part in one call of a layer."""

    weight: str  # "plain", "codes" or "quantized"; this and the next five are in the layer's config
    observe: bool
    measured: OperandMask
    main_grad: str
    dummy_grad: bool
    deferred_wgrad: str
    inputs: tuple[Parts, ...]  # its codes by row and by column, delayed scaling's inverse scales, running amaxes
    buffers: tuple[Any, ...]  # the buffers that backward writes to
    bypasses_autograd: bool  # its gradient does not go through autograd


class Quantized(RecipeState):
    """A module that keeps the settings and the state of a recipe for its weight."""

    LAYER: ClassVar[Any]  # a layer of the contract (octavo.runtime.contract)
    NAME: ClassVar[str]  # its name in the registry
    TITLE: ClassVar[str]  # its name in errors
    keep_weight_codes = True  # for dgrad, from forward to backward; if False, backward makes them again
    save_original_input = False  # backward keeps x and casts it again, instead of keeping its codes
    _codes_chosen = False  # whether the program has chosen keep_weight_codes
    keeps_dtensors = False  # whether the parameters are DTensors, of which kernels get this rank's part
    parallel: Parallel | None = None  # how the weight is split over ranks
    _sharded: Any = None  # a WeightSource, if FSDP2 gathers the weight as codes
    amax_group: str | None = None  # the ranks that agree on its amaxes, in place of the group of a step
    _ranks_checked = False  # whether the ranks were found to call the layer alike
    _number: tuple[tuple[str, str], int] | None = None  # among the split layers of its kind

    # -- the weight ------------------------------------------------------------------------------------------------

    def _sizes(self) -> tuple[int, ...]:
        """Return the sizes of the layer, as its constructor takes them."""
        raise NotImplementedError

    def op_describe(self) -> str:
        sizes = f"{self.TITLE}({', '.join(map(str, self._sizes()))})"
        return f"{sizes} at {self._path!r}" if self._path else sizes

    @classmethod
    def op_matches(cls, config: Value) -> bool:
        return isinstance(config, cls.LAYER.Config)

    def _trained_by(self) -> list[nn.Parameter]:
        """Return the parameters that tell which optimizer trains this layer: its trained weights, or all parameters if
        no weight is a trained parameter."""
        own: list[Any] = [self._parameters.get(name) for name in self._names_of_weights()]
        trained = [weight for weight in own if weight is not None and weight.requires_grad]
        return trained or list(self.parameters())

    def _whole_weight(self) -> Tensor:
        """Return the weight in the shape that the layer takes, for uses that need no gradient."""
        return self._weight_parts()[0]

    def _set_weights(self, whole: Tensor) -> None:
        """Replace the parameters by those of a whole weight, dense or quantized."""
        names, own = self._names_of_weights(), self._weight_parts()
        parts = [whole] if len(names) == 1 else list(whole.unbind())
        for name, old, part in zip(names, own, parts, strict=True):
            new = parameter(part, old) if isinstance(part, QuantizedWeight) else nn.Parameter(part, old.requires_grad)
            self.register_parameter(name, new)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter. One that is codes takes the place of a weight, and of its cache."""
        super().register_parameter(name, param)
        if isinstance(param, QuantizedWeight) and "_codes" in self.__dict__ and name in self._names_of_weights():
            self._codes.drop(self)
            self._codes.has_quantized_weight = True

    def _operands(self, recipe: Recipe, weights: Sequence[Any]) -> Sequence[Any]:
        """Return weights as a call in this recipe multiplies them: values of codes that it would not multiply."""
        if not self._codes.has_quantized_weight or recipe.linear().quantizes_weight:
            return weights
        return [with_values(weight) if isinstance(weight, QuantizedWeight) else weight for weight in weights]

    def _own_part(self, name: str) -> Tensor | None:
        """Return a parameter as kernels read it: this rank's part of a DTensor, whose gradient is a DTensor's."""
        found: Any = getattr(self, name)
        return found.to_local() if self.keeps_dtensors and is_dtensor(type(found)) else found

    def _own_parts(self, has_bias: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return weight and bias as kernels read them. Plain parameters come straight from their table, in a fraction
        of the time, unless one is covered: by an attribute, by a property, which parametrizations put into a class of
        their own and which may compute from the parameter, or by a class that looks attributes up itself. A compiler
        traces torch's way to them, and knows what to guard."""
        own, attributes = self._parameters, self.__dict__
        kind: Any = type(self)
        if (
            torch.compiler.is_compiling() or self.keeps_dtensors
            or kind.__getattr__ is not nn.Module.__getattr__ or kind.__getattribute__ is not object.__getattribute__
            or "weight" not in own or "weight" in attributes or hasattr(kind, "weight")
            or (has_bias and ("bias" not in own or "bias" in attributes or hasattr(kind, "bias")))
        ):  # fmt: skip
            return self._own_part("weight"), self._own_part("bias") if has_bias else None
        return own["weight"], own["bias"] if has_bias else None

    def _caches_columns(self, quant: LinearQuant) -> bool:
        """Return whether a cache of the weight has column codes besides row codes."""
        return True

    def _split_over_ranks(self) -> Parallel | None:
        """Return how the weight is split over ranks; None if there is one rank."""
        parallel = self.parallel
        return None if parallel is None or parallel.size() == 1 else parallel

    def _name_for_collectives(self) -> str:
        """Return the name of this layer for collectives. A graph gets that of the class: it would be another graph for
        each path."""
        return type(self).__name__ if torch.compiler.is_compiling() else self.op_describe()

    def _gemm_route(self, left: Quantizer | None, right: Quantizer | None, device: torch.device) -> str:
        """Return how the device multiplies operands of these quantizers: "native", "emulated" or "reference"."""
        raise NotImplementedError

    def op_holds_objects(self) -> bool:
        """Return whether backward needs Python objects, which a custom operator cannot take."""
        if not (self.fuse_wgrad_accumulation or self.delay_wgrad_compute) or not torch.is_grad_enabled():
            return False
        return any([weight.requires_grad for weight in self._weight_parts()])

    def _has_weight_hooks(self) -> bool:
        """Return whether a weight has hooks on its gradient."""
        weights: list[Any] = list(self._weight_parts())
        return any(bool(weight._backward_hooks or weight._post_accumulate_grad_hooks) for weight in weights)

    def _parametrized_weights(self) -> list[str]:
        """Return the names of weights that are not parameters: a parametrization computes them at every call."""
        return [name for name in self._names_of_weights() if name not in self._parameters]

    def _why_parametrized(self, option: str) -> str:
        """Return why an option excludes parametrized weights; empty if there are none."""
        names = self._parametrized_weights()
        if not names:
            return ""
        return (
            f"{option} needs a weight that stays from call to call, and {names[0]} is made anew for each, by a "
            "parametrization. Leave it out, or remove the parametrization"
        )

    def _refuse_parametrized(self, option: str) -> None:
        """Raise if the layer has parametrized weights, which `option` excludes."""
        if why := self._why_parametrized(option):
            raise UnsupportedConfig(f"{self.op_describe()}: {why}.")

    def _why_alone_in_graph(self) -> str:
        """Return why the layer joins no run in the graph that is being traced; empty if it joins one, or in eager
        mode."""
        if not torch.compiler.is_compiling():
            return ""
        if self.delay_wgrad_compute:
            return "its dW is deferred, and in a graph that takes a node of its own"
        return "it does not compile" if unsupported_in_graph(self) else ""

    # -- one call of the layer -----------------------------------------------------------------------------------------

    def _materialize_for_call(self) -> None:
        """Place the state of the recipe beside the weight, before the first call after one of them moved."""
        if torch.compiler.is_compiling():
            self._now("_materialize_in_graph")
        elif self._unplaced:
            self._materialize_with_weight()

    def _materialize_in_graph(self) -> None:
        process.has_traced = True
        self._materialize_with_weight()

    def _lookup(
        self, needs_dx: bool, weight: Tensor | None, bias: Tensor | None, more: tuple[Tensor, ...] = (), *settings: Any
    ) -> Lookup | None:
        """Return a call with plain tensors as the call cache finds it. `more` are inputs after the bias, `settings`
        those of the subclass. None where something else takes part: codes of the weight, scales that are measured, a
        gradient of the weight that does not go through autograd, other ranks, a run on shapes."""
        if weight is None or self._unplaced or type(weight) is QuantizedWeight:
            return None
        recipe, enabled = self._recipe or self._followed(ambient.recipe), torch.is_grad_enabled()
        codes, scaling = self._codes, self._scaling
        if (
            ambient.first is not None or codes.ambient or codes.has_quantized_weight or any(scaling.uncalibrated)
            or process.dry or self.fuse_wgrad_accumulation or self.delay_wgrad_compute
            or (self.parallel is not None and self._split_over_ranks() is not None)
        ):  # fmt: skip
            return None
        trains = enabled and weight.requires_grad
        needs = enabled and (needs_dx or trains or (bias is not None and bias.requires_grad))
        observes = enabled and self.training and recipe.stateful
        scales, running_amaxes = scaling.of_call(self, observe=observes) if recipe.stateful else ((), ())
        buffers = self._hidden._buffers
        return Lookup(
            (
                self.NAME, recipe.key, self.training, enabled, self.keep_weight_codes, self.save_original_input,
                bias is None, weight.shape, trains, *settings,
            ),
            [weight, *(() if bias is None else (bias,)), *more, *scales, *running_amaxes],
            (None, buffers[DY_AMAX] if observes else None, buffers.get(SEED), None) if needs else (None,) * 4,
            needs, trains, observes,
        )  # fmt: skip

    def _note_hit(self, lookup: Lookup) -> None:
        if lookup.trains:
            self._codes.trained = True
        if lookup.observes:
            self._scaling.watch(self, lookup.tensors[0])

    def _looked_up(self, x: Any, *extra_inputs: Tensor) -> tuple[tuple[Any, ...] | None, Tensor | None]:
        """Return y of a call that is a hit of the call cache. Of another call: the settings by which a later one may
        be a hit; None if there are none. For an x that is a plain tensor on a device of `call_cache.DEVICES`, outside
        of graphs."""
        lookup = self._call_lookup(x.requires_grad, extra_inputs)
        if lookup is None:
            return None, None
        settings, tensors = (x.shape, x.requires_grad, *lookup.settings), [x, *lookup.tensors]
        hit = call_cache.find(settings, tensors)
        if hit is None:
            return settings, None
        self._note_hit(lookup)
        return settings, run_hit(hit, tensors, lookup.buffers, self)[0]

    def _run_node(
        self, stage: Stage, x: Tensor | None, as_nodes: bool, shape: tuple[int, ...] | None = None
    ) -> Sequence[Tensor]:
        """Run the layer's node, inside of all collectives. Return y, then auxiliary outputs."""
        made = call(stage, x, as_nodes, self, shape)
        if stage.after is not None:
            stage.after(made[1:])
        return made

    def _weight_side(
        self, recipe: Recipe, weights: Sequence[Tensor], grads: WantedGradients, first: bool | Tensor | None,
        as_nodes: bool, has_codes: bool = False,
    ) -> WeightSide:  # fmt: skip
        """Return the weight's part in a call. `has_codes`: x arrived as codes."""
        scaling = self._scaling
        dry = process.dry > 0 or (as_nodes and runs_on_shapes(weights[0]))
        observe = recipe.stateful and self.training and not dry and torch.is_grad_enabled()
        if observe and not as_nodes:  # a graph would guard on the counts
            scaling.watch(self, weights[0])
        kind = self._codes.supply(self, recipe, weights, first, grads, observe, dry)
        measured = NO_OPERANDS
        if recipe.stateful and any(scaling.uncalibrated):
            measured = scaling.measures(not has_codes, kind == "plain", grads.dx or grads.dw)
        main_grad, dummy, delay = "", False, ""
        if grads.dw and not dry and self.fuse_wgrad_accumulation:
            main_grad, dummy = self._wgrad.main_grad(self)
            if self.fuse_wgrad_accumulation == OVERWRITE_FIRST:
                if isinstance(first, Tensor):
                    raise UnsupportedConfig(
                        f"{self.op_describe()}: fuse_wgrad_accumulation={OVERWRITE_FIRST!r} decides on the host if dw "
                        "replaces main_grad, and is_first_microbatch is a tensor. Pass a bool, or zero main_grad and "
                        "write True."
                    )
                main_grad = "overwrite" if first is True else main_grad
        if grads.dw and not dry and self.delay_wgrad_compute:
            self._refuse_parametrized("delay_wgrad_compute=True")
            # a graph's forward leaves operands before any backward, and one in eval mode may never have one
            delay = "queue" if not as_nodes else "buffers" if self.training else ""
        row, column = self._codes.of_call(self, kind, weights[0]) if kind != "plain" else ((), ())
        scales, amaxes = scaling.of_call(self, measured != NO_OPERANDS, observe) if recipe.stateful else ((), ())
        return WeightSide(
            kind, observe, measured, main_grad, dummy, delay, (row, column, scales, amaxes),
            self._written(any(grads), observe, main_grad, delay, as_nodes),
            # a weight whose gradient bypasses autograd stays out of its graph: hooks of the weight would get None
            not as_nodes and (delay != "" or (main_grad != "" and not dummy)),
        )  # fmt: skip

    def _written(self, needs: bool, observe: bool, main_grad: str, delay: str, as_nodes: bool) -> tuple[Any, ...]:
        """Return the buffers that backward writes to: main_grad, dy's amax, the counter of rounding, the queue."""
        target: Any = () if as_nodes else None
        if not needs:
            return target, None, None, None
        amax, box = self._hidden._buffers[DY_AMAX] if observe else None, None
        if main_grad or delay:
            target, box = self._wgrad.buffers(self, main_grad, delay, as_nodes)
        seed = self._hidden._buffers.get(SEED)
        return target, amax, seed.clone() if process.dry and seed is not None else seed, box

    def _config_key(
        self, recipe: Recipe, x: Any, weight: Tensor, bias: Tensor | None, grads: WantedGradients, side: WeightSide,
        codes: XCodes, parallel: Parallel | None, as_nodes: bool, splits: Tensor | None = None, **settings: Any,
    ) -> tuple[str, Parts]:  # fmt: skip
        """Return the string of a call's config, and the amaxes on which the ranks have agreed for it."""
        all_reduced: Parts = ()
        if parallel is not None:
            of_x, of_w, all_reduced = all_reduce_amaxes(
                self, parallel, recipe, None if codes.row else x, weight, side, grads.dw, as_nodes, splits
            )
            settings |= {"x_all_reduced": of_x, "w_all_reduced": of_w}
        settings |= {
            "weight": side.weight, "observe": side.observe, "main_grad": side.main_grad, "dummy_grad": side.dummy_grad,
            "deferred_wgrad": side.deferred_wgrad, "wants_dx": grads.dx, "wants_dw": grads.dw, "wants_db": grads.db,
            "dtype": DTYPE_NAMES[x.dtype], "weight_dtype": DTYPE_NAMES[weight.dtype],
            "recompute_w_columns": not self.keep_weight_codes,
        }  # fmt: skip
        if side.weight != "plain" and grads.dx and not side.inputs[1] and recipe.linear().dgrad.right is not None:
            settings["w_has_columns"] = False
        if grads.ds:
            settings["wants_ds"] = True
        if self.save_original_input and grads.dw and not codes.row:
            settings["x_columns"] = "from_x"
        if side.measured != NO_OPERANDS:
            measured = side.measured
            settings |= {"measures_x": measured.x, "measures_w": measured.w, "measures_dy": measured.dy}
        if bias is not None:
            settings["bias_dtype"] = DTYPE_NAMES[bias.dtype]
        if codes.row:
            settings |= {"x": "codes", "x_has_columns": len(codes.column) > 0}
        if torch.compiler.is_compiling():
            return call_key(self.NAME, recipe, **settings), all_reduced
        return _cached_key(self.NAME, recipe.key, **settings), all_reduced

    # -- the weight's gradient -----------------------------------------------------------------------------------------

    def backward_dw(self) -> None:
        """Compute a weight gradient that `delay_wgrad_compute=True` left out of backward.

        Call it once for each backward: each call takes the oldest one that is pending, and adds the gradient to
        `weight.grad` or to `weight.main_grad`. Hooks of the weight fire here, once. If the call raises, call it again:
        no gradient is lost or added twice. A gradient that waits is computed even if `delay_wgrad_compute` is False by
        now, and a weight of the same shape that replaced the old one receives it. If none waits, or the weight is
        frozen, the call does nothing, and warns if `delay_wgrad_compute` is on or a gradient waits.

        Raises:
            UnsupportedConfig: the weight is sharded or parametrized; the program wrote to an unquantized operand since
                backward; `weight.main_grad` is missing; or a CUDA graph captured the backward and not this call, or the
                reverse.
            UnsupportedShape: since that backward the weight was replaced by one of another shape, or moved to another
                device.

        Example:
            >>> layer = octavo.Linear(8, 4, delay_wgrad_compute=True)
            >>> layer(torch.ones(2, 8)).sum().backward()
            >>> layer.weight.grad is None
            True
            >>> layer.backward_dw()
            >>> layer.weight.grad.shape
            torch.Size([4, 8])
        """
        self._wgrad.deliver(self)

    def discard_dw(self, captured: bool = False) -> int:
        """Discard the weight gradients that still wait for `backward_dw()`, such as those of warm-up calls.

        Args:
            captured: also discard those of backwards that were captured in a CUDA graph. Pass True after a capture that
                the program does not use.

        Returns:
            How many were discarded.

        Example:
            >>> layer = octavo.Linear(8, 4, delay_wgrad_compute=True)
            >>> layer(torch.ones(2, 8)).sum().backward()
            >>> layer.discard_dw()
            1
        """
        return self._wgrad.queue.discard(captured=captured)

    # -- weights that are codes ----------------------------------------------------------------------------------------

    def _check_may_be_codes(self) -> None:
        """Raise if the weight cannot be stored as codes: it is parametrized or sharded, or the recipe of the codes
        changes at a step."""
        if self._schedule is not None:
            raise UnsupportedConfig(
                f"{self.op_describe()} changes its recipe at step {self._schedule.changes[-1][0]}, and a weight stored "
                "as codes keeps its recipe. Hold it after that step, or use a policy without from_step."
            )
        self._refuse_parametrized("A weight that is codes")
        refuse_shards(self._weight_parts(), "A weight that is codes")

    def _replace_weight_by_codes(
        self, trainable: bool = False, keep_columns: bool = False, keep_initial: bool = False
    ) -> None:
        """Keep the weight only as codes of this layer's recipe. With `keep_initial` the present values stay on the
        host, for an optimizer's master copy."""
        keeps = keep_initial and not self._weight_parts()[0].is_meta
        values = [part.detach().to("cpu", copy=True) for part in self._weight_parts()] if keeps else []
        self._codes.replace_weight(self, trainable, keep_columns)
        for part, initial in zip(self._weight_parts(), values, strict=False):
            part.high_precision_init = initial  # type: ignore[attr-defined]

    def _restore_weight(self) -> None:
        """Replace codes by a weight with the dequantized values."""
        self._codes.restore_weight(self)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._codes.has_quantized_weight:
            names, values = self._names_of_weights(), self._codes.values(self)
            for name, part in zip(names, [values] if len(names) == 1 else values.unbind(), strict=True):
                destination[prefix + name] = part

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Load a state dict; values of a quantized weight are quantized."""
        refuse_codes(self, self._names_of_weights(), state_dict, prefix)
        keys = [prefix + name for name in self._names_of_weights()]
        loaded, own = [state_dict.get(key) for key in keys], self._weight_parts()
        fits = all([part is not None and part.shape == p.shape for part, p in zip(loaded, own, strict=True)])
        if self._codes.has_quantized_weight and fits:
            self._codes.load(self, loaded, assign=rest[0].get("assign_to_params_buffers", False))
            # torch's own loading then finds the weights already loaded
            state_dict = {**state_dict, **{k: p.detach() for k, p in zip(keys, self._weight_parts(), strict=True)}}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _repr_of_recipe(self) -> str:
        recipe = "from octavo.autocast" if self._recipe is None else self._recipe.key
        return f"recipe={recipe}"

    def _repr_of_weight(self) -> str:
        return ", weight that is codes" if self._codes.has_quantized_weight else ""


@lru_cache(maxsize=4096)
def _cached_key(name: str, recipe_key: str, **settings: Any) -> str:
    """Return the string of a config. By the recipe's key, a string: the hash of a recipe is computed in Python."""
    return call_key(name, resolve(recipe_key), **settings)


def _forward_outside(module: Quantized, why: str, *arguments: Any) -> Any:
    """Run the module eagerly, outside the graph: raise if it is strict, else warn once."""
    module._refuse(why)
    return module.forward(*arguments)


outside = Untraced(_forward_outside, "octavo: this layer cannot be part of a graph")


def wanted(x: bool, weights: Sequence[Tensor], bias: Tensor | None, scales: Tensor | None = None) -> WantedGradients:
    """Return the gradients that backward may compute; `x` says whether x requires one."""
    if not torch.is_grad_enabled():
        return WantedGradients()
    return WantedGradients(
        x, any([weight.requires_grad for weight in weights]), bias is not None and bias.requires_grad,
        scales is not None and scales.requires_grad,
    )  # fmt: skip


@note_full_sharding
def _keep_no_codes(module: nn.Module) -> None:
    """Have backward quantize a weight again that FSDP2 gathers for it anyway: kept codes are those of a whole weight,
    of which each rank has a part."""
    if isinstance(module, Quantized) and module.keep_weight_codes and not module._codes_chosen:
        module.keep_weight_codes = False
