"""torch.utils.checkpoint around layers: the same bits, and a selective policy that saves or recomputes our node."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.errors import UnsupportedConfig
from octavo.kernels.gemm import reference as gemm_reference
from octavo.recipes import SHIPPED
from tests.support.checkpointed import saving
from tests.support.compiled_twins import assert_results, assert_step, bank, batch, batches, pair, results, stepped
from tests.support.linear_oracle import assert_same, make, seed_of
from tests.support.steps import assert_state, compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_a_checkpoint_of_every_recipe_gives_the_same_bits():
    model, twin = bank()
    call = compiled(lambda x: checkpoint(model, x, use_reentrant=False))
    for i in range(2):
        assert_step((model, twin), (call, twin), batches(i))
        stepped(model, twin)
    assert_state(model, twin)


def test_sac_save_ops_are_operators_a_policy_can_name():
    ops = octavo.sac_save_ops()
    assert isinstance(ops, list | tuple) and ops
    assert all(isinstance(op, torch._ops.OpOverload) for op in ops)
    assert torch.ops.octavo.run.default in ops


@pytest.fixture
def products(monkeypatch):
    """How many GEMMs have run."""
    ran, gemm = [], gemm_reference.gemm

    def counting(*args, **options):
        ran.append(1)
        return gemm(*args, **options)

    monkeypatch.setattr(gemm_reference, "gemm", counting)
    return ran


SELECTED = [(recipe, "eager") for recipe in SHIPPED]
SELECTED += [(recipe, "compiled") for recipe in ("fp8-delayed", "nvfp4")]


@pytest.mark.parametrize(("recipe", "mode"), SELECTED)
@pytest.mark.parametrize("saved", [True, False], ids=["MUST_SAVE", "recomputed"])
def test_selective_checkpointing_saves_or_recomputes_our_node(recipe, mode, saved, products):
    layer, twin = pair(recipe)
    options = {"context_fn": saving(octavo.sac_save_ops() if saved else ())}

    def block(x):
        return checkpoint(layer, x, use_reentrant=False, **options)

    call = compiled(block) if mode == "compiled" else block
    for i in range(2):
        counter = seed_of(layer)
        data = batch(i)
        want = results(twin, twin, *data)
        products.clear()
        found = results(layer, call, *data)
        assert_results(found, want)
        if saved:
            assert len(products) == 3, "fprop, dgrad and wgrad, none of them twice"
        elif mode == "eager":
            assert len(products) == 4, "fprop once more"
        if counter is not None:
            assert_same(seed_of(layer), counter + torch.tensor([0, 1]))
        stepped(layer, twin)
    assert_state(layer, twin)


def test_a_recompute_after_another_forward_outside_the_recipe_is_refused():
    layer, (x, dy) = make(None), batch(0)
    with octavo.autocast("fp8-current"):
        y = checkpoint(layer, x.clone().requires_grad_(), use_reentrant=True)
    layer(x)
    with pytest.raises(UnsupportedConfig, match="inside the checkpointed function"):
        y.backward(dy)
