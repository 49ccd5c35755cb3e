"""`Quantized`: a module with a weight that a recipe quantizes, the base class of Linear and GroupedLinear.

It keeps the state of the recipe in hidden buffers (`octavo.ops.hidden_buffers`): codes of the weight
(`octavo.weights.cache`), delayed scaling's memory (`octavo.scaling.delayed_scaling`), the counter of stochastic
rounding. The `forward` of a subclass gathers these and calls its layer.
"""

import ctypes
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from octavo._torch.autograd import current_graph_task
from octavo._torch.fakes import FakeTensor, as_real_as, runs_on_shapes
from octavo._torch.tracing import Untraced, while_tracing
from octavo.communication.tensor_parallel import Parallel
from octavo.errors import UnsupportedConfig, warn
from octavo.formats import FLOATS
from octavo.ops.hidden_buffers import HiddenBuffers
from octavo.ops.operation import FusibleOperation
from octavo.ops.published_codes import RULE, are_codes
from octavo.ops.schedule import STEP, RecipeSchedule
from octavo.quant.qtensor import Parts
from octavo.quant.quantizer import Quantizer
from octavo.recipes import BF16, LinearQuant, Recipe
from octavo.recipes import recipe as resolve
from octavo.recipes.ambient import process
from octavo.runtime.call import Stage, call
from octavo.scaling import delayed_scaling as scaling
from octavo.scaling.saved_state import ROUNDING
from octavo.weights import optimizer_hooks
from octavo.weights.quantized_weight import QuantizedWeight, moved
from octavo.weights.unsupported_wgrad import refuse_shards
from octavo.weights.weight_codes import WeightCodes
from octavo.weights.wgrad_delivery import WeightGradient

UNQUANTIZED = BF16()
SEED = "rounding_seed"


def unsupported_dtype_reason(dtype: torch.dtype) -> str:
    """Returns why a weight of this dtype cannot be quantized; empty if it can."""
    if dtype in FLOATS:
        return ""
    if are_codes(dtype):
        return f"its weight is {dtype}: {RULE}"
    return (
        f"its weight is {dtype}, and only float32, bfloat16 and float16 can be quantized (model.float() casts it, and "
        "dtype=torch.float32 makes a new one so)"
    )


DY_AMAX = scaling.BUFFER_NAMES["backward"]["running_amax"]  # the buffer in which backward observes dy


class WeightSide(NamedTuple):
    """The weight's part in one call of a layer."""

    weight: str  # "plain", "codes" or "held"; this and the next five are fields of the layer's config
    observe: bool
    measured: str
    main_grad: str
    dummy_grad: bool
    deferred_wgrad: str
    inputs: tuple[Parts, ...]  # its codes by row and by column, delayed scaling's inverse scales, running amaxes
    buffers: tuple[Any, ...]  # the buffers that backward writes to
    elsewhere: bool  # its gradient does not go through autograd
    has_extras: bool  # the call returns tensors for the layer besides y


def settings_of(side: WeightSide) -> dict[str, Any]:
    """Returns the fields of the layer's config that the weight's part in a call determines."""
    return {
        "weight": side.weight, "observe": side.observe, "measured": side.measured, "main_grad": side.main_grad,
        "dummy_grad": side.dummy_grad, "deferred_wgrad": side.deferred_wgrad,
    }  # fmt: skip


