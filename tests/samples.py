"""Grids of which `make test` runs a sample: the first case of each function and every so many after it.

The other cases are slow: `pytest -m slow` runs them. `PERIODS` has the functions whose cases take most of a run's
processor time and differ in one parameter at a time. Cases that need a GPU are none of these.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tests.fast import function_of

PERIODS: dict[str, int] = {}


def mark_the_rest(items: Sequence[Any]) -> None:
    """Mark as slow the cases that are not in the sample of their function."""
    seen: Counter[str] = Counter()
    for item in items:
        function = function_of(item.nodeid)
        period = PERIODS.get(function, 1)
        if period == 1 or item.get_closest_marker("gpu") or item.get_closest_marker("slow"):
            continue
        if seen[function] % period:
            item.add_marker(pytest.mark.slow)
        seen[function] += 1
