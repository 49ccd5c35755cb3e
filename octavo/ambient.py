"""Context managers for calls of layers. `with octavo.autocast(recipe):` sets the recipe of layers that have none of
their own; `with octavo.microbatch(first=...):` sets `is_first_microbatch` for calls that do not pass it.

Each applies to the thread that entered it, and forward reads it. A backward that runs forward again, for a checkpoint,
does not read it.
"""

import threading
from types import TracebackType
from typing import Any

from torch import Tensor

from octavo._torch.tracing import while_tracing
from octavo.errors import UnsupportedConfig, UnsupportedShape
from octavo.recipes import SHIPPED, Recipe, recipe


class _Ambient(threading.local):
    """The values in force, per thread. __init__ sets the fields, so that the compiler sees each thread's own value."""

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.outer: tuple[Recipe | None, object] | None = None
        self.first: bool | Tensor | None = None
        # the values in force around the block: a new tuple each time a block is entered
        self.outer_first: tuple[bool | Tensor | None, object] | None = None


ambient = _Ambient()


class autocast:
    """Run layers that have no recipe of their own with this one. Nests, can be reentered, and ends with its block."""

    def __init__(self, recipe: str | Recipe) -> None:
        if isinstance(recipe, str):
            _learn(recipe)
            self.recipe = _KNOWN[recipe]
        elif isinstance(recipe, Recipe):
            self.recipe = recipe
        else:
            self.recipe = _refused(recipe)

    def __enter__(self) -> "autocast":
        ambient.outer = (ambient.recipe, ambient.outer)
        ambient.recipe = self.recipe
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ambient.recipe, ambient.outer = ambient.outer  # type: ignore[misc,assignment]


class microbatch:
    """Pass this `is_first_microbatch` to every Octavo layer called in the block, unless its call passes one.

    first   True: layers quantize their weights into the caches, each once; False: layers use the caches; None: neither,
            as outside of a block; a tensor of one element: the device decides from its value, zero for False

    Nests, can be reentered, and ends with its block."""

    def __init__(self, first: bool | Tensor | None) -> None:
        if isinstance(first, Tensor):
            if first.numel() != 1:
                raise UnsupportedShape(
                    f"microbatch(first=...) on the device is one element, got {tuple(first.shape)}. Pass one of them."
                )
        elif first is not None and type(first) is not bool:
            raise UnsupportedConfig(
                f"first= of a microbatch is True, False, None or a tensor of one element, got {first!r}. "
                "Write octavo.microbatch(first=i == 0)."
            )
        self.first = first

    def __enter__(self) -> "microbatch":
        ambient.outer_first = (ambient.first, ambient.outer_first)
        ambient.first = self.first
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ambient.first, ambient.outer_first = ambient.outer_first  # type: ignore[misc,assignment]


# recipes by their text: a compiler that traces a `with` statement reads them here and does not trace the parser
_KNOWN: dict[str, Recipe] = {name: recipe(name) for name in SHIPPED}


def _refused(found: Any) -> Recipe:
    if found is None:
        raise UnsupportedConfig(
            "octavo.autocast takes a recipe, got None. For layers without quantization enter octavo.autocast('bf16'); "
            "to leave them as they are, leave autocast out: contextlib.nullcontext()."
        )
    return recipe(found)  # raises an error that describes what was passed


@while_tracing
def _learn(text: str) -> bool:
    if text not in _KNOWN:
        _KNOWN[text] = recipe(text)
    return True
