"""What `octavo.debug` changes: values that name layers, one GEMM, one tensor, and when."""

import importlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor

from octavo import values
from octavo.errors import UnknownSetting, UnsupportedConfig, check_choice, is_whole, nearest
from octavo.model.config_file import read_file
from octavo.quant.quantizer import Quantizer
from octavo.recipes.recipe import GEMMS, OPERANDS

RESULTS = {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}
SECTION = "changes"  # the key of the list in a file


class Place(NamedTuple):
    """Where a function is called.

    Args:
        layer: the layer's path in the model.
        gemm: "fprop", "dgrad" or "wgrad".
        tensor: "x", "w" or "dy", an operand of the GEMM; or "y", "dx" or "dw", its result.
        step: the number of steps before, as optimizers count them.
    """

    layer: str
    gemm: str
    tensor: str
    step: int


@dataclass(frozen=True)
class Change:
    """Base class of changes.

    Args:
        gemm: "fprop", "dgrad" or "wgrad".
        layers: the layers, as paths in the model with `*` for any characters: "blocks.*.fc1". A tuple names several.
        steps: the first step with the change and the first without it. None, the default, is every step.
        every: of those, one in this many.
    """

    gemm: str
    layers: str | tuple[str, ...] = "*"
    steps: tuple[int, int] | None = None
    every: int = 1

    def __post_init__(self) -> None:
        kind = type(self).__name__
        check_choice(self.gemm, GEMMS, what=f"{kind}.gemm")
        patterns = (self.layers,) if isinstance(self.layers, str) else self.layers
        if not patterns or not all(isinstance(each, str) for each in patterns):
            raise UnsupportedConfig(f"{kind}.layers is a path such as 'blocks.*.fc1', or several, got {self.layers!r}.")
        object.__setattr__(self, "layers", tuple(patterns))
        if self.steps is not None:
            steps = tuple(self.steps)
            if len(steps) != 2 or not all(is_whole(n) and n >= 0 for n in steps):
                raise UnsupportedConfig(f"{kind}.steps is (first, end), two numbers from 0 up, got {self.steps!r}.")
            object.__setattr__(self, "steps", steps)
        if not is_whole(self.every) or self.every < 1:
            raise UnsupportedConfig(f"{kind}.every is a number from 1 up, got {self.every!r}.")

    def takes(self, layer: str) -> bool:
        """Tell whether the change is for the layer at this path."""
        return any([fnmatchcase(layer, pattern) for pattern in self.layers])

    def is_on(self, step: int) -> bool:
        """Tell whether the change applies in this step."""
        first, end = (0, None) if self.steps is None else self.steps
        return step >= first and (end is None or step < end) and (step - first) % self.every == 0


@dataclass(frozen=True)
class HighPrecision(Change):
    """Run one GEMM on its operands as they are, without codes.

    Args:
        gemm: "fprop", "dgrad" or "wgrad".
        layers: the layers, as in `Change`.
        steps: the first step with the change and the first without it; None is every step.
        every: of those, one in this many.

    Raises:
        UnsupportedConfig: an argument has another value.

    Example:
        >>> from octavo.inspection.changes import HighPrecision
        >>> HighPrecision("wgrad", layers="blocks.*", steps=(0, 100)).is_on(100)
        False
    """


@dataclass(frozen=True)
class Quantize(Change):
    """Cast one operand of one GEMM by another quantizer. The product is that of the values of both operands' codes, in
    high precision: what a format does to a tensor shows, its speed does not.

    Args:
        gemm: "fprop", "dgrad" or "wgrad".
        layers: the layers, as in `Change`.
        steps: the first step with the change and the first without it; None is every step.
        every: of those, one in this many.
        tensor: an operand of the GEMM: "x", "w" or "dy".
        quantizer: a quantizer of `octavo.quant` or its string; None leaves the operand as it is.

    Raises:
        UnsupportedConfig: an argument has another value, or the GEMM has no such operand.

    Example:
        >>> from octavo.inspection.changes import Quantize
        >>> Quantize("fprop", tensor="x", quantizer="mx").quantizer
        mx
    """

    tensor: str = ""
    quantizer: Quantizer | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.tensor, OPERANDS[self.gemm], what=f"Quantize.tensor of {self.gemm}")
        if isinstance(self.quantizer, str):
            object.__setattr__(self, "quantizer", values.parse(self.quantizer))
        if self.quantizer is not None and not isinstance(self.quantizer, Quantizer):
            raise UnsupportedConfig(
                f"Quantize.quantizer is a quantizer of octavo.quant, its string, or None; got {self.quantizer!r}."
            )


