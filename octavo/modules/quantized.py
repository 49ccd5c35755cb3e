"""A module with a weight that a recipe quantizes: what `octavo.Linear` and `octavo.GroupedLinear` have in common.

What a recipe needs besides the parameters is kept in buffers that no checkpoint of weights sees: codes of the weight
(`octavo.weights.cache`), delayed scaling's memory (`octavo.delayed_scaling.memory`), the counter of stochastic
rounding. A subclass has a `forward` that gathers these and calls its layer.
"""

import copy
import ctypes
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from octavo._torch.fakes import as_real_as
from octavo._torch.modules import drop_buffers
from octavo._torch.tracing import is_first_in_graph, is_watched, while_tracing
from octavo.ambient import ambient
from octavo.delayed_scaling import memory as scaling
from octavo.delayed_scaling.checkpoint import ROUNDING
from octavo.errors import UnsupportedConfig, UnsupportedShape
from octavo.formats import FLOATS
from octavo.lower import refresh_in_graph, run, run_in_graph, run_into_in_graph
from octavo.quant.qtensor import Parts
from octavo.quant.quantizer import Quantizer
from octavo.quant.state import KEPT
from octavo.recipes import BF16, Recipe
from octavo.recipes import recipe as resolve
from octavo.weights import cache, optimizer_hooks
from octavo.weights.held import HeldWeight, codes_of, hold, is_whole, moved
from octavo.wgrad.mailbox import Computed, Letter, Mailbox, Posted, operands_of
from octavo.wgrad.main_grad import MainGrad, graph_buffers

UNQUANTIZED = BF16()
SEED = "rounding_seed"


def dtype_refusal(dtype: torch.dtype) -> str:
    """Why a weight of this dtype cannot be quantized; empty if it can."""
    return "" if dtype in FLOATS else f"its weight is {dtype}, and float32, bfloat16 or float16 can be quantized"


