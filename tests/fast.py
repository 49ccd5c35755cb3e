"""The tests of `make test-fast`, for the loop while working: one case of each test function, but for slow functions.

    make test-fast                           lints nothing, and runs these tests
    python -m tests.fast LOG                 write tests/slow_functions.txt anew, from the output of a whole run with
                                             `pytest --durations=0 -vv`

`make test` runs everything.
"""

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


def slow_in(log: str) -> list[str]:
    """The functions whose cheapest case took long in a run with this output."""
    cases: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for seconds, _, test in _LINE.findall(log):
        cases[function_of(test)][test] += float(seconds)
    return sorted(function for function, taken in cases.items() if min(taken.values()) > LONG)


if __name__ == "__main__":
    SLOW.write_text("".join(f"{function}\n" for function in slow_in(Path(sys.argv[1]).read_text())))
