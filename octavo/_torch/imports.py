"""Modules of torch that take long to import: they are changed when the program imports them, not before.

The compiler alone takes a second, which a program that does not compile need not wait for. Python's import system has a
public place for this, a finder in `sys.meta_path`.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Change = Callable[[ModuleType], object]


class _Finder(MetaPathFinder):
    """Find the modules that wait for a change as Python's other finders do, and make the changes after the import."""

    def __init__(self) -> None:
        self.changes: dict[str, list[Change]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.changes:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for change in self.changes.pop(fullname, ()):
                    change(module)

            # on this one loader: another class in its place would hide the module's source from tracebacks
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _Finder()
sys.meta_path.insert(0, _finder)


def when_imported(name: str, change: Change) -> None:
    """Call `change` with a module: now if it is imported already, else right after its import."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        _finder.changes.setdefault(name, []).append(change)
