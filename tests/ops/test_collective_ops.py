"""The collectives as operations of one process: each is the identity, alone and between layers."""

import copy

import pytest

import octavo
from octavo import ops
from tests.support.linear_oracle import assert_same, make, spiky
from tests.support.steps import assert_equal, compiled, step

pytestmark = pytest.mark.usefixtures("fresh_compiler")
M, K, N = 32, 48, 40


@pytest.mark.parametrize("name", ["AllReduce", "AllGather", "ReduceScatter"])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_with_nobody_else_a_collective_is_the_identity(name, is_compiled):
    op, x, dy = getattr(ops, name)(), spiky(M, K), spiky(M, K, seed=1)
    kept = x.clone()
    assert_equal(step(op, x, dy, call=compiled(op) if is_compiled else None), [x, dy])
    assert_same(x, kept)


def test_a_collective_between_operations():
    layers = [make("fp8-current", K, K), ops.AllReduce(), make("fp8-current", K, K, seed=5)]
    model, (x, dy) = octavo.Sequential(*layers), (spiky(M, K), spiky(M, K, seed=1))
    twin = octavo.Sequential(*copy.deepcopy([layers[0], layers[2]]))
    assert_equal(step(model, x, dy), step(twin, x, dy))
