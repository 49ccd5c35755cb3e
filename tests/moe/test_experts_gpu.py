"""octavo.moe.Experts and the fused grouped MLP on a GPU: bits of the operations, graphs that follow the routing."""

from collections import Counter

import pytest
import torch

import octavo
from octavo import moe, ops
from tests.support.cuda_work import kernels_of
from tests.support.linear_oracle import assert_same
from tests.support.routed_experts import step
from tests.support.sequentials import recipes
from tests.support.state_tensors import named_state
from tests.support.steps import relative_error
from tests.support.waiting import no_waiting

pytestmark = pytest.mark.gpu
E, D, N, T, K = 8, 256, 384, 300, 2
RECIPES = ["fp8-delayed", "fp8-current", "fp8-block", "fp8-rowwise", "mxfp8", "nvfp4"]
STORAGES = ["unquantized", "fp8"]
NEAR = {**dict.fromkeys(RECIPES, 0.1), "fp8-current": 0.15, "fp8-delayed": 0.35, "nvfp4": 0.6}


def experts(recipe, rules=(), **settings):
    torch.manual_seed(0)
    model = moe.Experts(E, D, N, recipe=recipe, device="cuda", dtype=torch.bfloat16, **settings)
    for name, buffer in named_state(model):
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
            assert relative_error(a, b) < NEAR[recipe.split("(")[0]], f"routing {seed}: {relative_error(a, b):.3g}"


@pytest.mark.gpu_smoke
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
            assert relative_error(a, b) < (0.15 if "nvfp4" in recipe else 0.1), (
                f"routing {seed}: {relative_error(a, b):.3g}"
            )
        assert relative_error(found[2], want[2]) > 1e-3


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


@pytest.mark.usefixtures("fresh_compiler")
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


# -- the fused grouped MLP, in the caller's memory ---------------------------------------------------------------------


ROWS = T * K + 100  # a hundred of them are no expert's, or more
SCALED = {"swiglu": ops.ScaledSwiGLU, "srelu": ops.ScaledSReLU}


def mlp(recipe, rules=(), *, make=ops.ScaledSwiGLU, groups=E, dtype=torch.bfloat16, **settings):
    torch.manual_seed(0)
    act = make()
    common = {"bias": False, "recipe": recipe, "device": "cuda", "dtype": dtype, **settings}
    model = octavo.Sequential(
        octavo.GroupedLinear(groups, D, N if isinstance(act, ops.SReLU) else 2 * N, **common), act,
        octavo.GroupedLinear(groups, N, D, **common), rules=rules,
    )  # fmt: skip
    for name, buffer in named_state(model):
        if name.endswith("rounding_seed"):
            buffer.copy_(torch.tensor([7, 0]))
    return model


def packed(seed, groups=E, dtype=torch.bfloat16):
    """x, sizes, probabilities and dy of rows by expert. A part of the tokens is dropped, so that the number of rows in
    use changes; the rows after them hold NaN."""
    generator = torch.Generator().manual_seed(seed + 200)
    x, dy = (torch.randn(ROWS, D, generator=generator) for _ in range(2))
    probs, index = torch.rand(ROWS, generator=generator) + 0.1, routed(seed)[0].cpu()
    index[: 37 * seed % (T + 1)] = -1
    sizes = moe.sort(index if groups == E else index.clamp_max(0), groups).sizes
    for t in (x, dy, probs):
        t[int(sizes.sum()) :] = float("nan")
    return x.to("cuda", dtype), sizes.cuda(), probs.cuda(), dy.to("cuda", dtype)


def mlp_step(model, x, sizes, probs, dy, **given):
    """y and gradients; x is no leaf, of whose gradient torch may make a copy."""
    model.zero_grad()
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    y = model(x * 1, sizes, probs, sizes, **given)
    y.backward(dy)
    return [y.detach(), x.grad, probs.grad, *(p.grad for p in model.parameters())]


def memory(dtype=torch.bfloat16):
    """Rows for y or dx in the middle of an allocation, and the allocation."""
    room = torch.full((ROWS + 24, D), 7.0, device="cuda", dtype=dtype)
    return room[8 : 8 + ROWS], room


