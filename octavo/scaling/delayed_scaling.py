"""A module's delayed-scaling memory: two `DelayedState`s in its hidden buffers, and a watch over
whether they are stepped.

forward     slots x and w        observed in forward
backward    slot dy              observed in backward, in a buffer that forward never writes

Until a step has seen an operand, calls measure it (`cold_start="current"`). The device knows which operands were seen,
and then uses the slot's inverse scale, even in a call that was told to measure. `uncalibrated`, the host's copy of that
knowledge, is updated after a step, and allows calls that do not measure: fused ones. An operand of several experts was
seen once that of one of them was, and the others take the smallest inverse scale of those that were
(`octavo.scaling.delayed_state.lend`).

A layer's `scaling` is a flat tuple: the inverse scales of x, w and dy; where one of the three is measured, also how
many amaxes each of them has seen. One operand's part is its inverse scale, and if it is measured also its count."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from octavo._torch.autograd import preserve_version_counter
from octavo._torch.dispatcher import dispatch_depth
from octavo._torch.fakes import FakeTensor
from octavo._torch.tracing import while_tracing
from octavo.errors import UnsupportedConfig, warn_caller
from octavo.quant.qtensor import Parts
from octavo.quant.quantizer import CastArgs, QuantizerPair
from octavo.quant.tensorwise import Tensorwise
from octavo.recipes import Delayed, Recipe
from octavo.scaling.delayed_state import KEPT, DelayedState, calibrated_inverse_scale, lend

DIRECTIONS = ("forward", "backward")
BUFFER_NAMES = {
    direction: {field.name: f"scaling_{direction}_{field.name}" for field in fields(DelayedState)}
    for direction in DIRECTIONS
}
FORWARD, BACKWARD = (BUFFER_NAMES[direction] for direction in DIRECTIONS)
BUFFERS = tuple(name for names in BUFFER_NAMES.values() for name in names.values())
X, W, DY = range(3)  # places in `scaling`
OPERANDS = {"forward": 2, "backward": 1}  # whose slots are in a direction's buffers, one operand after the other
PATIENCE = 1024  # training forwards without a step before a warning
CLOSURES = 32  # changes of a weight that a step of an attached optimizer may make: LBFGS calls the model up to 25 times
LOOKS = 8  # the host asks the device what it has seen after each of this many steps,
LATER = 64  # and then once in this many
Measure = Callable[[Tensorwise, Tensor], Tensor]  # a tensor's amax by a quantizer, unless the flag is set

_LISTENERS: "weakref.WeakSet[Any]" = weakref.WeakSet()  # modules whose memory must be stepped
ATTACHMENTS: "weakref.WeakSet[Any]" = weakref.WeakSet()  # of `octavo.attach`: each steps the modules in its `layers`


def listen(module: nn.Module) -> None:
    """Count the steps of any optimizer that has this module's parameters."""
    _hear_optimizers()
    _LISTENERS.add(module)


@cache
def _hear_optimizers() -> None:
    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        moved = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        updated = []
        for module in list(_LISTENERS):
            parameters = (
                [p for p in module._trained_by() if id(p) in moved] if module._scaling.recipe is not None else []
            )
            if parameters:
                module._scaling.updated(sum([p._version for p in parameters]))
                updated.append(module._scaling)
        late = [scaling for scaling in updated if scaling.is_late()]
        for scaling in late:  # once a model, not once a layer
            scaling.said = True
        if late:
            say_late()

    register_optimizer_step_post_hook(after)


class OperandMask(NamedTuple):
    """Some of the operands."""

    x: bool = False
    w: bool = False
    dy: bool = False


NO_OPERANDS = OperandMask()


class RunningAmaxes(NamedTuple):
    """Tensors that the casts of x and w raise to their amaxes; None where amaxes are not observed."""

    x: Tensor | None = None
    w: Tensor | None = None


def raise_amax(running: Tensor, amax: Tensor) -> None:
    """Raise a running amax to an amax."""
    with preserve_version_counter(running):
        torch.maximum(running, amax, out=running)


def part_of(place: int, is_measured: bool) -> slice:
    """Return the slice of `scaling` that is an operand's part."""
    return slice(place, None, 3) if is_measured else slice(place, place + 1)


