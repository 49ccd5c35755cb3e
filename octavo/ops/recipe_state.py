"""`RecipeState`: the recipe of a module, and the state that recipes keep from call to call.

The state is in hidden buffers (`octavo.ops.hidden_buffers`), which follow the device of the weight: delayed scaling's
memory (`octavo.scaling.delayed_scaling`) and the counter of stochastic rounding. It is made when the recipe is set, or
when a call first runs in an ambient recipe, and materialized once a weight has left the meta device.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from octavo._torch.autograd import current_graph_task
from octavo._torch.fakes import FakeTensor, as_real_as
from octavo._torch.tracing import while_tracing
from octavo.communication.groups import note_split
from octavo.errors import UnsupportedConfig, check_choice, warn
from octavo.formats import FLOATS
from octavo.ops import rounding_seed
from octavo.ops.hidden_buffers import HiddenBuffers
from octavo.ops.operation import FusibleOperation
from octavo.ops.published_codes import RULE, are_codes
from octavo.ops.rounding_seed import SEED, seed_of
from octavo.ops.schedule import STEP, RecipeSchedule
from octavo.recipes import BF16, Recipe
from octavo.recipes import recipe as resolve
from octavo.recipes.ambient import ambient
from octavo.scaling import delayed_scaling as scaling
from octavo.scaling.saved_state import ROUNDING
from octavo.weights import optimizer_hooks
from octavo.weights.quantized_parameters import moved
from octavo.weights.quantized_weight import QuantizedWeight
from octavo.weights.saved_codes import restore_codes
from octavo.weights.weight_codes import WeightCodes
from octavo.weights.wgrad_delivery import WeightGradient

UNQUANTIZED = BF16()
OVERWRITE_FIRST = "overwrite_first"  # a setting of fuse_wgrad_accumulation


def unsupported_dtype_reason(dtype: torch.dtype) -> str:
    """Return why a weight of this dtype cannot be quantized; empty if it can."""
    if dtype in FLOATS:
        return ""
    if are_codes(dtype):
        return f"its weight is {dtype}: {RULE}"
    return (
        f"its weight is {dtype}, and only float32, bfloat16 and float16 can be quantized (model.float() casts it, and "
        "dtype=torch.float32 makes a new one so)"
    )


class RecipeState(FusibleOperation, nn.Module):
    """A module with a recipe. Three owners share the work: `_codes` has codes of the weight, `_scaling` delayed
    scaling's memory, `_wgrad` the weight's gradient where it is not `.grad` alone."""

    scales_per_operand = 1  # delayed scaling's inverse scales for each of x, w, dy
    fuse_wgrad_accumulation: bool | str
    delay_wgrad_compute: bool
    strict: bool
    _hidden: HiddenBuffers
    _codes: WeightCodes
    _scaling: scaling.DelayedScaling
    _wgrad: WeightGradient
    _seed_bits = 0  # of the seed of rounding that this rank has flipped
    _schedule: RecipeSchedule | None = None  # recipes that the layer changes to at given steps

    def _scales_of_all_ranks(self) -> tuple[int, int]:
        """Return where this rank's scales of an operand are among those of all ranks, and how many those are."""
        return 0, self.scales_per_operand

    def _names_of_weights(self) -> list[str]:
        """Return the names of the parameters that form the weight."""
        raise NotImplementedError

    def _weight_parts(self) -> list[nn.Parameter]:
        """Return the parameters that form the weight; a parametrized one is computed."""
        return [getattr(self, name) for name in self._names_of_weights()]

    def _replace_weight_by_codes(self, trainable: bool, keep_columns: bool, keep_initial: bool) -> None:
        """Keep the weight only as codes of this module's recipe."""
        raise NotImplementedError

    def op_describe(self) -> str:
        """Return the class, the sizes and the path of this layer, as errors name it."""
        raise NotImplementedError

    # -- the recipe ------------------------------------------------------------------------------------------------

    def _set_up(
        self,
        recipe: str | Recipe | None,
        fuse_wgrad_accumulation: bool | str = False,
        delay_wgrad_compute: bool = False,
        strict: bool = True,
        path: str = "",
    ) -> None:
        """Set the settings, and make the buffers that the recipe needs."""
        allowed = (False, True, OVERWRITE_FIRST)
        check_choice(fuse_wgrad_accumulation, allowed, what=f"{type(self).__name__}.fuse_wgrad_accumulation")
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
        # whether a call has yet to come, and to check that hidden buffers are on the weight's device
        self._unplaced = True
        self._seed = seed_of(self, path)
        self.recipe = recipe  # type: ignore[assignment]
        if (block := ambient.init) is not None:  # keep only codes of the weight that a constructor has initialised
            if self._recipe is None:
                self.recipe = block.recipe  # type: ignore[assignment]
            if self._recipe is not None and self._recipe.linear().fprop.right is not None:
                self._replace_weight_by_codes(True, block.keep_columns, block.preserve_high_precision)

    def _tear_down(self) -> None:
        """Undo `_set_up`: remove all attributes and buffers that a plain module does not have."""
        self._codes.restore_weight(self)
        self._codes.drop(self)
        self._scaling.drop(self)
        for name in (
            "fuse_wgrad_accumulation", "delay_wgrad_compute", "strict", "_hidden",
            "_codes", "_scaling", "_wgrad", "_recipe", "_given_recipe", "_follows", "_pending", "_on_meta", "_seed",
            "_path", "_warned", "_unplaced",
        ):  # fmt: skip
            del self.__dict__[name]
        for name in ("_schedule", "_seed_bits"):
            self.__dict__.pop(name, None)

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
        """Make the layer change its recipe at these steps; the run has made `step` steps, and has
        had its recipe since step `since`."""
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
        has_ended = schedule.step >= schedule.changes[-1][0]
        self._schedule = None if has_ended else schedule  # a new recipe has dropped it

    def _recipe_unsupported_reason(self, recipe: Recipe | None) -> str:
        """Return why this layer cannot use a recipe; empty if it can."""
        weight: Any = self._weight_parts()[0]
        codes = weight.kind.recipe if isinstance(weight, QuantizedWeight) else ""
        if recipe is not None and codes and recipe.key != codes and recipe.linear().quantizes_weight:
            return f"its weight is stored as codes of {codes}"
        if why := unsupported_dtype_reason(self._weight_parts()[0].dtype):
            return why
        return self._scaling.unsupported_reason(recipe) if recipe is not None and recipe.stateful else ""

    def _prepare(self, recipe: Recipe) -> None:
        """Make the buffers that a recipe needs and the layer lacks."""
        if torch.compiler.is_compiling():
            self._now("_install", recipe.key)
        else:
            self._install(recipe)

    def _install(self, recipe: Recipe | str) -> None:
        recipe = resolve(recipe) if isinstance(recipe, str) else recipe
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
                    self._seed_bits = 0
            self._on_meta = any(buffer.is_meta for _, buffer in self._state())
            self._unplaced = True
        self._load_pending()

    def _followed(self, recipe: Recipe | None) -> Recipe:
        """Return the ambient recipe, or the unquantized one, for a layer without its own, and prepare its buffers."""
        if recipe is None:
            if not torch.compiler.is_compiling() and self._follows and current_graph_task() != -1:
                raise UnsupportedConfig(
                    "This layer takes its recipe from octavo.autocast, and a checkpoint runs it again in backward, "
                    "outside of the autocast block. Give the layer its own recipe, octavo.convert(model, recipe); or "
                    "enter octavo.autocast inside the checkpointed function, which torch.compile does not take."
                )
            return UNQUANTIZED
        self._prepare(recipe)
        if not torch.compiler.is_compiling() and not self._follows:  # a graph would guard on it
            self._follows = True
        return recipe

    # -- its state -------------------------------------------------------------------------------------------------

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, buffer) for the state of recipes in this layer."""
        for name in (*scaling.BUFFERS, SEED):
            buffer = self._hidden._buffers.get(name)
            if buffer is not None:
                yield name, buffer

    def _materialize(self) -> None:
        """Materialize state that was on the meta device, once the weight has left it."""
        if self._on_meta and self._place().type != "meta":
            self._reset_state()

    def _materialize_with_weight(self) -> None:
        """Materialize the state, and move hidden buffers to the device of a weight that was moved without them:
        `fully_shard` moves parameters to its mesh one by one, and `load_state_dict(..., assign=True)` replaces them."""
        self._materialize()
        rounding_seed.follow_replica(self)
        self._unplaced = self._on_meta
        device = self._place()
        stay = [t.is_meta or isinstance(t, FakeTensor) or t.device == device for t in self._hidden.buffers()]
        if all(stay) or device.type == "meta" or any([isinstance(p, FakeTensor) for p in self.parameters()]):
            return
        self._codes.drop(self)
        self._scaling.forget_views()
        self._hidden.follow(lambda buffer: buffer.to(device))

    def _place(self) -> torch.device:
        """Return the device of the parameters, without computing a parametrized weight."""
        found: Tensor | None = next(self.parameters(), None)
        found = next(self.buffers(), None) if found is None else found  # a weight may be a buffer
        return torch.device("cpu") if found is None else found.device

    def _reset_state(self) -> None:
        """Make the state as at construction: storage of a tensor from the meta device has no values yet."""
        remembered = self._scaling.recipe
        self._scaling.drop(self)
        self._hidden.drop([SEED])
        for recipe in (remembered, self._recipe):
            if recipe is not None:
                self._prepare(recipe)

    def _reset_seed(self) -> None:
        """Derive the seed of rounding again, after the parameters were initialised again."""
        if "_seed" in self.__dict__:  # a constructor initialises parameters before the seed exists
            self._seed = seed_of(self, "")
            if (seed := self._hidden._buffers.get(SEED)) is not None:
                seed.copy_(torch.tensor([self._seed, 0], device="cpu", dtype=torch.int64))
                self._seed_bits, self._unplaced = 0, True

    def _recipe_state(self) -> dict[str, Tensor]:
        """Return copies of the recipe state: delayed scaling's memory, the counter of stochastic rounding."""
        self._materialize()
        state = self._scaling.export(self)
        if (seed := self._hidden._buffers.get(SEED)) is not None:
            state[ROUNDING] = rounding_seed.exported(self, seed)
        if self._schedule is not None:
            state[STEP] = self._schedule.export()
        return state

    def _load_recipe_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Load the tensors that the layer has buffers for, and return the rest."""
        self._materialize()
        rest = dict(state)
        if self._schedule is not None and STEP in rest:
            found = rest.pop(STEP)
            self._schedule.step = self._schedule.step if isinstance(found, FakeTensor) else int(found)
        if self._on_meta:
            return rest
        count = len(rest)
        self._scaling.restore(self, rest)
        if (seed := self._hidden._buffers.get(SEED)) is not None and ROUNDING in rest:
            rounding_seed.load(self, seed, rest.pop(ROUNDING))
        if len(rest) < count:
            self._scaling.recall(self)
        restore_codes(self, rest)
        return rest

    def _load_pending(self) -> None:
        """Load what has waited for buffers, or for memory of the weight."""
        if self._pending:
            self._pending = self._load_recipe_state(self._pending)

    def _pending_state(self) -> dict[str, Tensor]:
        """Return copies of the loaded state whose buffers do not exist yet."""
        return {name: tensor.clone() for name, tensor in self._pending.items()}

    # -- as a module, and as a part of graphs --------------------------------------------------------------------

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a file, or of a copy: a `__deepcopy__` would be found through `torch.compile(layer)` too,
        whose copy would be the plain layer."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # a copy, or a layer from a file, hears the steps of optimizers
        self._unplaced = True
        optimizer_hooks.listen(self)
        if getattr(self, "parallel", None) is not None:
            note_split(self)
        if self._scaling.recipe is not None:
            scaling.listen(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RecipeState":
        """Apply `fn`. Hidden buffers follow the module's device."""
        if not self._codes.has_quantized_weight:
            self._codes.drop(self)
        self._scaling.forget_views()
        done: dict[int, Tensor] = {}
        quantized = {name: moved(p, fn, done) for name, p in self._parameters.items() if isinstance(p, QuantizedWeight)}
        self._parameters.update(dict.fromkeys(quantized))  # already moved: hide them from nn.Module
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._parameters.update(quantized)
        self._hidden.follow(fn)
        self._unplaced = True
        on_meta = self._on_meta
        self._on_meta = any(buffer.is_meta for _, buffer in self._state())
        if (on_meta or self._on_meta) and self._place().type != "meta":
            self._reset_state()
        self._load_pending()
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Load, then move recipe state to the weight's device, which changes if a loaded weight is assigned."""
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[misc]
        self._materialize_with_weight()
        self._load_pending()
        self._unplaced = True  # FSDP may keep the weight elsewhere than calls have it
        if any(prefix + name in state_dict for name in self._names_of_weights()):
            self._weights_loaded()

    def _weights_loaded(self) -> None:
        """Note that weights were loaded."""
        self._scaling.weights_loaded()
        self._codes.note_load()

    @while_tracing
    def _now(self, method: str, *arguments: Any) -> Any:
        """Run a method as plain Python while a compiler traces: one of this layer's, or as "owner.method" one of an
        attribute's, with the layer as first argument. The compiler takes arguments and results as constants, so modules
        cannot be among them."""
        owner, _, name = method.rpartition(".")
        return getattr(getattr(self, owner), name)(self, *arguments) if owner else getattr(self, name)(*arguments)

    def _refuse(self, why: str) -> None:
        """Raise the reason why this layer cannot be in a graph; without `strict`, warn once."""
        if self.strict:
            raise UnsupportedConfig(why)
        if not self._warned:
            self._warned = True
            warn(f"Running outside the graph. {why}", stacklevel=3)