def assert_holds(room, want, used, value, what):
    """The rows in use, and nothing else, were written."""
    assert_same(room[8 : 8 + used], want[:used], what)
    around = torch.cat((room[:8], room[8 + used :]))
    assert_same(around, torch.full_like(around, value), f"around {what}")


def in_memory(out, dgrad):
    return {"op_kwargs": {2: {"out": out}, 0: {"dgrad_out": dgrad}}}


def assert_near(found, want):
    """Sums of one row, added in another order."""
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3 * want.abs().max().item())


@recipes(RECIPES)
@pytest.mark.parametrize("activation", SCALED)
@pytest.mark.parametrize(("groups", "dtype"), [(E, torch.bfloat16), (1, torch.float16)], ids=["eight", "one, float16"])
def test_a_grouped_mlp_has_the_bits_of_its_layers(recipe, activation, groups, dtype):
    settings = {"make": SCALED[activation], "groups": groups, "dtype": dtype}
    model, twin = mlp(recipe, **settings), mlp(recipe, rules=None, **settings)
    for seed in range(4):
        x, sizes, probs, dy = packed(seed, groups, dtype)
        leaves = x.clone().requires_grad_(), sizes, probs.clone().requires_grad_(), sizes
        assert model.explain(*leaves).fired == ("grouped-mlp",)
        found, want, used = mlp_step(model, x, sizes, probs, dy), mlp_step(twin, x, sizes, probs, dy), int(sizes.sum())
        for i, (a, b) in enumerate(zip(found, want, strict=True)):
            assert a.isfinite().all(), f"step {seed}, {i}"
            if i == 2:
                assert_near(a, b)
                assert not a[used:].any()
            else:
                assert_same(a, b, f"step {seed}, {i}")