def cast_args(
    recipe: Recipe,
    pair: QuantizerPair,
    part: Sequence[Tensor],
    measure: Measure,
    running_amax: Tensor | None,
    seed: Tensor | None = None,
) -> CastArgs:
    """Return the arguments of a cast by a pair of quantizers. A measured operand of which no part has seen an amax is
    scaled by its own. If scaling is not delayed: the seed, for stochastic rounding."""
    if not part:
        return CastArgs(seed=seed)
    if len(part) == 1:
        return CastArgs(inverse_scale=part[0], running_amax=running_amax)
    spec = pair[0] or pair[1]
    assert isinstance(spec, Tensorwise) and isinstance(recipe, Delayed)
    is_calibrated = part[1] > 0
    if is_calibrated.numel() > 1:  # experts that have seen an amax lend their inverse scales to those that have not
        is_calibrated = is_calibrated.any().expand(is_calibrated.shape)
    inverse_scale = calibrated_inverse_scale(part[0], is_calibrated, measure(spec, is_calibrated), spec, recipe.margin)
    return CastArgs(inverse_scale=inverse_scale, running_amax=running_amax)


class _Views(NamedTuple):
    """Views of two buffers: making them takes longer than launching a kernel."""

    scale: Tensor
    amax: Tensor
    addresses: tuple[int, int]
    scales: Parts  # x's part and w's
    amaxes: Parts


