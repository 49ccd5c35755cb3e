"""Sources as the wheel has them: without comments, and without the docstrings of what is not public.

A program needs neither, and they are a sixth of the wheel. Every line keeps its number, so a traceback from an
installed package fits the repository. The sdist has the sources as they are.
"""

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator, Mapping

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
HELP = "octavo/cli/"  # whose files show their docstrings by --help


def stripped(sources: Mapping[str, str]) -> dict[str, str]:
    """Return the sources of the package by their paths, stripped.

    The docstrings that stay are those of classes, of their methods, of functions that an `__all__` names, of files that
    have an `__all__`, and of the command's files: `help()` and `--help` show them.
    """
    trees = {path: ast.parse(source) for path, source in sources.items()}
    exported = {path: set(_exported(tree)) for path, tree in trees.items()}
    public = set().union(*exported.values())
    found = {}
    for path, source in sources.items():
        lines = _without_comments(source)
        nodes = list(_internal(trees[path], public))
        if not exported[path] and not path.startswith(HELP):
            nodes.append(trees[path])
        for node in nodes:
            _blank_docstring(lines, node)
        found[path] = "".join(lines)
    return found


def _exported(tree: ast.Module) -> Iterator[str]:
    """Yield the names in the `__all__` of a file."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AugAssign) and "__all__" in ast.unparse(node):
            yield from (each.value for each in ast.walk(node) if isinstance(getattr(each, "value", None), str))


def _without_comments(source: str) -> list[str]:
    lines = source.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip() + "\n"
    return lines


def _internal(tree: ast.Module, public: set[str]) -> Iterator[Documented]:
    """Yield what users do not call by its name: methods that begin with an underscore, the functions of a file that no
    `__all__` names, and all that is inside. A public class may have its methods from a class of any name."""
    for node in _defined(tree.body):
        if isinstance(node, ast.ClassDef):
            yield from (node for member in _defined(node.body) if _is_private(member.name) for node in _inside(member))
        elif node.name not in public:
            yield from _inside(node)


def _defined(body: Iterable[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _inside(tree: ast.AST) -> Iterator[Documented]:
    yield from (node for node in ast.walk(tree) if isinstance(node, Documented))


def _blank_docstring(lines: list[str], node: Documented) -> None:
    if ast.get_docstring(node) is None:
        return
    first = node.body[0]
    if first.lineno == getattr(node, "lineno", 0):  # on the line of its def
        return
    for row in range(first.lineno - 1, first.end_lineno or first.lineno):
        lines[row] = "\n"
    if len(node.body) == 1 and not isinstance(node, ast.Module):
        lines[first.lineno - 1] = " " * first.col_offset + "...\n"