@dataclass(frozen=True)
class Call(Change):
    """Call a function with one tensor of one GEMM. What the function returns takes the tensor's place there, and in no
    other GEMM; None leaves the tensor as it is.

    Args:
        gemm: "fprop", "dgrad" or "wgrad".
        layers: the layers, as in `Change`.
        steps: the first step with the change and the first without it; None is every step.
        every: of those, one in this many.
        tensor: an operand of the GEMM, before it is cast, or its result: "y", "dx", "dw".
        function: called with the tensor and a `Place`, without a gradient. Or "module:name" of one.

    Raises:
        UnsupportedConfig: an argument has another value, or the GEMM has no such tensor.

    Example:
        >>> from octavo.inspection.changes import Call
        >>> clipped = Call("dgrad", tensor="dy", function=lambda dy, place: dy.clamp(-1, 1))
        >>> clipped.function(torch.tensor([3.0]), None)
        tensor([1.])
    """

    tensor: str = ""
    function: Callable[[Tensor, Place], Tensor | None] | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.tensor, (*OPERANDS[self.gemm], RESULTS[self.gemm]), what=f"Call.tensor of {self.gemm}")
        if isinstance(self.function, str):
            object.__setattr__(self, "function", _imported(self.function))
        if not callable(self.function):
            raise UnsupportedConfig(f"Call.function is a function of a tensor and a Place, got {self.function!r}.")


KINDS: dict[str, type[Change]] = {"high_precision": HighPrecision, "quantize": Quantize, "call": Call}


def changes_of(given: Any) -> tuple[Change, ...]:
    """Return the changes that a caller gives: one, several, or the path of a file with them."""
    if isinstance(given, str | os.PathLike):
        return _from_file(given)
    found = (given,) if isinstance(given, Change) else tuple(given) if isinstance(given, Iterable) else ()
    if not found or not all(isinstance(each, Change) for each in found):
        raise UnsupportedConfig(
            "octavo.debug takes changes, HighPrecision, Quantize or Call of octavo.inspection.changes, or the path of "
            f"a file with them; got {given!r}."
        )
    return found


def _from_file(path: str | os.PathLike[str]) -> tuple[Change, ...]:
    data, name = read_file(path, "octavo.debug", {".json": json.loads})
    listed = data.get(SECTION)
    if set(data) != {SECTION} or not isinstance(listed, list) or not listed:
        raise UnsupportedConfig(
            f"The file {name} has one key, {SECTION}, with a list of changes; got {', '.join(map(str, data)) or None}."
        )
    return tuple([_change_of(entry, name) for entry in listed])


def _change_of(entry: Any, name: str) -> Change:
    """Return the change that an entry of a file describes."""
    if not isinstance(entry, Mapping) or entry.get("kind") not in KINDS:
        raise UnsupportedConfig(f"A change in {name} has a kind, {', '.join(KINDS)}; got {entry!r}.")
    kind = KINDS[entry["kind"]]
    known = [field.name for field in fields(kind)]
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items() if key != "kind"}
    for key in given:
        if key not in known:
            takes = f"{nearest(key, known)} It takes {', '.join(known)}."
            raise UnknownSetting(f"A change {entry['kind']!r} in {name} has no {key!r}.{takes}")
    if "gemm" not in given:
        raise UnsupportedConfig(f"A change {entry['kind']!r} in {name} names its gemm: {', '.join(GEMMS)}.")
    return kind(**given)  # type: ignore[arg-type]


def _imported(name: str) -> Any:
    """Return the function "module:name"."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnsupportedConfig(f"Call.function {name!r} is not found: {error}. Write 'module:name'.") from None