class Quantized(FusibleOperation, nn.Module):
    """A module that keeps the settings and the state of a recipe for its weight."""

    LAYER: ClassVar[Any]  # a layer of the contract (octavo.runtime.contract)
    NAME: ClassVar[str]  # its name in the registry
    scales_per_operand = 1  # delayed scaling's inverse scales for each of x, w, dy
    fuse_wgrad_accumulation: bool
    delay_wgrad_compute: bool
    strict: bool
    _hidden: HiddenBuffers
    parallel: Parallel | None = None  # how the weight is split over ranks
    _ranks_checked = False  # whether the ranks were found to call the layer alike
    _number: tuple[tuple[str, str], int] | None = None  # among the split layers of its kind
    _schedule: RecipeSchedule | None = None  # recipes that the layer changes to at given steps

    # -- the weight: subclasses define these -----------------------------------------------------------------------

    def _names_of_weights(self) -> list[str]:
        """Return the names of the parameters that form the weight."""
        raise NotImplementedError

    def _weight_parts(self) -> list[nn.Parameter]:
        """Return the parameters that form the weight; a parametrized one is computed."""
        return [getattr(self, name) for name in self._names_of_weights()]

    def _trained_by(self) -> list[nn.Parameter]:
        """Return the parameters that tell which optimizer trains this layer: its trained weights, or all parameters if
        no weight is a trained parameter."""
        own: list[Any] = [self._parameters.get(name) for name in self._names_of_weights()]
        trained = [weight for weight in own if weight is not None and weight.requires_grad]
        return trained or list(self.parameters())

    def _whole_weight(self) -> Tensor:
        """Return the weight in the shape that the layer takes, for uses that need no gradient."""
        raise NotImplementedError

    def _set_weights(self, whole: Tensor) -> None:
        """Replace the parameters by those of a whole weight, dense or held as codes."""
        raise NotImplementedError

    def op_describe(self) -> str:
        """Return the class, the sizes and the path of this layer, as errors name it."""
        raise NotImplementedError

    def _caches_columns(self, quant: LinearQuant) -> bool:
        """Whether a cache of the weight has column codes besides row codes."""
        return True

    def _split_over_ranks(self) -> Parallel | None:
        """Return how the weight is split over ranks; None if there is one rank."""
        parallel = self.parallel
        return None if parallel is None or parallel.size() == 1 else parallel

    def _name_for_collectives(self) -> str:
        """Return the name of this layer for collectives. A graph gets that of the class: it would be another graph for
        each path."""
        return type(self).__name__ if torch.compiler.is_compiling() else self.op_describe()

    def op_starts_run(self) -> bool:
        parallel = self._split_over_ranks()
        return parallel is not None and parallel.mode == "column"

    def op_ends_run(self) -> bool:
        parallel = self._split_over_ranks()
        return parallel is not None and parallel.mode == "row"

    def op_column_blocks(self, blocks: int) -> int:
        parallel = self._split_over_ranks()
        if parallel is None or parallel.mode == "column":
            return 0 if parallel is None else parallel.blocks
        if blocks > 1:
            raise UnsupportedConfig(
                f"{self.op_describe()} with parallel_mode='row' takes adjacent features of one block, and each rank "
                f"has a part of {blocks} blocks: column_blocks={blocks} of the layer before it, which is for halves "
                "that a gated activation pairs. Leave column_blocks out there."
            )
        return 0

    def _all_reduced_weight_amaxes(self, recipe: Recipe, as_nodes: bool) -> Parts:
        """Return the all-reduced amaxes of the weight, by row and by column,
        for a cast into the cache; none if the scales follow from this process's weight."""
        return ()

    def _gemm_route(self, left: Quantizer | None, right: Quantizer | None, device: torch.device) -> str:
        """Return how the device multiplies operands of these quantizers: "native", "emulated" or "reference"."""
        raise NotImplementedError

    # -- the recipe ------------------------------------------------------------------------------------------------

    def _set_up(
        self,
        recipe: str | Recipe | None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        strict: bool = True,
        path: str = "",
    ) -> None:
        """Sets the settings, and makes the buffers that the recipe needs."""
        optimizer_hooks.listen(self)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.strict = strict
        self._path = path  # for messages
        self._warned = False
        self.__dict__["_hidden"] = HiddenBuffers()  # not a submodule
        self._codes = WeightCodes()
        self._scaling = scaling.DelayedScaling()
        self._wgrad = WeightGradient()
        self._recipe: Recipe | None = None
        self._given_recipe = False  # whether `convert` gave the recipe to a layer that had none
        self._follows = False  # whether the layer ever ran in an ambient recipe
        self._pending: dict[str, Tensor] = {}  # loaded state whose buffers do not exist yet
        self._on_meta = False  # whether state is on the meta device, until the weight leaves it
        self._unplaced = False  # whether a call has yet to check that hidden buffers are on the weight's device
        self._seed = _seed_of(self, path)
        self.recipe = recipe  # type: ignore[assignment]

    def _tear_down(self) -> None:
        """Undoes `_set_up`: removes all attributes and buffers that a plain module does not have."""
        self._release_codes()
        self._codes.drop(self)
        self._scaling.drop(self)
        for name in (
            "fuse_wgrad_accumulation", "delay_wgrad_compute", "strict", "_hidden",
            "_codes", "_scaling", "_wgrad", "_recipe", "_given_recipe", "_follows", "_pending", "_on_meta", "_seed",
            "_path", "_warned", "_unplaced",
        ):  # fmt: skip
            del self.__dict__[name]
        self.__dict__.pop("_schedule", None)

    def _lose_recipe(self) -> None:
        """Drop the recipe and its state; the layer follows `octavo.autocast` again."""
        self._codes.drop(self)
        self._scaling.drop(self)
        self._hidden.drop([SEED])
        self._recipe, self._given_recipe, self._schedule = None, False, None

    @property
    def recipe(self) -> Recipe | None:
        """The layer's own recipe; None if the layer follows `octavo.autocast`. Set it to a name, a canonical string, a
        `Recipe` or None."""
        return self._recipe

    @recipe.setter
    def recipe(self, spec: str | Recipe | None) -> None:
        found = None if spec is None else resolve(spec)
        if found is not None and (why := self._recipe_unsupported_reason(found)):
            raise UnsupportedConfig(f"This layer cannot run in {found}: {why}. octavo.revert(model) starts afresh.")
        if found is not None:
            if not found.stateful:
                self._scaling.drop(self)
            self._prepare(found)
        self._recipe = found
        if self._schedule is not None:  # a recipe that the caller sets stays
            self._schedule = None

    def _follow_schedule(self, changes: tuple[tuple[int, Recipe], ...], step: int, since: int) -> None:
        """Make the layer change its recipe at these steps; `step` is the number of steps that the run has made, and
        `since` the one from which on it has had the recipe of now."""
        assert self._recipe is not None
        self._schedule = RecipeSchedule(self._recipe, changes, step, since) if changes else None

    def _end_scheduled_step(self, in_graph: bool) -> None:
        """Count a step, and change the recipe if one begins at the next."""
        schedule = self._schedule
        if schedule is None:
            return
        if in_graph:
            raise UnsupportedConfig(
                f"{self.op_describe()} changes its recipe at step {schedule.changes[-1][0]}, and a graph cannot count "
                "steps. Call octavo.step outside of the graph, or use a policy without from_step."
            )
        schedule.step += 1
        recipe = schedule.recipe_at(schedule.step)
        if recipe != self._recipe:
            self._scaling.drop(self)  # a window of amaxes begins anew
            if not recipe.linear().is_stochastic:  # a run that resumes here has no counter of rounding
                self._hidden.drop([SEED])
            self.recipe = recipe  # type: ignore[assignment]
        self._schedule = None if schedule.has_ended() else schedule

    def _recipe_unsupported_reason(self, recipe: Recipe | None) -> str:
        """Return why this layer cannot use a recipe; empty if it can."""
        weight: Any = self._weight_parts()[0]
        if recipe is not None and isinstance(weight, QuantizedWeight) and recipe.key != weight.kind.recipe:
            return f"its weight is held as codes of {weight.kind.recipe}"
        if why := unsupported_dtype_reason(self._weight_parts()[0].dtype):
            return why
        return self._scaling.unsupported_reason(recipe) if recipe is not None and recipe.stateful else ""

    def _prepare(self, recipe: Recipe) -> None:
        """Makes the buffers that a recipe needs and the layer lacks."""
        if torch.compiler.is_compiling():
            self._now("_install_key", recipe.key)
        else:
            self._install(recipe)

    def _install_key(self, recipe_key: str) -> None:
        """Makes the buffers of a recipe, given by its key, while a compiler traces."""
        self._install(resolve(recipe_key))

    def _install(self, recipe: Recipe) -> None:
        remembers = recipe.stateful and self._scaling.recipe != recipe
        is_stochastic = SEED not in self._hidden._buffers and recipe.linear().is_stochastic
        if remembers or is_stochastic:  # checked at every forward under an ambient recipe, and rarely true
            weight = self._weight_parts()[0]
            with as_real_as(weight), torch.inference_mode(False):  # buffers made in inference mode could not train
                if remembers:
                    self._scaling.install(self, recipe, weight.device, self.scales_per_operand)
                if is_stochastic:
                    seed = torch.tensor([self._seed, 0], device=weight.device, dtype=torch.int64)
                    self._hidden.put(SEED, seed)
            self._on_meta = any(buffer.is_meta for _, buffer in self._state())
            self._unplaced = True
        if self._pending:
            self._pending = self._load_recipe_state(self._pending)

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, buffer) for the state of recipes in this layer."""
        for name in (*scaling.BUFFERS, SEED):
            buffer = self._hidden._buffers.get(name)
            if buffer is not None:
                yield name, buffer

    def _settle(self) -> None:
        """Makes the state that was on the meta device, once the weight has left it."""
        if self._on_meta and self._place().type != "meta":
            self._reset_state()

    def _settle_with_weight(self) -> None:
        """Settles, and moves hidden buffers to the device of a weight that was moved without them: `fully_shard` moves
        parameters to its mesh one by one, and `load_state_dict(..., assign=True)` replaces them."""
        self._settle()
        self._unplaced = self._on_meta
        device = self._place()
        stay = [t.is_meta or _is_fake(t) or t.device == device for t in self._hidden.buffers()]
        if all(stay) or device.type == "meta" or any(map(_is_fake, self.parameters())):
            return
        self._codes.drop(self)
        self._scaling.forget_views()
        self._hidden.follow(lambda buffer: buffer.to(device))

    def _place(self) -> torch.device:
        """Returns the device of the parameters, without computing a parametrized weight."""
        found: Tensor | None = next(self.parameters(), None)
        found = next(self.buffers(), None) if found is None else found  # a weight may be a buffer
        return torch.device("cpu") if found is None else found.device

    def _followed(self, recipe: Recipe | None) -> Recipe:
        """Returns the ambient recipe, or the unquantized one, for a layer without its own, and prepares its buffers."""
        if recipe is None:
            if not torch.compiler.is_compiling() and self._follows and current_graph_task() != -1:
                raise UnsupportedConfig(
                    "This layer takes its recipe from octavo.autocast, and a checkpoint runs it again in backward, "
                    "outside of the autocast block. Enter octavo.autocast inside the checkpointed function, or give "
                    "the layer its own recipe: octavo.convert(model, recipe)."
                )
            return UNQUANTIZED
        self._prepare(recipe)
        if not torch.compiler.is_compiling() and not self._follows:  # a graph would guard on it
            self._follows = True
        return recipe

    # -- one call of the layer -----------------------------------------------------------------------------------------

    def _run_node(
        self, stage: Stage, x: Tensor | None, as_nodes: bool, shape: tuple[int, ...] | None = None
    ) -> Sequence[Tensor]:
        """Runs the layer's node, inside of all collectives. Returns y, then extras; see `octavo.runtime.call`."""
        return call(stage, x, as_nodes, self, shape)

    def _weight_side(
        self, recipe: Recipe, weights: Sequence[Tensor], grads: str, first: bool | Tensor | None, as_nodes: bool,
        has_codes: bool = False,
    ) -> WeightSide:  # fmt: skip
        """Returns the weight's part in a call. `has_codes`: x arrived as codes."""
        scaling = self._scaling
        dry = process.dry > 0 or (as_nodes and runs_on_shapes(weights[0]))
        observe = recipe.stateful and self.training and not dry and scaling.observes(self, weights[0], as_nodes)
        kind = self._codes.supply(self, recipe, weights, first, grads, observe, dry)
        measured = scaling.measures(kind, grads, has_codes) if recipe.stateful and scaling.uncalibrated else ""
        main_grad, dummy, delay = "", False, ""
        if "w" in grads and not dry and self.fuse_wgrad_accumulation:
            main_grad, dummy = self._wgrad.main_grad(self)
        if "w" in grads and not dry and self.delay_wgrad_compute:
            self._refuse_parametrized("delay_wgrad_compute=True")
            # a graph's forward leaves operands before any backward, and one in eval mode may never have one
            delay = "queue" if not as_nodes else "buffers" if self.training else ""
        row, column = self._codes.of_call(self, kind, weights[0]) if kind != "plain" else ((), ())
        inverse_scales = scaling.inputs(self, measured) if recipe.stateful else ()
        return WeightSide(
            kind, observe, measured, main_grad, dummy, delay,
            (row, column, inverse_scales, scaling.running_amaxes(self) if observe else ()),
            self._written(grads, observe, main_grad, delay, as_nodes),
            # a weight whose gradient bypasses autograd stays out of its graph: hooks of the weight would get None
            not as_nodes and (delay != "" or (main_grad != "" and not dummy)),
            delay == "buffers",
        )  # fmt: skip

    def _written(self, grads: str, observe: bool, main_grad: str, delay: str, as_nodes: bool) -> tuple[Any, ...]:
        """Returns the buffers that backward writes to: main_grad, dy's amax, the counter of rounding, the queue."""
        target: Any = () if as_nodes else None
        if not grads:
            return target, None, None, None
        amax, box = self._hidden._buffers[DY_AMAX] if observe else None, None
        if main_grad or delay:
            target, box = self._wgrad.buffers(self, main_grad, delay, as_nodes)
        seed = self._hidden._buffers.get(SEED)
        return target, amax, seed.clone() if process.dry and seed is not None else seed, box

    def _after(self, key: str, codes: Parts) -> Any:
        """Returns the function that takes a call's extra outputs: it stores operands for a delayed dW. `codes` are x's,
        as the caller passed them."""

        def after(extras: Sequence[Tensor]) -> None:
            self._wgrad.post(self, key, extras, codes)

        return after

    def op_holds_objects(self) -> bool:
        """Whether backward needs Python objects, which a custom operator cannot take."""
        if not (self.fuse_wgrad_accumulation or self.delay_wgrad_compute) or not torch.is_grad_enabled():
            return False
        return any([weight.requires_grad for weight in self._weight_parts()])

    @while_tracing
    def _now(self, method: str, *arguments: Any) -> Any:
        """Runs a method as plain Python while a compiler traces: one of this layer's, or as "owner.method" one of an
        attribute's, with the layer as first argument. The compiler takes arguments and results as constants, so modules
        cannot be among them."""
        owner, _, name = method.rpartition(".")
        return getattr(getattr(self, owner), name)(self, *arguments) if owner else getattr(self, name)(*arguments)

    def _refuse(self, why: str) -> None:
        """Raises the reason why this layer cannot be in a graph; without `strict`, warns once."""
        if self.strict:
            raise UnsupportedConfig(why)
        if not self._warned:
            self._warned = True
            warn(f"Running outside the graph. {why}", stacklevel=3)

    # -- the weight's gradient -----------------------------------------------------------------------------------------

    def backward_dw(self) -> None:
        """Computes a weight gradient that `delay_wgrad_compute=True` left out of backward.

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
        """Discards the weight gradients that still wait for `backward_dw()`, such as those of warm-up calls.

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

    def _has_weight_hooks(self) -> bool:
        """Whether a weight has hooks on its gradient."""
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

    # -- recipe state, for checkpoints ---------------------------------------------------------------------------------

    def _recipe_state(self) -> dict[str, Tensor]:
        """Return copies of the recipe state: delayed scaling's memory, the counter of stochastic rounding."""
        self._settle()
        state = self._scaling.export(self)
        if (seed := self._hidden._buffers.get(SEED)) is not None:
            state[ROUNDING] = seed.clone()
        if self._schedule is not None:
            state[STEP] = self._schedule.export()
        return state

    def _load_recipe_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Load the tensors that the layer has buffers for, and return the rest."""
        self._settle()
        rest = dict(state)
        if self._schedule is not None and STEP in rest:
            found = rest.pop(STEP)
            self._schedule.step = self._schedule.step if _is_fake(found) else int(found)
        if self._on_meta:
            return rest
        count = len(rest)
        self._scaling.restore(self, rest)
        if (seed := self._hidden._buffers.get(SEED)) is not None and ROUNDING in rest:
            seed.copy_(rest.pop(ROUNDING))
        if len(rest) < count:
            self._scaling.recall(self)
        return rest

    def _pending_state(self) -> dict[str, Tensor]:
        """Return copies of the loaded state whose buffers do not exist yet."""
        return {name: tensor.clone() for name, tensor in self._pending.items()}

    # -- weights that are codes ----------------------------------------------------------------------------------------

    def _check_holdable(self) -> None:
        """Raise if the weight cannot be held as codes: it is parametrized or sharded, or the recipe of the codes
        changes at a step."""
        if self._schedule is not None:
            raise UnsupportedConfig(
                f"{self.op_describe()} changes its recipe at step {self._schedule.changes[-1][0]}, and a weight held "
                "as codes keeps its recipe. Hold it after that step, or use a policy without from_step."
            )
        self._refuse_parametrized("A weight that is codes")
        refuse_shards(self._weight_parts(), "A weight that is codes")

    def _hold_codes(self, trainable: bool = False) -> None:
        """Keep the weight only as codes of this layer's recipe, in both orientations."""
        self._codes.hold(self, trainable)

    def _release_codes(self) -> None:
        """Replace codes by a weight with the dequantized values."""
        self._codes.release(self)

    # -- overrides of nn.Module's methods -----------------------------------------------------------------------------

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes the state of a file, or of a copy: a `__deepcopy__` would be found through `torch.compile(layer)` too,
        whose copy would be the plain layer."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._listen()

    def _listen(self) -> None:
        """Makes a copy, or a layer from a file, hear the steps of optimizers."""
        self._unplaced = True
        optimizer_hooks.listen(self)
        if self._scaling.recipe is not None:
            scaling.listen(self)

    def _reset_seed(self) -> None:
        """Derives the seed of rounding again, after the parameters were initialised again."""
        if "_seed" in self.__dict__:  # a constructor initialises parameters before the seed exists
            self._seed = _seed_of(self, "")
            if (seed := self._hidden._buffers.get(SEED)) is not None:
                seed.copy_(torch.tensor([self._seed, 0], device="cpu", dtype=torch.int64))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Quantized":
        """Applies `fn`. Hidden buffers follow the module's device."""
        if not self._codes.held:
            self._codes.drop(self)
        self._scaling.forget_views()
        done: dict[int, Tensor] = {}
        held = {name: moved(p, fn, done) for name, p in self._parameters.items() if isinstance(p, QuantizedWeight)}
        self._parameters.update(dict.fromkeys(held))  # already moved: hide them from nn.Module
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._parameters.update(held)
        self._hidden.follow(fn)
        self._unplaced = True
        on_meta = self._on_meta
        self._on_meta = any(buffer.is_meta for _, buffer in self._state())
        if (on_meta or self._on_meta) and self._place().type != "meta":
            self._reset_state()
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Loads, then moves recipe state to the weight's device, which changes if a loaded weight is assigned."""
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[misc]
        self._settle_with_weight()
        self._unplaced = True  # FSDP may keep the weight elsewhere than calls have it
        if any(prefix + name in state_dict for name in self._names_of_weights()):
            self._weights_loaded()

    def _weights_loaded(self) -> None:
        """Notes that weights were loaded."""
        self._scaling.weights_loaded()
        self._codes.note_load()

    def _reset_state(self) -> None:
        """Makes the state as at construction: storage of a tensor from the meta device has no values yet."""
        remembered = self._scaling.recipe
        self._scaling.drop(self)
        self._hidden.drop([SEED])
        for recipe in (remembered, self._recipe):
            if recipe is not None:
                self._prepare(recipe)


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _forward_outside(module: Quantized, why: str, *arguments: Any) -> Any:
    """Runs the module eagerly, outside the graph: raises if it is strict, else warns once."""
    module._refuse(why)
    return module.forward(*arguments)


outside = Untraced(_forward_outside, "octavo: this layer cannot be part of a graph")


def wanted(x: bool, weights: Sequence[Tensor], bias: Tensor | None, scales: Tensor | None = None) -> str:
    """Returns the letters of the gradients that backward may compute; `x` says whether x requires one."""
    if not torch.is_grad_enabled():
        return ""
    return (
        ("x" if x else "")
        + ("w" if any([weight.requires_grad for weight in weights]) else "")
        + ("b" if bias is not None and bias.requires_grad else "")
        + ("s" if scales is not None and scales.requires_grad else "")
    )


def _seed_of(module: Quantized, path: str) -> int:
    """Returns the seed of stochastic rounding: a hash of torch's generator state, the layer's path and its sizes.
    It draws no random numbers, so parameters and dropout are the same as without it."""
    generator = torch.get_rng_state()
    state = zlib.crc32(ctypes.string_at(generator.data_ptr(), generator.nbytes))  # real bytes, even under fake tensors
    shape = f"{module.out_features}x{module.in_features}"
    return state << 30 | zlib.crc32(f"{path} {shape}".encode("utf-8", "surrogatepass")) >> 2