class Quantized(nn.Module):
    """Settings and state of a recipe, for the weight of a module."""

    LAYER: ClassVar[Any]  # of octavo.layers
    NAME: ClassVar[str]  # its name in a graph's plan
    slots = 1  # amaxes that delayed scaling remembers of each of x, w, dy
    fuse_wgrad_accumulation: bool
    delay_wgrad_compute: bool
    strict: bool

    # -- what a subclass says of its weight ------------------------------------------------------------------------

    def weight_names(self) -> list[str]:
        """Of the parameters that the weight consists of."""
        raise NotImplementedError

    def weight_parts(self) -> list[nn.Parameter]:
        """Those, or what is made in their place at this call."""
        return [getattr(self, name) for name in self.weight_names()]

    def trained_by(self) -> list[nn.Parameter]:
        """The parameters that tell which optimizer trains this layer: its weights, or if none of them is a trained
        parameter, all that it has."""
        own: list[Any] = [self._parameters.get(name) for name in self.weight_names()]
        trained = [weight for weight in own if weight is not None and weight.requires_grad]
        return trained or list(self.parameters())

    def whole_weight(self) -> Tensor:
        """The weight as the layer takes it, without a gradient."""
        raise NotImplementedError

    def set_weights(self, whole: Tensor) -> None:
        """Make parameters of a whole weight, which may be held as codes."""
        raise NotImplementedError

    def describe(self) -> str:
        raise NotImplementedError

    def route(self, left: Quantizer | None, right: Quantizer | None, device: torch.device) -> str:
        """How operands of these quantizers are multiplied there: native, emulated, reference."""
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
        """Settings, and what the recipe needs."""
        optimizer_hooks.listen()
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.strict = strict
        self._path = path  # for messages
        self._warned = False
        self._codes = cache.Codes()
        self._scaling = scaling.Scaling()
        self._mailbox = Mailbox()
        self._recipe: Recipe | None = None
        self._given_recipe = False  # whether `convert` gave the recipe to a layer that had none
        self._follows = False  # whether it ever ran in an ambient recipe
        self._pending: dict[str, Tensor] = {}  # state loaded before there was memory for it
        self._unborn = False  # whether state is on the meta device, and waits for the weight to come from there
        self._seed = _seed_of(self, path)
        self.recipe = recipe  # type: ignore[assignment]

    def _tear_down(self) -> None:
        """The opposite: nothing is left but a plain module's own."""
        self.release_codes()
        self._codes.drop(self)
        self._scaling.drop(self)
        drop_buffers(self, [SEED])
        for name in (
            "fuse_wgrad_accumulation", "delay_wgrad_compute", "strict",
            "_codes", "_scaling", "_mailbox", "_recipe", "_given_recipe", "_follows", "_pending", "_unborn", "_seed",
            "_path", "_warned",
        ):  # fmt: skip
            del self.__dict__[name]

    def lose_recipe(self) -> None:
        """Follow `octavo.autocast` again, without anything that a recipe remembers."""
        self._codes.drop(self)
        self._scaling.drop(self)
        drop_buffers(self, [SEED])
        self._recipe, self._given_recipe = None, False

    @property
    def recipe(self) -> Recipe | None:
        return self._recipe

    @recipe.setter
    def recipe(self, spec: str | Recipe | None) -> None:
        found = None if spec is None else resolve(spec)
        if found is not None and (why := self.refusal(found)):
            raise UnsupportedConfig(f"This layer cannot run in {found}: {why}. octavo.revert(model) starts afresh.")
        if found is not None:
            if not found.stateful:
                self._scaling.drop(self)
            self._prepare(found)
        self._recipe = found

    def refusal(self, recipe: Recipe | None) -> str:
        """Why this layer cannot take over a recipe; empty if it can."""
        weight: Any = self.weight_parts()[0]
        if recipe is not None and isinstance(weight, HeldWeight) and recipe.key != weight.kind.recipe:
            return f"its weight is held as codes of {weight.kind.recipe}"
        if why := dtype_refusal(self.weight_parts()[0].dtype):
            return why
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
            weight = self.weight_parts()[0]
            with as_real_as(weight), torch.inference_mode(False):  # made there, it must still train
                if remembers:
                    self._scaling.install(self, recipe, weight.device, self.slots)
                if draws:
                    seed = torch.tensor([self._seed, 0], device=weight.device)
                    self.register_buffer(SEED, seed, persistent=False)
            self._unborn = any(buffer.is_meta for _, buffer in self._state())
        if self._pending:
            self._pending = self.load_recipe_state(self._pending)

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """(name, buffer) of what recipes remember here."""
        for name in (*scaling.BUFFERS, SEED):
            buffer = self._buffers.get(name)
            if buffer is not None:
                yield name, buffer

    def _settle(self) -> None:
        """Make the state that waited for the weight to come from the meta device."""
        if self._unborn and self._place().type != "meta":
            self._reset_state()

    def _place(self) -> torch.device:
        """The device of the parameters. Does not compute a parametrized weight."""
        found: Tensor | None = next(self.parameters(), None)
        found = next(self.buffers(), None) if found is None else found  # a weight may be a buffer
        return torch.device("cpu") if found is None else found.device

    @while_tracing
    def _settle_now(self) -> bool:
        self._settle()
        return True

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

    # -- the weight's codes ----------------------------------------------------------------------------------------

    def _weight_codes(
        self, recipe: Recipe, own: Sequence[Tensor], first: bool | Tensor | None, grads: str, observe: bool
    ) -> str:
        """How the layer gets the weight: "plain", "codes" (from the cache, filled or refreshed here) or "held"."""
        stored = self._codes
        if type(own[0]) is HeldWeight:
            self._check_held(recipe, own)
            return "held"
        if stored.held:
            cache.refuse_dense(own[0])
        tracing = torch.compiler.is_compiling()
        if "w" in grads and not tracing:
            stored.trained = True
        trusted = again = False
        if first is None:
            first = ambient.first
            if tracing:
                again = first is True and not self._first_in_block()
                first = False if again else first
            elif first is not None or stored.ambient:  # a graph would guard on what is noted
                first, trusted = self._noted(first, grads, observe)
            if first is None or self.made_weights():  # which by hand is refused, and in a whole model is one layer
                return "plain"
        else:
            self._refuse_made("is_first_microbatch")
        quant = recipe.linear()
        if quant.fprop.right is None and quant.dgrad.right is None:
            return "plain"
        column = "x" in grads and quant.dgrad.right is not None
        skip = None
        if isinstance(first, Tensor):  # the device decides: a captured graph refreshes, or does not, as it is told then
            if first.numel() != 1:
                raise UnsupportedShape(f"is_first_microbatch on the device is one element, got {tuple(first.shape)}.")
            skip, first = first.reshape(1) == 0, True
        elif not isinstance(first, bool):
            raise UnsupportedConfig(f"is_first_microbatch is True, False, None or one element, got {first!r}.")
        if tracing:
            if again and column and not self._has_columns():
                return "plain"  # of the buffers, a graph sees those that were there at its first call of the layer
            self._refresh_in_graph(recipe, first, column, observe, skip, "w" in grads)
            return "codes"
        there = stored.recipe == recipe and not stored.is_cold
        if not first and there and not trusted:
            stored.check_fresh(self.weight_parts())
        there = there and (not column or stored.has(self, "column"))
        if first or not there:
            self._refresh(recipe, column=column, observe=observe, skip=skip if there else None)
        return "codes"

    def _noted(self, first: bool | Tensor | None, grads: str, observe: bool) -> tuple[bool | Tensor | None, bool]:
        """The flag of the block, and whether the cache is used as it is. It is noted for a checkpoint, which recomputes
        in backward, in whatever block and thread that runs, and must save what its forward saved: a layer whose last
        training forward was in a block uses the cache there, and fills it again only to observe a weight that its
        forward, without gradients, did not."""
        stored = self._codes
        if torch._C._current_graph_task_id() != -1:
            if not stored.ambient:
                return None, False
            refill = observe and stored.ambient == "unobserved"
            if refill:
                stored.ambient = "observed"
            return refill, stored.on_device
        if first is not None:
            stored.ambient, stored.on_device = "observed" if observe else "unobserved", isinstance(first, Tensor)
        elif grads or self.training:
            stored.ambient = ""
        if first is True:
            if stored.entry is ambient.outer_first and stored.is_fresh(self.weight_parts()):
                return False, True  # the layer was called before in this block
            stored.entry = ambient.outer_first
        return first, False

    @while_tracing
    def _has_columns(self) -> bool:
        return self._codes.has(self, "column")

    @while_tracing
    def _first_in_block(self) -> bool:
        """Whether the graph being traced, in a block that was entered outside of it, meets this layer for the first
        time."""
        return ambient.first is None or is_first_in_graph(self._codes)

    def _check_held(self, recipe: Recipe, own: Sequence[Any]) -> None:
        """Codes serve the recipe that made them, and the layer takes all of them at once."""
        first = own[0].kind
        if first.recipe != recipe.key or first.layer != self.NAME:
            raise UnsupportedConfig(
                f"{self.describe()}: its weight is held as codes of {first.recipe} for a {first.layer} layer, and runs "
                f"in {recipe}. Use that recipe, or octavo.revert(model) first."
            )
        if torch.compiler.is_compiling():
            self._check_own_whole()
        elif not is_whole(own):
            cache.refuse_dense(own[0])

    @while_tracing
    def _check_own_whole(self) -> bool:
        own = self.weight_parts()
        if not is_whole(own):
            cache.refuse_dense(own[0])
        return True

    def _parts(self, kind: str, weight: Tensor) -> tuple[Parts, Parts]:
        """The weight's codes by row and by column, for a call that gets it as `_weight_codes` said."""
        if kind == "held":
            return codes_of(weight, "row"), codes_of(weight, "column")
        return self._codes.parts(self, "row"), self._codes.parts(self, "column")

    def _refresh(self, recipe: Recipe, *, column: bool, observe: bool, skip: Tensor | None = None) -> None:
        cache.refuse_shards(self.weight_parts(), "refresh_weights")
        amaxes, slots = self._weight_scaling(recipe, observe)
        self._codes.fill(self, self.whole_weight(), recipe, column=column, amaxes=amaxes, scaling=slots, skip=skip)

    def _refresh_in_graph(
        self, recipe: Recipe, first: bool, column: bool, observe: bool, skip: Tensor | None, trains: bool
    ) -> None:
        """The same, while a graph is traced: buffers that are missing are made and filled now, once; the graph
        refreshes them where it is told to. Whether a weight has changed is not for a graph to see."""
        self._make_cache(recipe.key, column, observe and not first, trains)
        stored = self._codes.recipe
        if stored is None or stored.key != recipe.key:  # never now; read here, it is a guard of the graph
            raise UnsupportedConfig(f"The weight cache holds codes of {stored}, and {recipe} is in force.")
        if first:
            amaxes, slots = self._weight_scaling(recipe, observe)
            row, columns = self._codes.parts(self, "row"), self._codes.parts(self, "column")
            key = self.NAME + "(recipe=" + recipe.key + ")"
            with torch.no_grad():
                weight = self.whole_weight().detach()
                refresh_in_graph(self.NAME, key, weight, list(row), list(columns), amaxes, slots, skip)

    @while_tracing
    def _make_cache(self, recipe_key: str, column: bool, observe: bool, trains: bool) -> bool:
        """The cache that a graph is about to use."""
        recipe, stored = resolve(recipe_key), self._codes
        stored.trained = stored.trained or trains
        if stored.recipe != recipe or stored.is_cold or (column and not stored.has(self, "column")):
            self._refresh(recipe, column=column, observe=observe)
        return True

    def _weight_scaling(self, recipe: Recipe, observe: bool) -> tuple[list[Tensor], list[Tensor]]:
        """What delayed scaling brings to a weight's cast: amaxes to raise, and w's multipliers."""
        current = self._buffers.get(scaling.NAMES["forward"]["current"])
        slots: Sequence[Tensor] = ()
        if recipe.stateful:
            measured = "w" if "w" in self._scaling.cold else ""
            slots = self._scaling.inputs(self, measured)[1::3]
        return [current] if observe and current is not None else [], list(slots)

    def _observes(self, recipe: Recipe, weight: Tensor) -> str:
        """How a call observes the amaxes of x and w: not at all, in place, or as something that it returns."""
        if not (recipe.stateful and self.training and torch.is_grad_enabled()):
            return ""
        if torch.compiler.is_compiling() or is_watched():
            return "returned"
        self._scaling.watch(weight)
        return "in_place"

    def _measures(self, kind: str, grads: str, codes: bool = False) -> str:
        """Letters of the operands that a call scales by themselves, unless the device knows that a step has seen them:
        of those that no step is known to have seen, the ones it casts. None, as a rule: ask `cold` first."""
        cold = self._scaling.cold
        found = "x" if "x" in cold and not codes else ""
        found += "w" if "w" in cold and kind == "plain" else ""
        found += "d" if "d" in cold and ("x" in grads or "w" in grads) else ""
        if torch.compiler.is_compiling():
            self._measure_now(found)
        else:
            self._scaling.measure(found)
        return found

    @while_tracing
    def _measure_now(self, letters: str) -> bool:
        self._scaling.measure(letters)
        return True

    def _remember(self, amax: Tensor, tracing: bool) -> None:
        """What a call returned."""
        current = self._buffers[scaling.NAMES["forward"]["current"]]
        assert current is not None
        if tracing:
            current.copy_(torch.maximum(current, amax))
        else:
            torch.maximum(current, amax, out=current)

    def made_weights(self) -> list[str]:
        """Names of weights that are no parameters, but made at every call."""
        return [name for name in self.weight_names() if name not in self._parameters]

    def _refuse_made(self, what: str) -> None:
        if why := self.why_made(what):
            raise UnsupportedConfig(f"{self.describe()}: {why}.")

    def why_made(self, what: str) -> str:
        """Why a weight that is no parameter, but made at every call, does not serve; empty if it does."""
        made = self.made_weights()
        if not made:
            return ""
        return (
            f"{what} needs a weight that stays from call to call, and {made[0]} is made anew for each, by a "
            "parametrization. Leave it out, or remove the parametrization"
        )

    # -- the weight's gradient ---------------------------------------------------------------------------------------

    def _gradient_target(self) -> tuple[str, bool]:
        """How dw goes to `main_grad`, "" if it does not, and whether zeros stand for it elsewhere."""
        if not self.fuse_wgrad_accumulation:
            return "", False
        self._refuse_made("fuse_wgrad_accumulation=True")
        own = [weight for weight in self.weight_parts() if weight.requires_grad]
        overwrites = bool(getattr(own[0], "overwrite_main_grad", False))
        for weight in own[1:]:
            if bool(getattr(weight, "overwrite_main_grad", False)) != overwrites:
                raise UnsupportedConfig(
                    "fuse_wgrad_accumulation=True writes the gradients of all groups at once: all of them add or all "
                    "overwrite. Set overwrite_main_grad alike on each weight."
                )
        return "overwrite" if overwrites else "add", any([hasattr(weight, "grad_added_to_main_grad") for weight in own])

    def _puts_off(self, grads: str) -> bool:
        """Whether dw waits for `backward_dw`."""
        if not self.delay_wgrad_compute or "w" not in grads:
            return False
        self._refuse_made("delay_wgrad_compute=True")
        return True

    def backward_dw(self) -> None:
        """Compute the weight gradient of the oldest backward that left it out, and add it to `weight.grad` or to
        `weight.main_grad`. Hooks of the weight fire here, once. If it raises, call it again: nothing was lost, and what
        has arrived does not arrive twice."""
        own = self.weight_parts()
        if not self.delay_wgrad_compute or not any(weight.requires_grad for weight in own):
            return
        cache.refuse_shards(own, "delay_wgrad_compute=True")
        letter = self._mailbox.take()
        if letter is None:
            warnings.warn(
                "backward_dw() has no backward to finish, and does nothing: each call takes one backward that has run "
                "with delay_wgrad_compute=True, oldest first. Call it once for each.",
                stacklevel=2,
            )
            return
        try:
            parts = letter.parts if isinstance(letter, Computed) else self._computed_dw(letter, own)
        except BaseException:
            self._mailbox.put_back(letter)
            raise
        pairs = [(weight, part) for weight, part in zip(own, parts, strict=True) if part is not None]
        before = [(weight.grad, _version(weight.grad)) for weight in own]
        try:
            if pairs:  # accumulates as any backward does, hooks included
                torch.autograd.backward([weight for weight, _ in pairs], [part for _, part in pairs])
        except BaseException:  # a hook's, before this weight's gradient was added or after
            rest = tuple(
                part if weight.grad is grad and _version(grad) == version else None
                for weight, part, (grad, version) in zip(own, parts, before, strict=True)
            )
            if any(part is not None for part in rest):
                self._mailbox.put_back(Computed(rest, letter.captured))
            raise

    def _computed_dw(self, letter: Letter | Posted, own: Sequence[nn.Parameter]) -> Sequence[Tensor | None]:
        """dw for each weight; None where it went to `main_grad`, or is not wanted."""
        config, operands = operands_of(letter, self.LAYER, self.whole_weight())
        with torch.no_grad():
            target = MainGrad(own, config.main_grad) if config.main_grad else None
            dw = self.LAYER.weight_gradient(config, operands, target)
        if dw is None:
            return [None] * len(own)
        parts = [dw] if len(own) == 1 else list(dw.unbind())
        return [part.view(w.shape) if w.requires_grad else None for w, part in zip(own, parts, strict=True)]

    def discard_dw(self, captured: bool = False) -> int:
        """Forget the backwards that still wait for `backward_dw`: those of warm-ups, of which nobody wants gradients.
        What was captured in a CUDA graph stays, unless `captured` says that nobody wants that either. How many."""
        return self._mailbox.discard(captured=captured)

    # -- one call of the layer ---------------------------------------------------------------------------------------

    def _call(
        self, key: str, inputs: Any, *, grads: str, observe: str, main_grad: str, dummy: bool, delay: str,
        as_nodes: bool, more: tuple[Tensor | None, ...] = (), out: Tensor | None = None, shape: tuple[int, ...] = (),
        codes: Parts = (), parts: Sequence[Tensor] = (),
    ) -> Any:  # fmt: skip
        """Outputs, then extras, of the layer: as nodes, or by the eager driver. `more` are buffers that only this layer
        has; y goes to `out`, if there is one, and looks like `shape` in a graph; `codes` are x's as they were given;
        the weight lies in the memory of its `parts`."""
        buffers = (*self._writes(grads, observe, main_grad, delay, as_nodes), *more)
        if as_nodes:
            if out is None:
                made = run_in_graph(self.NAME, key, inputs, buffers)
            else:
                made = run_into_in_graph(self.NAME, key, inputs, buffers, out, shape)
            if delay:
                self._post(key, made, codes)
            return made
        # a weight whose gradient goes elsewhere stays out of the graph: its hooks would see a gradient of None
        elsewhere = delay != "" or (main_grad != "" and not dummy)
        if elsewhere:
            inputs = inputs._replace(weight=inputs.weight.detach())
        if out is not None:
            inputs = inputs._replace(out=out)
        found, config = self.LAYER.Buffers(*buffers), self.LAYER.config(key)
        watched = parts if parts and config.kept_w == "plain" else ()
        return run(
            self.LAYER, config, inputs, found, differentiable=grads != "", anchored=elsewhere, watched=watched,
            owner=self,
        )  # fmt: skip

    def _writes(self, grads: str, observe: str, main_grad: str, delay: str, as_nodes: bool) -> tuple[Any, ...]:
        """What backward writes besides its results: main_grad, dy's amax, the counter of rounding, the mailbox."""
        amax = self._buffers[scaling.NAMES["backward"]["current"]] if observe and grads else None
        seed = self._buffers.get(SEED) if grads else None
        if as_nodes:
            target = tuple(graph_buffers(self.weight_parts())) if main_grad and not delay else ()
            # equal calls would be one node to a compiler, with room for one dy; what torch.empty makes is never merged
            mark = torch.empty(0, device=self.weight_parts()[0].device) if delay else None
            return target, amax, seed, mark
        found = MainGrad(self.weight_parts(), main_grad) if main_grad and not delay else None
        return found, amax, seed, self._mailbox if delay else None

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
    def has_weight_hooks(self) -> bool:
        own: list[Any] = list(self.weight_parts())
        return any(bool(weight._backward_hooks or weight._post_accumulate_grad_hooks) for weight in own)

    @while_tracing
    def _make_state(self, recipe_key: str) -> bool:
        """The buffers of a recipe that the layer meets for the first time in a graph."""
        self._install(resolve(recipe_key))
        return True

    def _post(self, key: str, made: Any, codes: Parts) -> None:
        """Leave what dw needs for `backward_dw`. The mailbox is written without being read: a read is a guard."""
        start, stop = self._post_span(key)
        box = self._mailbox
        box.posted = (Posted(key, tuple(made[start:stop]), codes), box.posted)

    @while_tracing
    def _post_span(self, key: str) -> tuple[int, int]:
        """Where in what a node makes the post is."""
        found: tuple[int, int] = self.LAYER.config(key).deferred_span
        return found

    # -- what a checkpoint keeps besides the weights ----------------------------------------------------------------

    def recipe_state(self) -> dict[str, Tensor]:
        """Copies of the state that recipes made here: delayed scaling's memory, the counter of stochastic rounding."""
        self._settle()
        found: dict[str, Tensor] = {}
        if self._scaling.recipe is not None:
            for side in scaling.SIDES:
                kept = self._scaling.state(self, side).export()
                found |= {f"scaling.{side}.{name}": tensor for name, tensor in kept.items()}
        if SEED in self._buffers:
            found[ROUNDING] = self.get_buffer(SEED).clone()
        return found

    def pending_state(self) -> dict[str, Tensor]:
        """Copies of what was loaded before there was memory for it."""
        return {name: tensor.clone() for name, tensor in self._pending.items()}

    def load_recipe_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take over what there is a place for, and return the rest."""
        self._settle()
        rest = dict(state)
        if self._unborn:
            return rest
        if self._scaling.recipe is not None:
            for side in scaling.SIDES:
                prefix = f"scaling.{side}."
                if all(prefix + name in rest for name in KEPT):
                    self._scaling.state(self, side).restore({name: rest.pop(prefix + name) for name in KEPT})
        if SEED in self._buffers and ROUNDING in rest:
            self.get_buffer(SEED).copy_(rest.pop(ROUNDING))
        if len(rest) < len(state):
            self._scaling.recall(self)
        return rest

    # -- weights held as codes -------------------------------------------------------------------------------------

    def check_holdable(self) -> None:
        """Refuse a weight of which codes cannot take the place."""
        self._refuse_made("A weight held as codes")
        cache.refuse_shards(self.weight_parts(), "A weight held as codes")

    def hold_codes(self) -> None:
        """Keep the weight as codes of this layer's recipe, in both orientations, and let the rest of it go."""
        recipe = self._recipe
        if self._codes.held:
            return
        if recipe is None or recipe.linear().fprop.right is None:
            raise UnsupportedConfig(
                f"A weight is held as the codes its fprop multiplies, and this layer's recipe is {recipe}. "
                "Give it one whose fprop is quantized: octavo.convert(model, recipe), or recipe= of the layer."
            )
        self._codes.drop(self)
        whole = self.whole_weight()
        with as_real_as(whole):
            # scaled by the weight itself, whatever a delayed recipe has seen so far: there is no second chance
            self.set_weights(hold(self.NAME, recipe, whole.detach()))
        self._codes.held = True

    def _take(self, loaded: Sequence[Any], *, assign: bool) -> None:
        """Codes of loaded weights, in place of those that there are; where these are on the meta device and the loaded
        ones are to be assigned, on the device of the latter."""
        own = self.weight_parts()
        with torch.no_grad():
            if assign and own[0].is_meta:
                assert self._recipe is not None
                whole = loaded[0] if len(loaded) == 1 else torch.stack(list(loaded))
                self.set_weights(hold(self.NAME, self._recipe, whole.detach().to(own[0].dtype)))
            else:
                for p, part in zip(own, loaded, strict=True):
                    p.copy_(part)

    def release_codes(self) -> None:
        """Back to a weight, of the values that the codes stand for."""
        if self._codes.held:
            self._codes.held = False
            if all(isinstance(weight, HeldWeight) for weight in self.weight_parts()):
                self.set_weights(self._codes.values(self))

    # -- what nn.Module does to a module ------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> "Quantized":
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        if new._scaling.recipe is not None:
            scaling.listen(new)
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        optimizer_hooks.listen()  # in a process that has made no layer
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._scaling.recipe is not None:
            scaling.listen(self)

    def _reset_seed(self) -> None:
        """After the parameters were drawn anew."""
        if "_seed" in self.__dict__:  # a constructor draws before there is one
            self._seed = _seed_of(self, "")
            if SEED in self._buffers:
                self.get_buffer(SEED).copy_(torch.tensor([self._seed, 0]))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Quantized":
        """Buffers follow the module's device, never its dtype: a scale in half precision is another scale."""
        if not self._codes.held:
            self._codes.drop(self)
        self._scaling.forget_views()
        done: dict[int, Tensor] = {}
        held = {name: moved(p, fn, done) for name, p in self._parameters.items() if isinstance(p, HeldWeight)}
        self._parameters.update(dict.fromkeys(held))  # their turn is over
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        state = {name for name, _ in self._state()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._parameters.update(held)
        for name, before in kept.items():
            after = self._buffers[name]
            if after is None or (before.is_meta and not after.is_meta) or _is_fake(before) != _is_fake(after):
                continue
            # what is remembered stays, also where memory is not to be filled (`to_empty`)
            if after.dtype != before.dtype or name in state:
                self._buffers[name] = before.to(after.device)
        unborn = self._unborn
        self._unborn = any(buffer.is_meta for _, buffer in self._state())
        if (unborn or self._unborn) and self._place().type != "meta":
            self._reset_state()
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """State goes where a loaded weight is: from the meta device, or to another one, if it is assigned."""
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[misc]
        self._settle()
        device = self._place()
        for name, buffer in list(self._state()):
            if not buffer.is_meta and buffer.device != device and device.type != "meta":
                self._scaling.forget_views()
                self._buffers[name] = buffer.to(device)
        if any(prefix + name in state_dict for name in self.weight_names()):
            self._scaling.weights_loaded()

    def _reset_state(self) -> None:
        """State as it was at construction: storage that comes from the meta device holds nothing yet."""
        remembered = self._scaling.recipe
        self._scaling.drop(self)
        self._buffers.pop(SEED, None)
        for recipe in (remembered, self._recipe):
            if recipe is not None:
                self._prepare(recipe)


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


@torch.compiler.disable(reason="octavo: this layer cannot be part of a graph")  # type: ignore[untyped-decorator,no-untyped-call]
def outside(module: Quantized, why: str, *arguments: Any) -> Any:
    """What a graph cannot hold: an error, or eager mode with a word about it."""
    module._refuse(why)
    return module.forward(*arguments)


def _version(grad: Tensor | None) -> int:
    return -1 if grad is None else grad._version


def wanted(x: bool, weights: Sequence[Tensor], bias: Tensor | None, scales: Tensor | None = None) -> str:
    """Which gradients can be asked for; `x` says whether x requires one."""
    if not torch.is_grad_enabled():
        return ""
    return (
        ("x" if x else "")
        + ("w" if any([weight.requires_grad for weight in weights]) else "")
        + ("b" if bias is not None and bias.requires_grad else "")
        + ("s" if scales is not None and scales.requires_grad else "")
    )


def _seed_of(module: Quantized, path: str) -> int:
    """The seed of stochastic rounding, from where torch's generator stands after the parameters were drawn and from the
    layer's place. It draws nothing, so that parameters and dropout come out as they would without it."""
    generator = torch.get_rng_state()
    state = zlib.crc32(ctypes.string_at(generator.data_ptr(), generator.nbytes))  # real, also among fake tensors
    shape = f"{module.out_features}x{module.in_features}"
    return state << 30 | zlib.crc32(f"{path} {shape}".encode()) >> 2