@recipes(RECIPES)
def test_a_captured_grouped_mlp_writes_to_the_callers_memory_in_fifty_replays(recipe):
    """Sizes, the number of rows in use and the contents of the memory change in place; tails hold NaN."""
    model, twin = mlp(recipe), mlp(recipe)
    x, sizes, probs, dy = packed(0)
    x, probs = x.requires_grad_(), probs.requires_grad_()
    (out, out_room), (dgrad, dgrad_room) = memory(), memory()
    given = in_memory(out, dgrad)
    assert model.explain(x, sizes, probs, sizes, **given).fired == ("grouped-mlp",)

    def run():
        y = model(x, sizes, probs, sizes, **given)
        assert y.data_ptr() == out.data_ptr()
        return torch.autograd.grad(y, [x, probs, *model.parameters()], dy)

    state = {key: value.clone() for key, value in octavo.state_dict(model).items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    octavo.load_state_dict(model, state)
    for seed in range(50):
        data, value = packed(seed), 7.0 if seed % 2 else float("nan")
        with torch.no_grad():
            for into, new in zip((x, sizes, probs, dy), data, strict=True):
                into.copy_(new)
            out_room.fill_(value), dgrad_room.fill_(value)
        graph.replay()
        want, used = mlp_step(twin, *data), int(data[1].sum())
        assert_holds(out_room, want[0], used, value, f"y, replay {seed}")
        assert_holds(dgrad_room, want[1], used, value, f"dx, replay {seed}")
        for i, (a, b) in enumerate(zip(made[1:], want[2:], strict=True)):
            assert_same(a, b, f"replay {seed}, {i}")
            assert a.isfinite().all()


def launches(step):
    """How often each kernel and copy ran, by name, but for fills: a replay fills all its zeros at once, and calls with
    the caller's memory are not replayed."""
    return Counter(name for name in kernels_of(step, warm=False) if "FillFunctor" not in name)


@recipes(RECIPES)
def test_memory_costs_a_grouped_mlp_no_launch_and_no_copy(recipe):
    model, data = mlp(recipe), packed(0)
    (out, _), (dgrad, _) = memory(), memory()
    ways = ({}, {"op_kwargs": {2: {"out": out}}}, {"op_kwargs": {0: {"dgrad_out": dgrad}}}, in_memory(out, dgrad))
    for given in ways:
        for _ in range(3):
            mlp_step(model, *data, **given)
    plain, *with_memory = [launches(lambda given=given: mlp_step(model, *data, **given)) for given in ways]
    assert plain.total() > 0
    for given, found in zip(ways[1:], with_memory, strict=True):
        assert found.total() <= plain.total(), f"{list(given['op_kwargs'])}: {found - plain}"
        copies = [name for name in found - plain if "copy" in name.lower() or "memcpy" in name.lower()]
        assert not copies, f"{list(given['op_kwargs'])}: {copies}"


@recipes(["fp8-delayed", "fp8-block", "nvfp4"])
def test_memory_is_checked_and_written_without_waiting(recipe):
    model, data = mlp(recipe), packed(0)
    (out, _), (dgrad, _) = memory(), memory()
    x, sizes, probs, _ = data
    leaf = x.clone().requires_grad_()
    mlp_step(model, *data, **in_memory(out, dgrad))
    turned = torch.empty(D, ROWS, device="cuda", dtype=out.dtype).T
    wrong = (
        out[:-1], out[:, :-1], out.half(), out.view(-1), turned, torch.empty(ROWS, D, dtype=out.dtype),
        out.clone().requires_grad_(),
    )  # fmt: skip
    with no_waiting():
        mlp_step(model, *data, **in_memory(out, dgrad))
        for buffer in wrong:
            for given in (in_memory(buffer, dgrad), in_memory(out, buffer)):
                with pytest.raises(ValueError, match="must be"):
                    model(leaf, sizes, probs, sizes, **given)


@recipes(["fp8-delayed", "fp8-block"])
def test_a_captured_grouped_mlp_adds_to_main_grad(recipe):
    """With the caller's memory, and replays that find main_grad as the replay before left it."""
    model, twin = (mlp(recipe, fuse_wgrad_accumulation=True) for _ in range(2))
    for each in (model, twin):
        for p in each.parameters():
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    x, sizes, probs, dy = packed(0)
    x, probs = x.requires_grad_(), probs.requires_grad_()
    (out, _), (dgrad, _) = memory(), memory()

    def run():
        model(x, sizes, probs, sizes, **in_memory(out, dgrad)).backward(dy)
        x.grad = probs.grad = None

    state = {key: value.clone() for key, value in octavo.state_dict(model).items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    octavo.load_state_dict(model, state)
    for p in model.parameters():
        p.main_grad.zero_()
    for seed in range(8):
        data = packed(seed)
        with torch.no_grad():
            for into, new in zip((x, sizes, probs, dy), data, strict=True):
                into.copy_(new)
        graph.replay()
        mlp_step(twin, *data)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert_same(p.main_grad, q.main_grad, f"replay {seed}")


# -- experts: odd inputs -----------------------------------------------------------------------------------------------


@recipes(["fp8-delayed", "fp8-current", "fp8-block"])
def test_dropped_slots_are_read_nowhere(recipe):
    """x and dy of a token without an expert, and the probability of a dropped assignment, hold NaN."""
    model, twin = warmed(experts(recipe)), warmed(experts(recipe))
    x, indices, probs, dy = batch(0)
    indices[::7], indices[3, 0] = -1, E
    clean = step(twin, x, indices, probs, dy)
    gone = (indices < 0) | (indices >= E)
    x[::7] = dy[::7] = float("nan")
    found = step(model, x, indices, probs.masked_fill(gone, float("nan")), dy)
    for i, (a, b) in enumerate(zip(found, clean, strict=True)):
        assert_same(a, b, f"{i}")
        assert a.isfinite().all()


@recipes(["fp8-delayed", "fp8-block"])
@pytest.mark.parametrize("case", ["no tokens", "all dropped", "one assignment"])
def test_routings_of_next_to_nothing(recipe, case):
    model, twin = warmed(experts(recipe)), warmed(experts(recipe, rules=None))
    x, indices, probs, dy = batch(0)
    if case == "no tokens":
        x, indices, probs, dy = (t[:0] for t in (x, indices, probs, dy))
    elif case == "all dropped":
        indices = torch.full_like(indices, -1)
    else:
        indices, probs = indices[:, :1], probs[:, :1]
    found, want = step(model, x, indices, probs, dy), step(twin, x, indices, probs, dy)
    assert_same(found[0], want[0])
    for a, b in zip(found, want, strict=True):
        assert a.shape == b.shape and a.isfinite().all()
        assert b.any() == a.any()
