"""Delayed scaling of experts of which some have had no rows yet: they keep nothing from fusing."""

import torch

import octavo
from octavo import ops
from tests.support.cold_starts import SPLITS, G, K, M, N, batch, cold, error, experts, results
from tests.support.linear_oracle import assert_same, spiky
from tests.support.steps import assert_equal


def expert_mlp(**settings):
    """Experts whose runs fuse, but for the first step."""
    first, second = (octavo.GroupedLinear(G, k, n, bias=False, recipe="fp8-delayed") for k, n in ((K, 2 * N), (N, K)))
    for seed, layer in enumerate((first, second)):
        with torch.no_grad():
            layer.weight.copy_(spiky(*layer.weight.shape, seed=seed) * 0.1)
    return octavo.Sequential(first, ops.ScaledSwiGLU(), second, **settings)


def train_experts(model, sizes, seed):
    x, scales = spiky(M, K, seed=seed), spiky(M, seed=seed + 1).abs()
    found = results(model, x, 1e-5 * spiky(M, K, seed=seed + 2), sizes, scales, sizes)
    octavo.step(model)
    return found


def test_an_expert_without_rows_does_not_keep_the_others_from_fusing():
    """For good, or until rows come, at step 5 here: the results are those of layers that do not fuse."""
    fused, unfused = expert_mlp(), expert_mlp(rules=None)
    some, all_experts = torch.tensor([16, 0, 8]), SPLITS
    for step in range(8):
        sizes = some if step < 5 else all_experts
        given = sizes, torch.ones(M), sizes
        fired = fused.explain(spiky(M, K, seed=step).requires_grad_(), *given).fired
        assert ("grouped-mlp" in fired) == (step > 0), (step, fired)
        assert_equal(train_experts(fused, sizes, step), train_experts(unfused, sizes, step))
    for name, state in octavo.state_dict(fused).items():
        assert_same(state, octavo.state_dict(unfused)[name])


def test_an_expert_with_its_first_rows_takes_the_smallest_multiplier_of_the_others():
    """In a graph and after a checkpoint, too. The file has the multiplier of 1 that the expert has of its own."""
    torch._dynamo.reset()
    layer, in_graph, (x, dy) = experts("fp8-delayed"), experts("fp8-delayed"), batch(0, 1e-4)
    graph_step = torch.compile(lambda: octavo.step(in_graph), backend="aot_eager", fullgraph=True)
    for subject, step in ((layer, lambda: octavo.step(layer)), (in_graph, graph_step)):
        results(subject, x, dy, torch.tensor([16, 0, 8]))
        step()
    state = octavo.state_dict(layer)
    own = state["scaling.forward.encode"].view(2, G)[0]
    assert cold(layer) == [""] and own[1] == 1 and own[0] > 1e4
    resumed = experts("fp8-delayed")
    octavo.load_state_dict(resumed, state)
    assert cold(resumed) == [""]
    for subject in (layer, resumed, in_graph):
        used = subject._scaling.of_call(subject)[0][0]
        assert_same(used, torch.stack([own[0], torch.minimum(own[0], own[2]), own[2]]))
    x, dy = batch(1, 1e-5)
    found = [results(subject, x, dy, torch.tensor([0, M, 0])) for subject in (layer, resumed, in_graph)]
    assert error(found[0][0], x @ layer.weight[1].T + layer.bias[1]) < 0.05
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])


def test_experts_keep_a_multiplier_of_one_if_the_recipe_starts_with_one():
    layer, (x, dy) = experts("fp8-delayed(cold_start='one')"), batch(0, 1e-4)
    results(layer, x, dy, torch.tensor([16, 0, 8]))
    octavo.step(layer)
    assert layer._scaling.of_call(layer)[0][0][1] == 1
