"""The cases of a product that always run on a GPU."""

from itertools import combinations, product

import pytest

from tests.support.pairs import meeting, pairs, turning, turns


@pytest.mark.parametrize("sizes", [(7, 2, 3, 2), (3, 3), (2, 2, 2, 2, 2), (5, 1, 4)])
def test_every_two_values_meet(sizes):
    chosen = meeting(sizes)
    assert chosen[0] == (0,) * len(sizes)
    assert (
        max(a * b for a, b in combinations(sizes, 2)) <= len(chosen) < 2 * max(a * b for a, b in combinations(sizes, 2))
    )
    for a, b in combinations(range(len(sizes)), 2):
        assert {(c[a], c[b]) for c in chosen} == set(product(range(sizes[a]), range(sizes[b])))


def test_every_three_values_meet():
    sizes = (2, 3, 2, 4)
    chosen = meeting(sizes, together=3)
    assert 24 <= len(chosen) < 36
    for axes in combinations(range(4), 3):
        assert {tuple(c[a] for a in axes) for c in chosen} == set(product(*(range(sizes[a]) for a in axes)))


def test_every_value_has_a_turn():
    assert turning((4, 2, 3)) == [(0, 0, 0), (1, 1, 1), (2, 0, 2), (3, 1, 0)]


def of(mark):
    return [(case.values, case.id, {each.name for each in case.marks}) for case in mark.args[1]]


def test_other_cases_of_the_product_are_slow():
    mark = turns(recipe=["a", "b"], flag={"yes": True, "no": False})
    assert mark.args[0] == ("recipe", "flag")
    slow = {"slow"}
    assert of(mark) == [
        (("a", True), "a-yes", set()), (("a", False), "a-no", slow), (("b", True), "b-yes", slow),
        (("b", False), "b-no", set()),
    ]  # fmt: skip


def test_every_case_runs_on_a_cpu():
    found = of(pairs(devices=True, one=[1, 2], two=[3], three=[5]))
    assert [values for values, _, marks in found if not marks] == [(1, 3, 5, "cpu"), (2, 3, 5, "cpu")]
    assert [values for values, _, marks in found if marks == {"gpu"}] == [(1, 3, 5, "cuda"), (2, 3, 5, "cuda")]
