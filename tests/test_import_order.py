"""A file may import only layers above its own: the order below, read off every `import` in the package."""

import ast
from pathlib import Path

import pytest

import octavo

ORDER = (
    "text",
    "errors",
    "foreign_keywords",
    "formats",
    "values",
    "memory",
    "_torch",
    "backend",
    "launch",
    "quant",
    "kernels",
    "recipes",
    "scaling",
    "runtime",
    "weights",
    "optim",
    "communication",
    "ops",
    "fusion",
    "distributed",
    "moe",
    "model",
    "checkpoints",
    "inspection",
    "integrations",
    "demo",
    "cli",
    "__main__",
)
ANYONES = "version"  # imports nothing of ours, so anything may import it
ROOT = Path(octavo.__file__).parent
# Packages that offer names of a later room, and resolve them when they are asked for: users look for Sequential beside
# the operations that it runs, and for DelayedState beside the quantizers that it scales.
OFFERS = {"ops/__init__.py": "fusion", "quant/__init__.py": "scaling"}


def layer_of(path):
    """The layer of a file, from its path inside the package."""
    return Path(path).parts[0].removesuffix(".py")


def imported(source, path):
    """(line, dotted name inside the package; "" is the package itself) of every import, wherever it stands."""
    package = ["octavo", *Path(path).parts[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            # `from octavo import quant` names a layer; `from octavo.quant import MX` has named it already
            targets = [f"{module}.{alias.name}" for alias in node.names] if module == "octavo" else [module]
        else:
            continue
        for target in targets:
            if target == "octavo" or target.startswith("octavo."):
                yield node.lineno, target.removeprefix("octavo").removeprefix(".")


def violations(source, path):
    """Why each forbidden import is forbidden, in words."""
    own, found = layer_of(path), []
    if own not in (*ORDER, ANYONES):
        return [f"{path}: {own!r} is not a layer; add it to the order"]
    for line, target in imported(source, path):
        layer = target.split(".")[0]
        where = f"{path}:{line}: {own} imports octavo{target and '.'}{target}"
        if not target:
            found.append(f"{where}, which imports every layer")
        elif layer not in (*ORDER, ANYONES):
            found.append(f"{where}, which is not a layer")
        elif own == ANYONES and layer != ANYONES:
            found.append(f"{where}, but everything imports {ANYONES}")
        elif layer == OFFERS.get(Path(path).as_posix()):
            continue
        elif layer != ANYONES and ORDER.index(layer) > ORDER.index(own):
            found.append(f"{where}, a later layer")
    return found


def files():
    return [p for p in sorted(ROOT.rglob("*.py")) if p != ROOT / "__init__.py"]


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    assert violations(path.read_text(), path.relative_to(ROOT)) == []


def test_the_walk_finds_the_package():
    found = {layer_of(p.relative_to(ROOT)) for p in files()}
    assert {"errors", "formats", "values", "backend", "quant", "kernels", "recipes", "version"} <= found


FORBIDDEN = {
    "plain": "import octavo.recipes",
    "from a layer": "from octavo.recipes import Block",
    "from the package": "from octavo import recipes",
    "one of several": "from octavo import errors, recipes",
    "aliased": "import octavo.recipes.block as b",
    "in a function": "def f():\n    from octavo.recipes import Block",
    "in a method of a class": "class A:\n    def f(self):\n        import octavo.cli",
    "for type checkers": "if TYPE_CHECKING:\n    from octavo.recipes import Block",
    "in a try": "try:\n    import octavo.ops\nexcept ImportError:\n    pass",
    "relative": "from ..recipes import Block",
    "relative to the package": "from .. import recipes",
    "unknown layer": "import octavo.utils",
    "unknown name": "from octavo import helpers",
    "the package itself": "import octavo",
}


@pytest.mark.parametrize("source", FORBIDDEN.values(), ids=FORBIDDEN)
def test_the_checker_catches(source):
    found = violations("import torch\n" + source, "quant/scheme.py")
    assert len(found) == 1
    assert found[0].startswith("quant/scheme.py:")
    assert "quant imports octavo" in found[0]


ALLOWED = {
    "earlier": "from octavo.errors import Unsupported\nfrom octavo import backend, formats",
    "own": "from octavo.quant.scale import divide\nfrom . import scale\nfrom .scale import divide",
    "version": "from octavo.version import __version__",
    "others": "import torch\nimport octavox\nfrom octavo_tools import cli",
    "nested own": "def f():\n    from octavo.quant.block import triton",
}


@pytest.mark.parametrize("source", ALLOWED.values(), ids=ALLOWED)
def test_the_checker_lets_through(source):
    assert violations(source, "quant/scheme.py") == []


def test_the_checker_knows_its_place_in_nested_folders():
    assert violations("from ...recipes import Block", "quant/block/triton.py")
    assert not violations("from ...errors import Unsupported", "quant/block/triton.py")
    assert not violations("from ..quant import MX", "recipes/mxfp8.py")


def test_the_checker_refuses_files_outside_the_layers():
    assert "'utils' is not a layer" in violations("", "utils.py")[0]
    assert "everything imports version" in violations("import octavo.errors", "version.py")[0]
