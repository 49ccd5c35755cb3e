"""How many graphs compiled Linears have: for different layers, equal ones, training and evaluating, another recipe."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import octavo
from tests.support.compiled_twins import assert_step, bank, batch, batches, graphs, pair, results, stepped
from tests.support.linear_oracle import assert_same, make, spiky
from tests.support.steps import assert_state, compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")
DIFFERENT = [
    ("bf16", 48, 40), ("fp8-delayed", 40, 48), ("fp8-current", 32, 16), ("fp8-rowwise", 17, 64), ("fp8-block", 64, 17),
    ("mxfp8", 96, 33), ("nvfp4", 33, 32), ("fp8-current(pow2=True)", 5, 7), ("fp8-block(scale='fp32')", 7, 5),
    ("mxfp8(square_weights=True)", 48, 48), ("nvfp4(rht=False)", 31, 16), ("fp8-delayed(margin=1)", 16, 31),
]  # fmt: skip


def test_twelve_different_layers_compiled_one_by_one():
    """All layers of a class are one function to torch, and that takes eight sets of guards: docs/compile.md."""
    assert len({*DIFFERENT}) == 12 > torch._dynamo.config.recompile_limit
    isolates = "isolate_recompiles" in inspect.signature(torch.compile).parameters  # from torch 2.13 on
    options, kept = {"isolate_recompiles": True} if isolates else {}, []
    with torch._dynamo.config.patch({} if isolates else {"recompile_limit": 12}):
        for i, (recipe, k, n) in enumerate(DIFFERENT):
            layer, twin = pair(recipe, k, n)
            kept.append((layer, twin, compiled(layer, **options)))
            assert_step((layer, twin), (kept[-1][2], twin), batch(i, 9, k, n))
        assert graphs() == 12
        for i, (layer, twin, call) in enumerate(kept):  # and each still has its own graph
            assert_step((layer, twin), (call, twin), batch(20 + i, 9, layer.in_features, layer.out_features))
        assert graphs() == 12


def test_twelve_different_layers_in_one_compiled_model_are_one_graph():
    sizes = [48, 40, 32, 17, 64, 33, 5, 7, 16, 31, 48, 24, 40]
    model = nn.Sequential(*[make(r, k, n) for (r, _, _), k, n in zip(DIFFERENT, sizes[:-1], sizes[1:], strict=True)])
    twin = copy.deepcopy(model)
    assert_step((model, twin), (compiled(model), twin), batch(0, 9))
    assert graphs() == 1


def test_training_evaluating_and_training_with_every_recipe():
    model, twin = bank()
    call = compiled(model)
    for i, training in enumerate((True, False, True, False, True)):
        model.train(training)
        twin.train(training)
        if training:
            assert_step((model, twin), (call, twin), batches(i))
            stepped(model, twin)
        else:
            with torch.no_grad():
                assert_same(call(batches(i)[0]), twin(batches(i)[0]))
    assert_state(model, twin)
    assert 1 <= graphs() <= 3  # the same


@pytest.mark.parametrize(
    ("recipe", "other"),
    [
        ("fp8-current", "fp8-current(grad_format=E4M3)"),
        ("fp8-block", "fp8-block(scale='fp32')"),
        ("mxfp8", "fp8-current"),
        ("fp8-delayed", "fp8-block"),
    ],
)
def test_a_recipe_changed_while_training_recompiles_once_and_takes_effect(recipe, other):
    layer, twin = pair(recipe)
    call = compiled(layer)
    for i, (name, want) in enumerate([(recipe, 1), (other, 2), (other, 2), (recipe, 2), (other, 2)]):
        layer.recipe = twin.recipe = octavo.recipe(name)  # an equal value each time, a new object
        assert_step((layer, twin), (call, twin), batch(i))
        stepped(layer, twin)
        assert graphs() == want, f"step {i}, {name}"
    layers = make(recipe), make(other)
    first, second = (results(m, m, *batch(9)) for m in layers)
    assert any(not torch.equal(first[name], second[name]) for name in first), "the two recipes give the same here"


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({"delay_wgrad_compute": True}, {}),
        ({"fuse_wgrad_accumulation": True}, {}),
        ({}, {"is_first_microbatch": True}),
    ],
    ids=["delay", "main_grad", "cache"],
)
def test_equal_layers_compiled_one_by_one_share_a_graph(settings, arguments):
    for i in range(12):
        layer = make("fp8-current", seed=i, **settings)
        layer.weight.main_grad = torch.zeros(40, 48)
        layer(spiky(24, 48), **arguments)  # a cache that is there already
        compiled(layer)(spiky(24, 48), **arguments)
    assert counters["stats"]["unique_graphs"] == 1
