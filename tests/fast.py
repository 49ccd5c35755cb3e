"""The tests of `make test-fast`, for the loop while working: one case of each test function, but for slow functions.

    make test-fast                           lints nothing, and runs these tests
    python -m tests.fast LOG                 write tests/slow_functions.txt anew, from the output of a whole run with
                                             `pytest --durations=0 -vv`

`make test` runs everything.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SLOW = Path(__file__).with_name("slow_functions.txt")
LONG = 0.15  # seconds of a function's first case, its setup included, above which the function is left out
_LINE = re.compile(r"^([0-9.]+)s (call|setup|teardown) +(tests/\S.*)$", re.M)


def function_of(test: str) -> str:
    """The id of a test without its parameters."""
    return test.split("[")[0]


def slow_functions() -> set[str]:
    return set(SLOW.read_text().split("\n")[:-1])


def chosen(items: Sequence[Any]) -> set[Any]:
    """The first case of each function that is not slow."""
    first: dict[str, Any] = {}
    for item in items:
        first.setdefault(function_of(item.nodeid), item)
    slow = slow_functions()
    return {item for function, item in first.items() if function not in slow}


def functions_of(path: Path) -> set[str]:
    """The names of the functions that a file defines; none if there is no such file, since a run may be older."""
    tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def slow_in(log: str) -> list[str]:
    """The functions whose cheapest case took long in a run with this output, and those that share a long setup: the
    first function of a file that takes a module's fixture pays for it, and without that one the next would."""
    cases: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    shared: set[str] = set()
    for seconds, what, test in _LINE.findall(log):
        cases[function_of(test)][test] += float(seconds)
        if what == "setup" and float(seconds) > LONG:
            shared |= sharing_setup(function_of(test))
    return sorted(shared | {function for function, taken in cases.items() if min(taken.values()) > LONG})


def sharing_setup(function: str) -> set[str]:
    """The functions of a test's file that take a fixture of the whole file which the test takes."""
    file, _, name = function.partition("::")
    path = SLOW.parent.parent / file
    source = path.read_text() if path.exists() else ""  # the file may have gone since the run
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    decorators = {node.name: " ".join(map(ast.unparse, node.decorator_list)) for node in nodes}
    takes = {node.name: {argument.arg for argument in node.args.args} for node in nodes}
    of_the_file = {each for each, text in decorators.items() if "fixture" in text and "scope='module'" in text}

    def taken(test: str) -> set[str]:
        """Fixtures of the whole file, by way of others too."""
        return {test} & of_the_file | {found for each in takes.get(test, ()) for found in taken(each)}

    wanted = taken(name.split("::")[-1])
    return {f"{file}::{each}" for each in takes if each.startswith("test_") and taken(each) & wanted}


if __name__ == "__main__":
    SLOW.write_text("".join(f"{function}\n" for function in slow_in(Path(sys.argv[1]).read_text())))
