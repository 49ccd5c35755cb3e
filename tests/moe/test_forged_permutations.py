"""A Permutation that no sort made: wrong kinds, dtypes, shapes, devices and values are refused by all that take one."""

import pytest
import torch

from octavo import moe
from octavo.errors import Unsupported, UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape

T, K, E, D = 6, 2, 4, 32
INDEX = torch.tensor([[0, 1], [1, 2], [3, 0], [-1, 1], [2, 3], [0, 2]])
REAL = moe.sort(INDEX, E)
ROWS = REAL.assignments.shape[0]
x, rows, probs = torch.randn(T, D), torch.randn(ROWS, D), torch.rand(T, K)
experts = moe.Experts(E, D, 48, recipe="fp8-block")
USES = {
    "permute": lambda p: moe.permute(x, p),
    "unpermute": lambda p: moe.unpermute(rows, p, probs),
    "permute_probs": lambda p: moe.permute_probs(probs, p),
    "Experts": lambda p: experts(x, p, probs),
}
uses = pytest.mark.parametrize("use", USES.values(), ids=USES)
WRONG = {
    "sizes in floats": (REAL._replace(sizes=REAL.sizes.float()), UnsupportedDtype, "sizes"),
    "sizes in a list": (REAL._replace(sizes=[3, 3, 3, 2]), UnsupportedDtype, "sizes"),
    "sizes of two dims": (REAL._replace(sizes=REAL.sizes[None]), UnsupportedShape, "sizes"),
    "positions in int64": (REAL._replace(positions=REAL.positions.long()), UnsupportedDtype, "positions"),
    "positions without dims": (REAL._replace(positions=REAL.positions[0, 0]), UnsupportedShape, "positions"),
    "positions that are not there": (REAL._replace(positions=None), UnsupportedDtype, "positions"),
    "assignments in floats": (REAL._replace(assignments=REAL.assignments.float()), UnsupportedDtype, "assignments"),
    "assignments of two dims": (REAL._replace(assignments=REAL.assignments[None]), UnsupportedShape, "assignments"),
    "experts of another shape": (REAL._replace(experts=REAL.positions[:3]), UnsupportedShape, "experts"),
    "sizes on meta": (REAL._replace(sizes=REAL.sizes.to("meta")), UnsupportedDevice, "sizes"),
    "assignments on meta": (REAL._replace(assignments=REAL.assignments.to("meta")), UnsupportedDevice, "assignments"),
    "a row too far": (
        REAL._replace(positions=REAL.positions + 1),
        UnsupportedConfig,
        f"positions from -1 to {ROWS - 1}",
    ),
    "a row before the first": (REAL._replace(positions=REAL.positions - 2), UnsupportedConfig, "positions from -1"),
    "an assignment too far": (
        REAL._replace(assignments=REAL.assignments + T * K),
        UnsupportedConfig,
        f"assignments from -2 to {T * K - 1}",
    ),
    "another sort's assignments": (
        REAL._replace(assignments=moe.sort(INDEX.flip(0), E).assignments),
        UnsupportedConfig,
        "in the row that its position names",
    ),
    "one assignment in two rows": (
        REAL._replace(assignments=REAL.assignments[[0, 0, *range(2, ROWS)]]),
        UnsupportedConfig,
        "in the row that its position names",
    ),
    "an assignment before the first": (
        REAL._replace(assignments=REAL.assignments - 9),
        UnsupportedConfig,
        "assignments from -2",
    ),
}


@uses
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_forged_permutation_is_refused(use, wrong):
    permutation, error, said = wrong
    with pytest.raises(error, match=said):
        use(permutation)


@pytest.mark.parametrize(
    "wrong", [tuple(REAL), list(REAL), None, REAL.positions, "a sort"], ids=lambda w: type(w).__name__
)
@pytest.mark.parametrize("name", ["unpermute", "permute_probs"])
def test_what_is_no_permutation_is_refused(name, wrong):
    with pytest.raises(UnsupportedDtype, match=r"takes an octavo.moe.Permutation, got .*octavo.moe.sort"):
        USES[name](wrong)


@uses
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_real_one_made_by_hand_is_taken(use, dtype):
    found, want = (use(p) for p in (moe.Permutation(REAL.sizes.to(dtype), *REAL[1:3]), REAL))
    pairs = zip(found, want, strict=True) if isinstance(found, tuple) else [(found, want)]
    assert all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))


@uses
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["sizes in floats", "positions in int64", "assignments of two dims"])
def test_a_graph_refuses_wrong_dtypes_and_shapes_too(use, name):
    with pytest.raises((Unsupported, RuntimeError), match=WRONG[name][2]):
        torch.compile(use, backend="aot_eager", fullgraph=True)(WRONG[name][0])
