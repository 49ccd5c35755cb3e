"""What a `Launch` can launch. Where there is no GPU nothing is launched, so the rules are about what Python can see:
the kernel's parameters and text, the grid and the sizes. A `Launch` is checked when it is made, and
`tests/test_offline.py` checks every `Variant`."""

import inspect
import re
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from octavo.errors import UnsupportedConfig

if TYPE_CHECKING:
    from octavo.launch import Variant

_OTHER_AXIS = re.compile(r"\b(?:program_id|num_programs)\((?!\s*(?:axis\s*=\s*)?0\s*\))[^)]*\)")
_SPLIT = "Split program_id(0), as octavo.quant.tile.tile_index does."
_NO_NUMBER = "A Launch passes pointers, then ints: declare any other value tl.constexpr, or pass a tensor with it."


def check_launch(kernel: Any, grid: object, sizes: tuple[object, ...], constants: tuple[str, ...]) -> None:
    """Raise for a kernel, a grid or sizes that no launch takes."""
    _check_kernel(kernel, constants)
    if type(grid) is not int:
        _refuse(
            f"{_name(kernel)} has the grid {grid!r}, and a Launch takes an int, since its grid has one dimension. "
            f"Pass the number of programs. {_SPLIT}"
        )
    for size in sizes:
        if size is not None and type(size) is not int:
            _refuse(f"{_name(kernel)} has the size {size!r}, of type {type(size).__name__}. {_NO_NUMBER}")


def check_variant(variant: "Variant") -> None:
    """Raise for a variant that no launch compiles."""
    kernel, signature = variant.kernel, variant.signature
    passed = [p.name for p in _parameters(kernel) if not _is_constant(p)]
    _check_kernel(kernel, tuple(name for name in variant.constants if name not in passed))
    for value in variant.constants.values():
        if _is_jitted(value):
            _check_axes(value)
    if unknown := [name for name in signature if name not in passed]:
        _refuse(
            f"{variant.name} has the types of {_listed(unknown)}, and {_name(kernel)} is passed {_listed(passed)}. "
            "Correct the name, or move it to the constants."
        )
    size = ""
    for name in passed:
        if name not in signature and name not in variant.constants:
            _refuse(f"{variant.name} does not say what {name} is. Add it to the signature or to the constants.")
        kind = signature.get(name, variant.constants.get(name))
        if isinstance(kind, str) and kind.startswith(("*", "tensordesc<")):
            if size:
                _refuse(f"{variant.name} has the pointer {name} after the size {size}. Move it before the sizes.")
        elif kind in ("i32", "i64") or type(kind) is int:
            size = name
        elif kind is not None:
            _refuse(f"{variant.name} passes {name} as {kind!r}. {_NO_NUMBER}")
        if name == passed[0] and (size or kind is None):
            _refuse(f"{variant.name} passes {name} first as {kind!r}. Pass a tensor first: it names the device.")


def reached(function: Any) -> list[Any]:
    """Return a jitted function and those that it calls, by the names in their text."""
    found = [function]
    for caller in found:
        for path in dict.fromkeys(re.findall(r"[A-Za-z_][\w.]*", _text(caller))):
            first, *rest = path.split(".")
            value = caller.fn.__globals__.get(first)
            for name in rest:
                value = getattr(value, name, None)
            if _is_jitted(value) and all(value is not other for other in found):
                found.append(value)
    return found


@cache  # by kernel and names: a program makes a launch for every size that it meets
def _check_kernel(kernel: Any, constants: tuple[str, ...]) -> None:
    if not _is_jitted(kernel):
        what = type(kernel).__name__
        _refuse(f"A Launch takes what triton.jit or gluon.jit returns, got one {what}. Leave out other decorators.")
    own: list[str] = []
    for p in _parameters(kernel):
        if p.default is not p.empty:
            _refuse(f"{_name(kernel)} gives {p.name} a default, which a Launch never passes. Remove it.")
        if _is_constant(p):
            own.append(p.name)
        elif own:
            _refuse(f"{_name(kernel)} has {p.name} after the constant {own[-1]}. Move the constants to the end.")
        elif p.annotation is not p.empty:
            _refuse(f"{_name(kernel)} declares {p.name} as {p.annotation}. {_NO_NUMBER}")
    if set(own) != set(constants):
        _refuse(f"{_name(kernel)} takes the constants {_listed(own)}, got {_listed(constants)}. Pass each by its name.")
    _check_axes(kernel)


def _check_axes(function: Any) -> None:
    for called in reached(function):
        if other := _OTHER_AXIS.search(_text(called)):
            by = "" if called is function else f" in {_name(called)}"
            _refuse(f"{_name(function)} calls {other[0]}{by}, and a Launch has a grid of one dimension. {_SPLIT}")


def _is_jitted(value: object) -> bool:
    return inspect.isfunction(getattr(value, "fn", None))  # that of an Autotuner is a jitted function


def _text(function: Any) -> str:
    return getattr(function, "src", "")  # private to Triton: a version without it must launch all the same


def _parameters(kernel: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(kernel.fn).parameters.values())


def _is_constant(parameter: inspect.Parameter) -> bool:
    return "constexpr" in str(parameter.annotation)


def _name(kernel: Any) -> str:
    return str(kernel.fn.__name__)


def _listed(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(names) or "none"


def _refuse(sentence: str) -> NoReturn:
    raise UnsupportedConfig(sentence)
