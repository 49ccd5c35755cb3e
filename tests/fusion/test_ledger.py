"""The ledger of explain: the bytes that operations keep are those that autograd saves."""

import pytest
import torch

import octavo
from octavo import moe, ops
from tests.support.linear_oracle import spiky
from tests.support.sequentials import fill, mlp, recipes
from tests.support.state_tensors import state_tensors


def saved(call):
    """Bytes of each allocation that autograd saves, without those that existed before."""
    found = {}

    def pack(t):
        if not isinstance(t, torch.nn.Parameter):
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call()
    return found


@recipes(["bf16", "fp8-current", "fp8-block", "mxfp8"])
def test_a_run_keeps_what_the_ledger_says(recipe):
    model, x = mlp(recipe), spiky(24, 32).requires_grad_()
    saved_tensors = model.explain(x).saved_tensors
    found = saved(lambda: model(x))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    total = sum(n for at, n in found.items() if at not in weights)
    said = sum(e.activations + e.inputs + e.weight_codes for e in saved_tensors)
    assert abs(total - said) <= 0.02 * total + 64
    assert [e.op for e in saved_tensors] == ["RMSNorm", "Linear", "SwiGLU", "Linear"]


@recipes(["fp8-current", "fp8-block", "fp8-rowwise"])
def test_amaxes_that_backward_casts_by_are_in_the_ledger_to_the_byte(recipe):
    """They are no codes of weights: those are made again."""
    model, x = fill(octavo.LayerNormMLP(32, 48, activation="swiglu", recipe=recipe)), spiky(24, 32).requires_grad_()
    saved_tensors = model.explain(x).saved_tensors
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    total = sum(n for at, n in saved(lambda: model(x)).items() if at not in weights)
    assert total == sum(e.activations + e.inputs for e in saved_tensors)
    assert all(e.weight_codes == 0 for e in saved_tensors)
    assert saved_tensors[3].activations == (
        8 if recipe == "fp8-current" else 0
    )  # of the activated values and of fc2's weight


def grouped(recipe, **settings):
    common = {"bias": False, "recipe": recipe, **settings}
    first, second = octavo.GroupedLinear(3, 48, 64, **common), octavo.GroupedLinear(3, 32, 48, **common)
    return fill(octavo.Sequential(first, ops.ScaledSwiGLU(), second))


WAYS = [
    "a grouped MLP",
    "a grouped MLP, codes made again",
    "a grouped MLP, cached",
    "experts",
    "experts, codes made again",
]


@recipes(["bf16", "fp8-delayed", "fp8-current", "fp8-block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("way", WAYS)
def test_groups_keep_what_the_ledger_says_to_the_byte(recipe, way):
    settings = {"keep_weight_codes": False} if "again" in way else {}
    given = {"op_kwargs": {i: {"is_first_microbatch": True} for i in (0, 2)}} if "cached" in way else {}
    x, sizes = spiky(40, 48).requires_grad_(), torch.tensor([20, 0, 17])
    if "experts" in way:
        model, probs = fill(moe.Experts(3, 48, 32, recipe=recipe, **settings)), torch.rand(40, 2, requires_grad=True)
        data, permutation = (x, torch.arange(80).view(40, 2) % 3, probs), 2 * 4 * 80  # positions and assignments
    else:
        model, probs = grouped(recipe, **settings), torch.rand(40, requires_grad=True)
        data, permutation = (x, sizes, probs, sizes), 0
    model(*data, **given)
    saved_tensors = model.explain(*data, **given).saved_tensors
    there = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *state_tensors(model), probs)}
    total = sum(n for at, n in saved(lambda: model(*data, **given)).items() if at not in there)
    assert total - permutation == sum(e.activations + e.inputs + e.weight_codes for e in saved_tensors)
    keeps_codes = recipe != "bf16" and not settings and not given
    assert (sum(e.weight_codes for e in saved_tensors) > 0) == keeps_codes


def test_weights_codes_have_a_column_of_their_own():
    groups, hidden, ffn = 3, 256, 128
    for keeps in (True, False):
        model = fill(moe.Experts(groups, hidden, ffn, recipe="fp8-block", keep_weight_codes=keeps))
        x, index = spiky(40, hidden).requires_grad_(), torch.arange(80).view(40, 2) % groups
        saved_tensors = model.explain(x, index, torch.rand(40, 2, requires_grad=True)).saved_tensors
        codes = sum(e.weight_codes for e in saved_tensors)
        assert (codes >= groups * hidden * ffn * 3) if keeps else codes == 0
        assert sum(e.inputs for e in saved_tensors) == 4 * 40 * hidden
        h = 4 * 80 * 2 * ffn
        assert h <= sum(e.activations for e in saved_tensors) <= h + 8192


@pytest.mark.parametrize("wants", [True, False])
def test_a_call_without_gradients_keeps_nothing(wants):
    model, x = mlp("fp8-block"), spiky(24, 32)
    if wants:
        assert any(e.activations for e in model.explain(x).saved_tensors)
        return
    with torch.no_grad():
        saved_tensors = model.explain(x).saved_tensors
    assert not any(e.activations or e.inputs or e.weight_codes for e in saved_tensors)


def test_a_ledger_prints_as_a_table():
    model = octavo.Sequential(octavo.Linear(64, 128, recipe="fp8-block"), ops.GELU())
    lines = str(model.explain(torch.ones(8, 64, requires_grad=True)).saved_tensors).splitlines()
    assert lines[0].split("  ")[0] == "kept for backward, bytes"
    assert lines[1].startswith("Linear ") and lines[2].startswith("GELU ") and lines[3].startswith("in all ")
    assert len({len(line) for line in lines}) == 1
