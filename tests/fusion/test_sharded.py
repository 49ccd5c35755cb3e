"""Parameters that somebody else makes for each call: FSDP in two processes, and torch's parametrizations. What comes
out is what the same model gives with parameters of its own, bit for bit, and it fuses as that does."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize

import octavo
from octavo import ops
from octavo.errors import UnsupportedConfig
from tests.support.linear_oracle import assert_same, randn, spiky
from tests.support.sequentials import H, M, batch, every, fill, mlp, residual

RECIPES = ("bf16", "fp8-delayed", "fp8-block", "nvfp4")
SPLITS = torch.tensor([10, 0, M - 10])


def blocks(kind, recipe):
    """Two blocks, and what each takes besides x."""
    if kind == "experts":
        layers = [fill(octavo.Sequential(octavo.GroupedLinear(3, H, H, recipe=recipe)), seed) for seed in (1, 5)]
        return nn.ModuleList(layers), (SPLITS,)
    made = [fill(octavo.LayerNormMLP(H, 48, activation="swiglu", recipe=recipe), 1), residual(recipe)]
    return nn.ModuleList(made), ()


def through(model, x, extra_inputs):
    for block in model:
        x = block(x, *extra_inputs)
    return x


def runs(y):
    """Octavo's nodes behind y."""
    seen, todo = set(), [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return sum(type(node).__name__ == "_RunBackward" for node in seen)


def sharded(model, mesh, *, compiled):
    for block in model:
        if compiled:
            block.compile(fullgraph=True, backend="aot_eager")
        fully_shard(block, mesh=mesh)
    return model


def train(kind, recipe, rank, *, compiled):
    """Three steps of a model whose parameters lie in two processes, and of one that is whole in each."""
    torch._dynamo.reset()
    plain, extra_inputs = blocks(kind, recipe)
    model = sharded(copy.deepcopy(plain), init_device_mesh("cpu", (2,)), compiled=compiled)
    pair = plain, model
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in pair]
    for step in range(3):
        x, dy = batch(seed=10 * step + rank)
        want, found = (through(m, x, extra_inputs) for m in pair)
        assert_same(found, want)
        assert compiled or runs(found) == runs(want) > 0
        want.backward(dy)
        found.backward(dy)
        for p, part in zip(plain.parameters(), model.parameters(), strict=True):
            dist.all_reduce(p.grad)
            p.grad /= 2
            assert_same(part.grad.full_tensor(), p.grad)
        for m, optimizer in zip(pair, optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            octavo.step(m)


def from_meta(rank):
    """Made without memory, sharded, and then filled."""
    with torch.device("meta"):
        model = nn.ModuleList([octavo.LayerNormMLP(H, 48, activation="swiglu", recipe="fp8-delayed")])
    sharded(model, init_device_mesh("cpu", (2,)), compiled=False)
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    x, dy = batch(seed=rank)
    through(model, x, ()).backward(dy)
    assert all(p.grad.full_tensor().isfinite().all() for p in model.parameters())


def converted_later(rank):
    """A model that is converted after it was sharded is the one that was converted before."""
    mesh = init_device_mesh("cpu", (2,))
    models = [nn.Sequential(nn.Linear(H, H), nn.Linear(H, H)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    octavo.convert(models[0], "fp8-current")
    for model in models:
        fully_shard(model, mesh=mesh)
    assert octavo.convert(models[1], "fp8-current").shares()["converted"].layers == 2
    x, dy = batch(seed=rank)
    want, found = (model(x) for model in models)
    assert_same(found, want)
    want.backward(dy)
    found.backward(dy)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert_same(q.grad.full_tensor(), p.grad.full_tensor())


def whole_weights(rank):
    """What needs all of a weight between calls says so."""
    layer = octavo.Linear(H, H, recipe="fp8-current", delay_wgrad_compute=True)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    x, dy = batch(seed=rank)
    layer(x, is_first_microbatch=True).backward(dy)
    for call in (layer.backward_dw, lambda: octavo.refresh_weights(layer), lambda: octavo.quantize_weights(layer)):
        with pytest.raises(UnsupportedConfig, match="holds a shard of it"):
            call()


def _process(rank, store, recipes):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for compiled in (False, True):
        for recipe in recipes:
            train("dense", recipe, rank, compiled=compiled)
        train("experts", "fp8-delayed", rank, compiled=compiled)
    from_meta(rank)
    converted_later(rank)
    whole_weights(rank)
    dist.barrier()  # gloo aborts a process whose peer leaves while it still listens
    dist.destroy_process_group()


@pytest.mark.parametrize("recipes", [RECIPES[1:3], pytest.param(RECIPES, marks=pytest.mark.slow)], ids=["few", "all"])
def test_two_processes_that_hold_half_of_each_parameter(recipes, tmp_path):
    mp.spawn(_process, (str(tmp_path / "store"), recipes), nprocs=2)


class Scaled(nn.Module):
    """A parametrization that counts."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, w):
        self.calls += 1
        return 2 * w


@every
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_weight_that_is_made_of_another_parameter(recipe, compiled):
    """Twice a power of two is exact: y and dx are those of the doubled weight, its gradient is twice as large."""
    model = mlp(recipe, bias=True)
    want = copy.deepcopy(model)
    with torch.no_grad():
        want[1].weight.mul_(2)
    scale = Scaled()
    parametrize.register_parametrization(model[1], "weight", scale)
    calls = scale.calls
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    for i in range(2):
        x, dy = batch(seed=i)
        xs = [x.clone().requires_grad_() for _ in range(2)]
        found, expected = call(xs[0]), want(xs[1])
        assert_same(found, expected)
        found.backward(dy)
        expected.backward(dy)
        assert_same(xs[0].grad, xs[1].grad)
    if not compiled:
        assert scale.calls == calls + 2, "once for each forward"
        assert runs(call(xs[0])) == runs(want(xs[1])) == 1
    assert_same(model[1].parametrizations.weight.original.grad, 2 * want[1].weight.grad)
    assert_same(model[3].weight.grad, want[3].weight.grad)


def test_experts_that_are_made_of_another_parameter():
    layer = fill(octavo.GroupedLinear(3, H, H, recipe="fp8-block"))
    want = copy.deepcopy(layer)
    with torch.no_grad():
        want.weight.mul_(2)
    parametrize.register_parametrization(layer, "weight", Scaled())
    x, dy = spiky(M, H), randn(M, H, seed=3)
    found, expected = octavo.Sequential(layer)(x, SPLITS), want(x, SPLITS)
    found.backward(dy)
    expected.backward(dy)
    assert_same(found, expected)
    assert_same(layer.parametrizations.weight.original.grad, 2 * want.weight.grad)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", [octavo.Linear, octavo.GroupedLinear])
def test_a_weight_whose_making_has_a_memory(kind, compiled):
    """Spectral norm goes one step further each time that the weight is made: once for each forward, and not when a
    step ends."""
    given = (3, H, H) if kind is octavo.GroupedLinear else (H, H)
    layer, extra_inputs = fill(kind(*given, recipe="fp8-delayed")), (SPLITS,) if len(given) == 3 else ()
    plain = nn.Module()
    plain.weight = nn.Parameter(layer.weight.detach().clone())
    for module in (layer, plain):
        torch.manual_seed(4)
        nn.utils.parametrizations.spectral_norm(module, n_power_iterations=1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    for i in range(3):
        call(spiky(M, H, seed=i), *extra_inputs).sum().backward()
        optimizer.step()
        octavo.step(layer)
        assert plain.weight is not None
        assert_same(layer.parametrizations.weight[0]._u, plain.parametrizations.weight[0]._u)


def made(**settings):
    layer = fill(octavo.Linear(H, H, recipe="fp8-current", **settings))
    parametrize.register_parametrization(layer, "weight", Scaled())
    return layer


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("settings", "flags"),
    [({"delay_wgrad_compute": True}, {}), ({"fuse_wgrad_accumulation": True}, {}), ({}, {"is_first_microbatch": True})],
    ids=["delay", "main_grad", "cache"],
)
def test_what_needs_a_weight_that_stays_is_refused_for_one_that_is_made(settings, flags, compiled):
    layer = made(**settings)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    with pytest.raises(Exception, match="stays from call to call, and weight is made anew for each"):
        call(spiky(M, H), **flags)


def test_a_weight_that_is_made_is_not_held_as_codes():
    """And no other of the same model, before it is said."""
    model = nn.Sequential(octavo.Linear(H, H, recipe="fp8-current"), made())
    want = model(spiky(M, H))
    with pytest.raises(UnsupportedConfig, match="made anew"):
        octavo.quantize_weights(model)
    assert model[0].weight.stride() == (H, 1), "a weight that is held has no memory"
    assert_same(model(spiky(M, H)), want)


def test_a_parametrized_layer_is_not_left_behind_by_revert():
    model = nn.Sequential(made())
    with pytest.raises(UnsupportedConfig, match="0 has a parametrization"):
        octavo.revert(model)
    parametrize.remove_parametrizations(model[0], "weight")
    octavo.revert(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("bias", [True, False])
def test_a_report_does_not_call_a_parametrized_layer_uncompiled(bias):
    text = str(octavo.explain(made(bias=bias), spiky(M, H)))
    assert "not called" not in text
    assert bias or "made by a parametrization" in text


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a Sequential"])
def test_a_norms_weight_is_made_once_too(inside):
    norm, scale = ops.RMSNorm(H), Scaled()
    parametrize.register_parametrization(norm, "weight", scale)
    call = octavo.Sequential(norm, ops.GELU()) if inside else norm
    calls = scale.calls
    call(spiky(M, H))
    assert scale.calls == calls + 1


def microbatches(group, rank):
    model = nn.Sequential(octavo.Linear(H, H, recipe="fp8-block"))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    try:
        for i in range(2):
            with octavo.microbatch(first=i == 0):
                model(randn(M, H)).sum().backward()
    except UnsupportedConfig as error:
        return str(error)
    return ""


def test_a_cache_of_a_sharded_weight_names_the_sharding(ranks):
    for said in ranks.run(microbatches, size=2):
        assert "FSDP shards" in said and "leave octavo.microbatch" in said
