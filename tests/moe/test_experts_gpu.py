"""octavo.moe.Experts and the fused grouped MLP on a GPU: bits of the operations, graphs that follow the routing."""

import pytest
import torch

import octavo
from octavo import moe
from tests.fuser.models import error, recipes
from tests.modules.oracle import assert_same

pytestmark = pytest.mark.gpu
E, D, N, T, K = 8, 256, 384, 300, 2
RECIPES = ["fp8-delayed", "fp8-current", "fp8-block", "fp8-rowwise", "mxfp8", "nvfp4"]
STORAGES = ["unquantized", "fp8"]
NEAR = {**dict.fromkeys(RECIPES, 0.1), "fp8-current": 0.15, "fp8-delayed": 0.35, "nvfp4": 0.6}


def experts(recipe, rules=(), **settings):
    torch.manual_seed(0)
    model = moe.Experts(E, D, N, recipe=recipe, device="cuda", dtype=torch.bfloat16, **settings)
    for name, buffer in model.named_buffers():
        if name.endswith("rounding_seed"):
            buffer.copy_(torch.tensor([7, 0]))
    if rules is None:
        model.rules = None
    return model


def routed(seed):
    """Indices of one routing after the other: even, an expert without tokens, all tokens to one, skewed."""
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(seed)).cuda()
    if seed % 4 == 1:
        logits[:, 3] = -100.0
    if seed % 4 == 2:
        logits[:, 5] = 100.0
    if seed % 4 == 3:
        logits += torch.arange(E, device="cuda")
    probs, indices = logits.softmax(-1).topk(K)
    return indices, probs


def batch(seed):
    generator = torch.Generator().manual_seed(seed + 100)
    x, dy = (torch.randn(T, D, generator=generator).cuda().bfloat16() for _ in range(2))
    return x, *routed(seed), dy


def step(model, x, indices, probs, dy, call=None):
    model.zero_grad()
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    y = (model if call is None else call)(x, indices, probs)
    y.backward(dy)
    return [y.detach().clone(), x.grad, probs.grad, *(p.grad for p in model.parameters())]


def warmed(model):
    """Delayed scales that have seen every expert."""
    for seed in (0, 4):
        step(model, *batch(seed))
        octavo.step(model)
    return model


@recipes(RECIPES)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_fused_y_has_the_bits_of_the_operations_and_gradients_are_near(recipe, activation):
    model, twin = experts(recipe, activation=activation), experts(recipe, rules=None, activation=activation)
    for seed in range(4):
        data = batch(seed)
        found, want = step(model, *data), step(twin, *data)
        assert_same(found[0], want[0], f"y, routing {seed}")
        for a, b in zip(found, want, strict=True):
            assert a.isfinite().all()
            assert error(a, b) < NEAR[recipe.split("(")[0]], f"routing {seed}: {error(a, b):.3g}"


@recipes(["fp8-delayed", "fp8-block", "nvfp4"])
def test_two_runs_have_the_same_bits(recipe):
    first, second = (step(experts(recipe), *batch(3)) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_same(a, b)


@recipes(RECIPES)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_codes_of_the_output_of_fc1_leave_y_as_it_is_and_gradients_near(recipe, activation):
    model, twin = (experts(recipe, activation=activation, fc1_output_storage=storage) for storage in STORAGES[::-1])
    for seed in range(4):
        data = batch(seed)
        found, want = step(model, *data), step(twin, *data)
        assert_same(found[0], want[0], f"y, routing {seed}")
        for a, b in zip(found, want, strict=True):
            assert a.isfinite().all()
            assert error(a, b) < (0.15 if "nvfp4" in recipe else 0.1), f"routing {seed}: {error(a, b):.3g}"
        assert error(found[2], want[2]) > 1e-3


@recipes(["fp8-delayed", "fp8-current", "fp8-block", "nvfp4"])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_captured_step_follows_fifty_routings(recipe, storage):
    """The graph's own memory holds what earlier replays left there; the routing changes in place."""
    model, twin = (warmed(experts(recipe, fc1_output_storage=storage)) for _ in range(2))
    x, indices, probs, dy = batch(0)
    x, probs = x.requires_grad_(), probs.requires_grad_()

    def run():
        y = model(x, indices, probs)
        grads = torch.autograd.grad(y, [x, probs, *model.parameters()], dy)
        return [y, *grads]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    state, want_state = octavo.state_dict(model), octavo.state_dict(twin)
    assert state.keys() == want_state.keys()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    octavo.load_state_dict(model, want_state)
    for seed in range(50):
        data = batch(seed)
        with torch.no_grad():
            for into, new in zip((x, indices, probs, dy), data, strict=True):
                into.copy_(new)
        graph.replay()
        want = step(twin, *data)
        for i, (a, b) in enumerate(zip(made, want, strict=True)):
            assert_same(a.detach(), b, f"replay {seed}, {i}")


@recipes(["fp8-delayed", "fp8-block"])
@pytest.mark.parametrize("storage", STORAGES)
def test_no_value_is_read_on_the_host(recipe, storage):
    model, data = warmed(experts(recipe, fc1_output_storage=storage)), batch(1)
    want = step(model, *data)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step(model, *data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(found[0], want[0])


@recipes(["fp8-delayed", "fp8-block"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("storage", STORAGES)
def test_compiled_has_the_bits_of_eager(recipe, mode, storage):
    model, twin = (warmed(experts(recipe, fc1_output_storage=storage)) for _ in range(2))
    call = torch.compile(lambda *data: model(*data), fullgraph=True, mode=mode)
    for seed in range(4):
        data = batch(seed)
        torch.compiler.cudagraph_mark_step_begin()
        found = step(model, *data, call=call)
        for i, (a, b) in enumerate(zip(found, step(twin, *data), strict=True)):
            assert_same(a, b, f"step {seed}, {i}")


@recipes(["fp8-delayed", "fp8-block"])
def test_rows_are_not_moved_on_their_own(recipe):
    """No copy of x or dy in the order of the experts is made: only casts read their rows."""
    model, data = warmed(experts(recipe)), batch(0)
    step(model, *data)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(model, *data)
        torch.cuda.synchronize()
    names = [e.key for e in profile.key_averages()]
    assert any("combine" in name for name in names)
    assert not any("scatter" in name for name in names), names
