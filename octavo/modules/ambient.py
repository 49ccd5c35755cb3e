"""The ambient recipe: what `with octavo.autocast(recipe):` means to layers that were given none of their own.

It belongs to the thread that entered it, and is read once, at forward: backward runs as its forward did, wherever and
whenever it runs.
"""

import threading
from types import TracebackType
from typing import Any

from octavo.recipes import SHIPPED, Recipe, recipe


class _Ambient(threading.local):
    """A subclass that sets its fields here, not on the class: the compiler then sees each thread's own value."""

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.outer: tuple[Recipe | None, object] | None = None


ambient = _Ambient()


class autocast:
    """Run layers without a recipe of their own in this one. Nests, can be entered again, and ends with its block."""

    def __init__(self, recipe: str | Recipe) -> None:
        self.recipe = _SHIPPED[recipe] if recipe in _SHIPPED else _recipe(recipe)

    def __enter__(self) -> "autocast":
        ambient.outer = (ambient.recipe, ambient.outer)
        ambient.recipe = self.recipe
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ambient.recipe, ambient.outer = ambient.outer  # type: ignore[misc,assignment]


_recipe = recipe  # the parameter above has the same name
# by name, resolved beforehand: a compiler that traces a `with` statement reads them here and need not parse
_SHIPPED: dict[Any, Recipe] = {name: recipe(name) for name in SHIPPED}
