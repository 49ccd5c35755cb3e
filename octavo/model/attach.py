"""`octavo.attach`: end a training step of a model, and refresh its weight caches, whenever its optimizer steps.

It puts a hook on the torch optimizer whose `step()` runs hooks: the one that the caller passes, or the one inside that
wrapper. Several optimizers of one model can be attached: each steps the layers whose weights it holds.
"""

import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from octavo._torch.cuda import is_capturing
from octavo._torch.modules import runs_hooks
from octavo.communication.groups import Group, name_of
from octavo.errors import UnsupportedConfig, UnsupportedDtype
from octavo.model.layer_lookup import check_model, layers
from octavo.model.refresh import refresh_layers
from octavo.model.step import step_layers
from octavo.model.step_warnings import warn_of_step, warn_of_uncalled
from octavo.ops.quantized import Quantized
from octavo.scaling.delayed_scaling import ATTACHMENTS
from octavo.weights import optimizer_hooks

_BY_HAND = "call octavo.step(model) and octavo.refresh_weights(model) after each of its steps"


class OptimizerWrapper(Protocol):
    """An object around a torch optimizer, such as accelerate's and Lightning's."""

    @property
    def optimizer(self) -> Any:
        """The optimizer inside."""


class Attachment:
    """The handle that `octavo.attach` returns. As a context manager it calls `remove()` at the end of its block.

    Args:
        model: the model.
        optimizer: the torch optimizer that got the hook.
        group: the ranks that agree on amaxes.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, group: Group) -> None:
        self.model = model
        self.group = None if group is None else name_of(group)
        self.optimizer = weakref.ref(optimizer)  # weak: its hook keeps this object alive
        self.layers = weakref.WeakSet(layer for _, layer in layers(model))  # as of the last step
        self._first = True  # whether no step was made
        self._handle = optimizer.register_step_post_hook(self._after_step)
        ATTACHMENTS.add(self)

    def remove(self) -> None:
        """Remove the hook from the optimizer. A second call does nothing."""
        self._handle.remove()
        ATTACHMENTS.discard(self)

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()

    def _steps(self, optimizer: Optimizer, layer: nn.Module) -> bool:
        """Return whether this is an attachment of that optimizer to a model with that layer."""
        return self.optimizer() is optimizer and any(layer is own for _, own in layers(self.model))

    def _after_step(self, stepped: Optimizer, *_: Any) -> None:
        optimizer_hooks.finish(stepped)  # so that codes made below have the weights' final versions
        ours = list(layers(self.model))
        self.layers = weakref.WeakSet(layer for _, layer in ours)
        index = _index.now()
        claims = [_claims(layer, index) for _, layer in ours]
        served = [
            (path, layer) for (path, layer), claim in zip(ours, claims, strict=True) if not claim or self in claim
        ]
        if self._first and not is_capturing() and not torch.compiler.is_compiling():
            self._first = False
            warn_of_uncalled(served)  # before a policy gives a layer another recipe, and with it a new state
        step_layers([layer for _, layer in served], self.group)
        warn_of_step(self.model, served, self.group)
        refresh_layers([layer for _, layer in served])
        for (_path, layer), claim in zip(ours, claims, strict=True):
            if not claim:  # an unattached optimizer may write its weight without raising torch's version counter
                layer._codes.end_step(layer)


class _Index:
    """Attachments by the ids of the parameters that their optimizers hold. It keeps no attachment, and so no model,
    alive."""

    def __init__(self) -> None:
        self.known: list[weakref.ref[Attachment]] = []
        self.parameter_ids: list[set[int]] = []  # by each of these
        self.by_parameter: dict[int, list[weakref.ref[Attachment]]] = {}

    def now(self) -> dict[int, list["weakref.ref[Attachment]"]]:
        """Return the index, rebuilt if attachments or the parameters of their optimizers have changed."""
        pairs = [(one, optimizer) for one in list(ATTACHMENTS) if (optimizer := one.optimizer()) is not None]
        known = [weakref.ref(one) for one, _ in pairs]  # a reference to one that is gone equals no other
        held = [parameter_ids(optimizer) for _, optimizer in pairs]
        if known != self.known or held != self.parameter_ids:
            self.known, self.parameter_ids, self.by_parameter = known, held, {}
            for one, parameters in zip(known, held, strict=True):
                for parameter in parameters:
                    self.by_parameter.setdefault(parameter, []).append(one)
        return self.by_parameter


_index = _Index()


def _claims(layer: Quantized, index: dict[int, list["weakref.ref[Attachment]"]]) -> list[Attachment]:
    """Return the attachments to models with this layer whose optimizers train the layer."""
    known = [one for p in layer._trained_by() for one in index.get(id(p), ())]
    return [one for ref in known if (one := ref()) is not None and layer in one.layers]


def attach(model: nn.Module, optimizer: Optimizer | OptimizerWrapper, group: Group = None) -> Attachment:
    """Call `octavo.step(model, group)` and `octavo.refresh_weights(model)` after every step of an optimizer.

    The recipe fp8-delayed and weight caches need these calls; other recipes run without. Attach each optimizer of a
    model with several: each serves the layers whose weights it holds, and a layer whose weights no attached optimizer
    holds is served by all of them.

    Args:
        model: a module with Octavo layers.
        optimizer: a torch optimizer of the model's own parameters, or a wrapper that has one at `.optimizer`. Build it
            after whatever replaces parameters (`fully_shard`, `quantize_weights`).
        group: the ranks that agree on the amaxes of fp8-delayed, as in `octavo.step`.

    Returns:
        A handle. Its `remove()` ends the attachment; a `with` block around it does the same at its end.

    Raises:
        UnsupportedDtype: `model` is no module, or `optimizer` is no optimizer whose `step()` runs hooks.
        UnsupportedConfig: the model has no Octavo layer, the optimizer holds none of its parameters, or the two are
            attached already.

    Example:
        >>> model = nn.Sequential(nn.Linear(16, 16))
        >>> report = octavo.convert(model, "fp8-delayed")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> attachment = octavo.attach(model, optimizer)
        >>> model(torch.ones(4, 16)).sum().backward()
        >>> optimizer.step()  # ends the step of fp8-delayed, too
        >>> attachment.remove()
    """
    check_model(model, "attach", optimizer)
    ours = [layer for _, layer in layers(model)]
    if not ours:
        raise UnsupportedConfig(
            f"attach found no layer of Octavo's in this {type(model).__name__}. Call octavo.convert(model, recipe) "
            "first, or leave attach out."
        )
    hooked = _hooked(optimizer)
    parameters = list(model.parameters())
    if parameter_ids(hooked).isdisjoint(map(id, parameters)):
        raise UnsupportedConfig(
            f"attach takes an optimizer of the model, and this {type(hooked).__name__} holds none of the model's "
            f"{len(parameters)} parameters. Build it from model.parameters(), after whatever replaces them "
            "(fully_shard, quantize_weights, load_state_dict with assign=True). If it updates copies or flattened "
            f"shards, which are written to the weights after its step, {_BY_HAND}."
        )
    if any(one._steps(hooked, layer) for one in list(ATTACHMENTS) for layer in ours):
        raise UnsupportedConfig(
            f"This {type(hooked).__name__} and layers of this {type(model).__name__} are attached already, and each "
            "optimizer step would count the amaxes of cached weights twice. Keep the first attachment, or call "
            ".remove() on what attach returned."
        )
    return Attachment(model, hooked, group)


def parameter_ids(optimizer: Optimizer) -> set[int]:
    """Return the ids of an optimizer's parameters."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _hooked(optimizer: Any) -> Optimizer:
    """Return the torch optimizer that runs hooks when this one steps: itself, or the first wrapped one that does."""
    for found in nested(optimizer):
        if isinstance(found, LRScheduler):  # has .optimizer, and does not step it
            break
        if runs_hooks(found):
            return found
    what = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
    raise UnsupportedDtype(
        "attach takes a torch.optim.Optimizer whose step() runs hooks, or a wrapper with one at .optimizer, got "
        f"{what}. Pass the torch optimizer itself, or {_BY_HAND}."
    )


def nested(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer, and the optimizers inside of it, from the outermost on: wrappers have one at `.optimizer`."""
    seen: list[Any] = []
    while optimizer is not None and all(optimizer is not one for one in seen):
        seen.append(optimizer)
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)
