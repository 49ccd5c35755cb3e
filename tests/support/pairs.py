"""Cases of several parameters, of which a few always run, and the rest of the product is marked slow.

`pairs`: every two values of two parameters meet in a case, `triples`: every three of three, `turns`: every value has a
case, `some`: values that are named. They are for tests on a GPU, whose whole products take hours.
`python3 -m tests.gpu -m "gpu and slow"` runs the rest.
"""

from collections.abc import Collection, Mapping
from itertools import combinations, product
from typing import Any

import pytest

Axis = Mapping[str, Any] | Collection[Any]  # values by name, or values that name themselves
Choice = tuple[int, ...]  # the place of a value in each axis


def meeting(sizes: tuple[int, ...], together: int = 2) -> list[Choice]:
    """Few choices, in which values of any two axes, or more, occur together. The first has the first value of each."""
    choices, axes = list(product(*map(range, sizes))), list(combinations(range(len(sizes)), together))
    met = {choice: {(some, *(choice[axis] for axis in some)) for some in axes} for choice in choices}
    missing, taken = set().union(*met.values()), []
    while missing:
        best = max(choices, key=lambda choice: len(met[choice] & missing))  # the first of equals
        taken.append(best)
        missing -= met[best]
    return taken


def turning(sizes: tuple[int, ...]) -> list[Choice]:
    """As many choices as the longest axis has values; a shorter one begins again."""
    return [tuple(i % size for size in sizes) for i in range(max(sizes))]


def _cases(always: set[Choice], axes: Mapping[str, Axis], devices: bool) -> pytest.MarkDecorator:
    named = [list(axis.items()) if isinstance(axis, Mapping) else [(str(v), v) for v in axis] for axis in axes.values()]
    cases = []
    for choice in product(*(range(len(axis)) for axis in named)):
        chosen = [axis[place] for axis, place in zip(named, choice, strict=True)]
        name, values = "-".join(name for name, _ in chosen), [value for _, value in chosen]
        marks = () if choice in always else (pytest.mark.slow,)
        if devices:
            cases.append(pytest.param(*values, "cpu", id=f"{name}-cpu"))
            cases.append(pytest.param(*values, "cuda", id=f"{name}-cuda", marks=(pytest.mark.gpu, *marks)))
        else:
            cases.append(pytest.param(*values, id=name, marks=marks))
    return pytest.mark.parametrize((*axes, "device") if devices else tuple(axes), cases)


def some(name: str, values: Collection[Any], always: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by one axis, of which some values always run."""
    cases = [pytest.param(each, id=str(each), marks=() if each in always else (pytest.mark.slow,)) for each in values]
    return pytest.mark.parametrize(name, cases)


def pairs(*, devices: bool = False, **axes: Axis) -> pytest.MarkDecorator:
    """Parametrizes a test by all axes. With `devices` it has a `device` too: every case runs on "cpu"; on "cuda" each
    is marked gpu, and slow unless it is one of those that always run."""
    sizes = tuple(map(len, axes.values()))
    return _cases(set(meeting(sizes)), axes, devices)


def triples(*, devices: bool = False, **axes: Axis) -> pytest.MarkDecorator:
    """As `pairs`, with a case for every three values of three axes."""
    sizes = tuple(map(len, axes.values()))
    return _cases(set(meeting(sizes, 3)), axes, devices)


def turns(*, devices: bool = False, **axes: Axis) -> pytest.MarkDecorator:
    """As `pairs`, with a case for every value alone."""
    sizes = tuple(map(len, axes.values()))
    return _cases(set(turning(sizes)), axes, devices)
