"""`octavo.debug`: changes single tensors and GEMMs of a model's layers, for the calls in a block."""

import itertools
import os
import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any, Self

from torch import nn

from octavo._torch.modules import uncompiled
from octavo.errors import UnsupportedConfig
from octavo.inspection.changed_gemms import TABLES, Table
from octavo.inspection.changes import Change, changes_of
from octavo.inspection.steps import count_steps
from octavo.model.layer_lookup import alive, check_model, layers
from octavo.ops.linear import Linear
from octavo.ops.operation import CHANGED
from octavo.ops.quantized import Quantized
from octavo.runtime.call import Stage

_NUMBERS = itertools.count()


class Changed(Quantized):
    """A Linear whose GEMMs a block changes. `changed_class` puts it in front of the layer's own class."""

    changes_table = ""  # its number in TABLES

    def why_not_fusible(self, x: Any) -> str:
        return CHANGED if self.changes_table in TABLES else super().why_not_fusible(x)

    def _call_lookup(self, needs_dx: bool, extra_inputs: tuple[Any, ...]) -> None:
        """Keep the call out of the call cache, which does not know of changes."""

    def _run_node(self, stage: Stage, x: Any, as_nodes: bool, shape: tuple[int, ...] | None = None) -> Any:
        if self.changes_table in TABLES and stage.name == self.NAME:
            key = "changed-linear(call=" + stage.key + ",table='" + self.changes_table + "')"
            stage = stage._replace(name="changed-linear", key=key, settings=None)
        return super()._run_node(stage, x, as_nodes, shape)


@cache
def changed_class(kind: Any) -> Any:
    """Return the class of a layer in a block; it has the name of the layer's own."""
    return type(kind.__name__, (Changed, kind), {"__module__": Changed.__module__, "_changed_class": kind})


class Debugging:
    """The block of `octavo.debug`.

    Args:
        model: the model whose layers are changed.
        changes: the changes.

    Attributes:
        layers: the layers that have a change, by path.

    Example:
        >>> from octavo.inspection.changes import HighPrecision
        >>> model = nn.Sequential(octavo.Linear(64, 32, recipe="mxfp8"))
        >>> with octavo.debug(model, HighPrecision("fprop")) as debugging:
        ...     y = model(torch.ones(2, 64))
        >>> debugging.layers
        ('0',)
    """

    def __init__(self, model: nn.Module, changes: tuple[Change, ...]) -> None:
        self._model, self._changes = weakref.ref(model), changes
        self._given: nn.Module | None = model  # until the block is entered
        self._step = 0
        self._tables: dict[str, Linear] = {}
        self._hook: Any = None
        self.layers: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        model = alive(self._model, "debug")
        found = [(path, layer, [c for c in self._changes if c.takes(path)]) for path, layer in layers(model)]
        self._check(found)
        self._step, self._given = 0, None
        changed = [(path, layer, own) for path, layer, own in found if own and isinstance(layer, Linear)]
        for path, layer, own in changed:
            number = str(next(_NUMBERS))
            TABLES[number] = Table(path, own, self)
            kind: Any = type(layer)
            layer.__dict__["changes_table"] = number
            layer.__class__ = changed_class(kind)
            self._tables[number] = layer
        self.layers = tuple([path for path, _, _ in changed])
        self._hook = count_steps(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()
        for number, layer in self._tables.items():
            del TABLES[number]
            layer.__dict__.pop("changes_table", None)
            kind = vars(type(layer)).get("_changed_class")
            if kind is not None:
                layer.__class__ = kind
        self._tables = {}

    def next_step(self) -> None:
        """Count a step. A step of an optimizer with parameters of the model calls it; call it yourself where there is
        none.

        Example:
            >>> from octavo.inspection.changes import HighPrecision
            >>> layer = octavo.Linear(64, 32, recipe="mxfp8")
            >>> x = torch.randn(2, 64)
            >>> with octavo.debug(layer, HighPrecision("fprop", steps=(1, 2))) as debugging:
            ...     first = layer(x)
            ...     debugging.next_step()
            ...     second = layer(x)
            >>> torch.equal(first, layer(x)), torch.equal(second, layer(x))
            (True, False)
        """
        self._step += 1

    def _check(self, found: list[tuple[str, Quantized, list[Change]]]) -> None:
        """Raise for a change that no layer can have."""
        for change in self._changes:
            named = [(path, layer) for path, layer, changes in found if change in changes]
            if not any([isinstance(layer, Linear) for _, layer in named]):
                others = f" {named[0][0]} is a {named[0][1].TITLE}, whose groups run in one call." if named else ""
                names = ", ".join([path for path, layer, _ in found if isinstance(layer, Linear)][:5]) or "none"
                raise UnsupportedConfig(
                    f"{change} names no octavo.Linear of this model.{others} Its Linears begin with: {names}."
                )
        for path, layer, own in found:
            if not own or not isinstance(layer, Linear):
                continue
            why = (
                "is in a block of octavo.debug already. Pass all changes to one block"
                if isinstance(layer, Changed)
                else "defers its weight gradient (delay_wgrad_compute=True). Turn that off for the block"
                if layer.delay_wgrad_compute
                else "is split over ranks, which share scales. Debug the model on one rank"
                if layer._split_over_ranks() is not None
                else ""
            )
            if why:
                raise UnsupportedConfig(f"octavo.debug cannot change {path or 'this layer'}: it {why}.")


def debug(model: nn.Module, changes: Change | Iterable[Change] | str | os.PathLike[str]) -> Debugging:
    """Change single tensors and GEMMs of `octavo.Linear` layers, for the calls in a block: to find the one that a
    training in few bits loses its accuracy by.

    A change concerns one GEMM alone: another x for fprop changes y, and neither dx nor dw. GEMMs without a change have
    the bits that they have outside. In the block the changed layers run by themselves, unfused, and take longer.
    Compiled functions are compiled once more in it; which steps a change is for is asked at run time. Outside of a
    block nothing is left: no layer looks whether it is debugged.

    Args:
        model: the model. The block changes the classes of its layers, and restores them. It keeps no reference to it.
        changes: `HighPrecision`, `Quantize` and `Call` of `octavo.inspection.changes`, one or several; or the path of a
            TOML, YAML or JSON file with them, a list under the key `changes`.

    Returns:
        The block, for `with`.

    Raises:
        UnsupportedConfig: the changes are none, or the file cannot be read. On entry: a change names no Linear of the
            model, or a layer that defers its weight gradient or is split over ranks.
        UnknownSetting: a change in the file has an unknown key.

    Example:
        >>> from octavo.inspection.changes import Call, HighPrecision, Quantize
        >>> model = nn.Sequential(octavo.Linear(64, 64, recipe="nvfp4"), octavo.Linear(64, 8, recipe="nvfp4"))
        >>> changes = [
        ...     HighPrecision("wgrad", layers="0", steps=(0, 100)),
        ...     Quantize("fprop", tensor="x", quantizer="mx"),
        ...     Call("dgrad", tensor="dy", function=lambda dy, place: dy.clamp(-1, 1), layers="1"),
        ... ]
        >>> with octavo.debug(model, changes):
        ...     model(torch.randn(16, 64)).sum().backward()
    """
    model = uncompiled(model)
    check_model(model, "debug", error=UnsupportedConfig)
    return Debugging(model, changes_of(changes))