def _halves(buffer: Tensor) -> Parts:
    """Return x's part and w's of a buffer."""
    return buffer.view(2, buffer.shape[0] // 2).unbind()


class DelayedScaling:
    """Track the recipe that a module's memory follows, and what happened since the memory was last stepped. Holds no
    tensor of its own."""

    _last_views: _Views | None = None  # of the buffers, at the last call; a class attribute for layers from older files

    def __init__(self) -> None:
        self.recipe: Delayed | None = None
        self.slots = 1  # of each operand, in a row, that lend inverse scales to each other
        self.uncalibrated = NO_OPERANDS  # those that no step is known to have seen
        self._asked = NO_OPERANDS  # those of them that calls measured
        self._steps = 0  # octavo.steps since _asked last grew
        self._forwards = 0
        self._version: int | None = None  # of the weight, when it was last seen
        self._updates = 0  # of the weight since the last step
        self._counted: int | None = None  # the version of the weights that the last of them made
        self.said = False  # whether it has warned that a step is overdue
        self.origin = ""  # of the memory: loaded "state", its "own" steps, or "weights" that were loaded alone
        self.all_reduced_number = 0  # of amaxes that all ranks were found to have, at the model's first layer

    def __getstate__(self) -> dict[str, Any]:
        # a copy has weights of other versions, and forwards and updates of its own to come
        return {**self.__dict__, "_last_views": None, "_version": None, "_counted": None, "_forwards": 0, "_updates": 0,
                "all_reduced_number": 0}  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name in ("uncalibrated", "_asked"):
            if isinstance(state.get(name), str):  # a file of a layer from before has letters in place of a mask
                state = {**state, name: OperandMask(*[letter in state[name] for letter in "xwd"])}
        self.__dict__.update(state)

    def unsupported_reason(self, recipe: Recipe) -> str:
        """Return the reason why this memory cannot follow a recipe; empty if it can."""
        if self.recipe is None or self.recipe == recipe:
            return ""
        return f"it remembers amaxes for {self.recipe}, and one window cannot follow {recipe} too"

    def install(self, module: Any, recipe: Recipe, device: torch.device, slots: int) -> None:
        """Make the buffers, once, with `slots` slots for each of x, w and dy."""
        if self.recipe == recipe:
            return
        if why := self.unsupported_reason(recipe):
            raise UnsupportedConfig(
                f"This layer cannot run in {recipe}: {why}. Give each delayed recipe a layer of its own, or "
                "octavo.revert(model) and convert again."
            )
        assert isinstance(recipe, Delayed)
        quant = recipe.gemms()
        first, second = quant.fprop.left, quant.dgrad.left
        assert first is not None and second is not None
        formats = {"forward": (first.fmt, first.fmt) * slots, "backward": (second.fmt,) * slots}
        with torch.inference_mode(False):  # made at a first forward there, it must still serve training
            for direction in DIRECTIONS:
                state = DelayedState.create(formats[direction], recipe.history, device)
                for field, tensor in state.tensors().items():
                    module._hidden.put(BUFFER_NAMES[direction][field], tensor)
        self.recipe = recipe
        measures = recipe.cold_start == "current"
        self.uncalibrated, self.slots = (_cast(recipe), slots) if measures else (NO_OPERANDS, 1)
        listen(module)

    def forget_views(self) -> None:
        self._last_views = None

    def drop(self, module: Any) -> None:
        _LISTENERS.discard(module)
        self.forget_views()
        module._hidden.drop(BUFFERS)
        self.recipe = None
        self.uncalibrated = self._asked = NO_OPERANDS
        self.origin = ""
        self._forwards = self._updates = 0

    def state(self, module: Any, direction: str) -> DelayedState:
        buffers = module._hidden._buffers
        return DelayedState(**{field: buffers[name] for field, name in BUFFER_NAMES[direction].items()})

    def of_call(self, module: Any, measures: bool = False, observe: bool = False) -> tuple[Parts, Parts]:
        """Return the inverse scales of x, w, dy, and if one is measured how many amaxes each has seen; then, if they
        are observed, the running amaxes of x and w. All are views of the buffers."""
        buffers = module._hidden._buffers
        scale, amax = buffers[FORWARD["inverse_scale"]], buffers[FORWARD["running_amax"]]
        views = None if torch.compiler.is_compiling() else self._last_views
        # a buffer may be replaced, and its memory too (`buffer.data = ...`, as FSDP moves it)
        if (
            views is None or views.scale is not scale or views.amax is not amax or type(scale) is FakeTensor
            or views.addresses != (scale.data_ptr(), amax.data_ptr())
        ):  # fmt: skip
            views = self._make_views(scale, amax)
        scales: Parts = (*views.scales, buffers[BACKWARD["inverse_scale"]])
        if measures:
            scales = (*scales, *_halves(buffers[FORWARD["head"]]), buffers[BACKWARD["head"]])
        return scales, views.amaxes if observe else ()

    def _make_views(self, scale: Tensor, amax: Tensor) -> "_Views":
        if torch.compiler.is_compiling() or type(scale) is FakeTensor or dispatch_depth():
            return _Views(scale, amax, (0, 0), _halves(scale), _halves(amax))  # a mode may make views without data
        self._last_views = _Views(scale, amax, (scale.data_ptr(), amax.data_ptr()), _halves(scale), _halves(amax))
        return self._last_views

    # -- one call of the layer -----------------------------------------------------------------------------------------

    def measures(self, casts_x: bool, casts_w: bool, casts_dy: bool) -> OperandMask:
        """Return which operands a call measures: those in `uncalibrated` that it casts. It scales them by their own
        amax, unless the device knows that a step has seen them. Usually there are none: ask `uncalibrated` first."""
        x, w, dy = self.uncalibrated
        measured = OperandMask(casts_x and x, casts_w and w, casts_dy and dy)
        self._note_measured(*measured)
        return measured

    def of_weight(self, layer: Any, recipe: Recipe, observe: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Return delayed scaling's arguments of a weight's cast: amaxes to raise, and w's inverse scales."""
        running = layer._hidden._buffers.get(BUFFER_NAMES["forward"]["running_amax"])
        scaling = self.of_call(layer, self.uncalibrated.w)[0][1::3] if recipe.stateful else ()
        return [running] if observe and running is not None else [], list(scaling)

    # -- a checkpoint --------------------------------------------------------------------------------------------------

    def export(self, layer: nn.Module) -> dict[str, Tensor]:
        """Return copies of the memory, by the names that a checkpoint has for them. Lent inverse scales stay out of it:
        `restore` lends them again."""
        found: dict[str, Tensor] = {}
        for direction in DIRECTIONS if self.recipe is not None else ():
            kept = self.state(layer, direction).export()
            if self.slots > 1:
                kept["encode"] = torch.where(kept["head"] > 0, kept["encode"], 1.0)
            found |= {f"scaling.{direction}.{name}": tensor for name, tensor in kept.items()}
        return found

    def restore(self, layer: nn.Module, state: dict[str, Tensor]) -> None:
        """Restore the entries of `state` that this memory has a place for, and remove them there."""
        if self.recipe is None:
            return
        for direction in DIRECTIONS:
            prefix = f"scaling.{direction}."
            if all(prefix + name in state for name in KEPT):
                memory = self.state(layer, direction)
                memory.restore({name: state.pop(prefix + name) for name in KEPT})
                if self.slots > 1:
                    lend([memory], self.slots)

    # -- whether it is stepped -----------------------------------------------------------------------------------------

    def watch(self, module: nn.Module, weight: Tensor) -> None:
        """Count a training forward, and warn once if `octavo.step` is never called: inverse scales that stay at 1 are
        silently wrong. An attached optimizer will call it, unless something else changes the weights."""
        self._forwards += 1
        version = None if weight.is_inference() else weight._version
        if version != self._version:
            self._updates += self._version is not None
            self._version = version
        if self.is_late():
            attached = any(module in attachment.layers for attachment in list(ATTACHMENTS))
            if not attached or self._updates >= CLOSURES:
                for other in list(_LISTENERS):  # once for all that are late now, or at their next forward
                    scaling, own = other._scaling, other._parameters.get(other._names_of_weights()[0])
                    now = None if own is None or own.is_inference() else own._version
                    moved = scaling._version is not None and now != scaling._version
                    is_late = scaling._updates + moved >= 2 or scaling._forwards + 1 >= PATIENCE
                    scaling.said = scaling.said or is_late
                self.said = True
                say_late()
        if self.origin == "weights":
            self.say_unrestored()

    def updated(self, version: int) -> None:
        """Count an update that an optimizer reports: a graph counts nothing. Two reports with one version of the
        weights are one update: an optimizer that wraps another reports what the inner one has reported."""
        self._updates += version != self._counted
        self._counted = version
        self._version = None
        if self.origin == "weights":
            self.say_unrestored()

    def is_late(self) -> bool:
        """Return whether a step is overdue, and no warning was given yet."""
        return not self.said and (self._updates >= 2 or self._forwards >= PATIENCE)

    def stepped(self) -> None:
        """Note that the memory was stepped. It reads nothing: a graph may call this, and would guard on a read."""
        self._forwards = self._updates = 0
        self.origin = "own"

    def weights_loaded(self) -> None:
        """Note that weights were loaded from a checkpoint, which is no update; its other state may be loaded later."""
        self._forwards = self._updates = 0
        self._version = None
        if not self.origin:
            self.origin = "weights"

    def say_unrestored(self) -> None:
        """Warn, once a model, that training goes on with weights alone."""
        for module in list(_LISTENERS):
            if module._scaling.origin == "weights":
                module._scaling.origin = "own"
        self.origin = "own"
        warn_caller(
            "fp8-delayed: weights were loaded and no scaling state, so the scales are measured anew. To resume a run "
            "exactly, save octavo.state_dict(model) with the weights, and call octavo.load_state_dict(model, state) "
            "before training."
        )

    # -- what no step has seen yet -------------------------------------------------------------------------------------

    @while_tracing
    def _note_measured(self, *operands: bool) -> bool:
        """Note that calls measure these operands, of x, w and dy. Steps ask the device whether it has seen them, anew
        if one is new."""
        asked = OperandMask(*[new or old for new, old in zip(operands, self._asked, strict=True)])
        if asked != self._asked:
            self._asked, self._steps = asked, 0
        return True

    def looks(self) -> bool:
        """Return whether to ask the device after this step. A layer may measure what never comes (a gradient of an
        output that is not used), and the host waits for each answer."""
        if not any(self.uncalibrated):
            return False
        self._steps += 1
        return self._steps <= LOOKS or self._steps % LATER == 0

    def learn(self, calibrated: Sequence[bool]) -> None:
        """Take operands that the device has calibrated, of x, w and dy, out of those that it has not."""
        left = [old and not known for old, known in zip(self.uncalibrated, calibrated, strict=True)]
        self.uncalibrated = OperandMask(*left)

    def recall(self, module: nn.Module) -> None:
        """Ask the device which operands it has seen, after buffers were loaded."""
        self.origin = "state"
        if self.recipe is not None and self.recipe.cold_start != "one":
            self.uncalibrated, self._asked = _cast(self.recipe), NO_OPERANDS
            look([module])


def say_late() -> None:
    warn_caller(
        "fp8-delayed: octavo.step(model) was not called, and parameters were updated or a thousand forwards have run, "
        "so the scales are out of date. Call it once after every optimizer.step(), or call "
        "octavo.attach(model, optimizer) once, with the optimizer that updates them."
    )


def _cast(recipe: Delayed) -> OperandMask:
    """Return the operands that a recipe casts."""
    quant = recipe.linear()
    pairs = (
        (quant.fprop.left, quant.wgrad.right),
        (quant.fprop.right, quant.dgrad.right),
        (quant.dgrad.left, quant.wgrad.left),
    )
    return OperandMask(*[pair != (None, None) for pair in pairs])


def look(modules: Sequence[Any]) -> None:
    """Ask the device, once for all modules on it, which operands have been seen by now, any slot of them."""
    by_device: dict[torch.device, list[tuple[Any, Tensor]]] = {}
    for module in modules:
        heads = [
            module._scaling.state(module, direction).head.view(OPERANDS[direction], -1) for direction in DIRECTIONS
        ]
        if not heads[0].is_meta and not isinstance(heads[0], FakeTensor):
            by_device.setdefault(heads[0].device, []).append((module, torch.cat([(head > 0).any(1) for head in heads])))
    for asked in by_device.values():
        answers = torch.stack([calibrated for _, calibrated in asked]).tolist()
        for (module, _), calibrated in zip(asked, answers, strict=True):
            module._scaling.learn(calibrated)
