"""GroupedLinear: each group as if it were alone, sizes that stay on the device, a tail that nobody reads."""

import copy
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode

import octavo
from octavo.errors import UnsupportedDtype, UnsupportedShape
from octavo.kernels import grouped_gemm
from tests.support.experts import Alone, assert_steps, batch, step
from tests.support.experts import experts as experts_of
from tests.support.linear_oracle import assert_same, spiky
from tests.support.waiting import no_waiting

RECIPES = ("bf16", "fp8-block", "fp8-block(scale='fp32')")
SPLITS = ((65, 128, 0, 97), (0, 1, 2, 300), (15, 1, 1011, 0), (0, 0, 0, 0), (128, 128, 128, 128))
every = pytest.mark.parametrize("recipe", RECIPES)


experts = partial(experts_of, groups=4)


@every
@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_group_is_a_linear_of_its_own(recipe, splits, dtype):
    model, (x, dy) = experts(recipe, dtype=dtype), batch(splits, dtype=dtype)
    assert_steps(step(model, x, dy, splits), Alone(model, recipe).step(x, dy, splits))


@every
def test_compiled_is_eager_bit_for_bit_in_one_graph(recipe):
    torch._dynamo.reset()
    counters.clear()
    model = experts(recipe)
    twin = copy.deepcopy(model)
    call = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for i, splits in enumerate(((30, 0, 12, 5), (1, 2, 3, 4), (200, 100, 0, 0))):
        x, dy = batch(splits, spare=5 + i, seed=i)
        assert_steps(step(model, x, dy, splits, call=call), step(twin, x, dy, splits))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("splits", [[1, 3], torch.tensor([1, 3], device="meta")], ids=["list", "elsewhere"])
def test_a_graph_takes_sizes_on_the_device_of_x(splits):
    call = torch.compile(experts_of("bf16", groups=2), fullgraph=True, backend="aot_eager")
    what = "a list" if isinstance(splits, list) else "a tensor elsewhere"
    with pytest.raises(Exception, match=rf"on the device of x, cpu: a graph would keep the first sizes of {what}"):
        call(batch((1, 3))[0], splits)


@pytest.mark.parametrize(
    ("recipe", "fprop", "dgrad"),
    [
        ("fp8-delayed", "fast", "precise"),
        ("fp8-current", "fast", "precise"),
        ("fp8-rowwise", "fast", "precise"),
        ("fp8-block", "precise", "precise"),
        ("mxfp8", "precise", "precise"),
        (octavo.recipes.Current(fast=()), "precise", "precise"),
        (octavo.recipes.Rowwise(fast=("dgrad",)), "precise", "fast"),
    ],
    ids=str,
)
def test_sums_accumulate_as_the_recipe_says(recipe, fprop, dgrad, monkeypatch):
    seen, rows = {}, grouped_gemm.rows

    def recording(*operands, along="rows", accumulation="precise", **settings):
        seen[along] = accumulation
        return rows(*operands, along=along, accumulation=accumulation, **settings)

    monkeypatch.setattr(grouped_gemm, "rows", recording)
    model, splits = experts(recipe), (30, 0, 12, 5)
    step(model, *batch(splits), splits)
    assert seen == {"rows": fprop, "columns": dgrad}


@every
@pytest.mark.parametrize("how", ["add", "overwrite"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_dw_is_added_to_main_grad_or_overwrites_it(recipe, how, compiled):
    torch._dynamo.reset()
    model = experts(recipe, fuse_wgrad_accumulation=True)
    plain = experts(recipe)
    splits = (30, 0, 12, 5)
    x, dy = batch(splits)
    want = step(plain, x, dy, splits)["dw"]
    model.weight.main_grad = torch.full((4, 40, 48), 0.5 if how == "add" else float("nan"))
    model.weight.overwrite_main_grad = how == "overwrite"
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    call(x, torch.tensor(splits)).backward(dy)
    assert model.weight.grad is None
    assert_same(model.weight.main_grad, want + 0.5 if how == "add" else want)


@every
@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_frozen_parts_get_no_gradient(recipe, frozen):
    splits = torch.tensor((30, 0, 12, 5))
    model, twin = experts(recipe), experts(recipe)
    x, dy = batch(splits.tolist())
    want = step(twin, x, dy, splits)
    if frozen != "x":
        getattr(model, frozen).requires_grad_(False)
    leaf = x.clone().requires_grad_(frozen != "x")
    model(leaf, splits).backward(dy)
    for name, gradient in (("x", leaf.grad), ("weight", model.weight.grad), ("bias", model.bias.grad)):
        assert (gradient is None) == (name == frozen)
        if gradient is not None:
            assert_same(gradient, want[{"x": "dx", "weight": "dw", "bias": "db"}[name]], name)


def test_a_mode_that_watches_changes_nothing():
    """A list of sizes, a caller's buffer, a main_grad that comes after forward; and what is plain is seen."""
    model, twin = experts("fp8-block", fuse_wgrad_accumulation=True), experts("fp8-block")
    x, dy = batch((10, 20, 0, 9))
    want = step(twin, x, dy, torch.tensor((10, 20, 0, 9)))
    with FlopCounterMode(display=False):
        y = model(x, [10, 20, 0, 9], out=torch.zeros(len(x), 40))
        model.weight.main_grad = torch.zeros(4, 40, 48)
        y.backward(dy)
    with FlopCounterMode(display=False) as counter:
        twin(x, [10, 20, 0, 9])
    assert counter.get_total_flops() == 2 * len(x) * 40 * 48
    assert_same(y.detach()[:39], want["y"][:39])
    assert_same(model.weight.main_grad, want["dw"])


def test_a_checkpoint_loads_strictly_and_a_meta_layer_materialises():
    model = experts("fp8-block")
    other = octavo.GroupedLinear(4, 48, 40, recipe="fp8-block", device="meta").to_empty(device="cpu")
    other.load_state_dict(model.state_dict())
    x, _ = batch((10, 20, 0, 9))
    assert_same(other(x, [10, 20, 0, 9]), model(x, [10, 20, 0, 9]))


def test_what_is_refused_is_said():
    model, x = experts("fp8-block"), batch((10, 20, 0, 9))[0]
    with pytest.raises(UnsupportedShape, match="one size for each of the 4 groups"):
        model(x, [1, 2, 3])
    with pytest.raises(UnsupportedShape, match=r"\[\.\.\., 48\]"):
        model(x[:, :47], [10, 20, 0, 9])
    with pytest.raises(UnsupportedDtype, match="int32 or int64"):
        model(x, torch.tensor([1.0, 2, 3, 4]))


def test_backward_saves_codes_of_columns():
    """One byte for each element of x, rounded up to blocks, and of w; nothing of their size in bf16."""
    model = experts("fp8-block", groups=2, k=256, n=128, dtype=torch.bfloat16)
    saved = []
    x = spiky(200, 256, dtype=torch.bfloat16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(x, [100, 100])
    big = sorted(t.numel() * t.element_size() for t in saved if t is not model.weight and t.numel() > 4096)
    assert big == [256 * 2 * 128, 256 * 3 * 128]  # w: 2 experts of 128; x: room for three blocks of 128


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def on_gpu(recipe, splits, spare=30, k=256, n=384):
    model = experts(recipe, groups=len(splits), k=k, n=n, dtype=torch.bfloat16).cuda()
    x, dy = (t.cuda() for t in batch(splits, spare, k=k, n=n, dtype=torch.bfloat16))
    return model, x, dy


def magnitudes(model, x, dy, splits):
    """What each result would be if nothing cancelled."""
    x, dy, w = (t.detach().double().abs() for t in (x, dy, model.weight))
    found = {"y": torch.zeros_like(dy), "dx": torch.zeros_like(x), "dw": torch.zeros_like(w)}
    first = 0
    for g, size in enumerate(splits):
        rows = slice(first, first + size)
        found["y"][rows], found["dx"][rows] = x[rows] @ w[g].T, dy[rows] @ w[g]
        found["dw"][g] = dy[rows].T @ x[rows]
        first += size
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [*SPLITS, (700, 0, 900, 500, 3)], ids=str)
def test_a_gpu_agrees_with_the_reference(splits):
    model, x, dy = on_gpu("fp8-block", splits)
    sizes = torch.tensor(splits, device="cuda")
    found = step(model, x, dy, sizes)
    with octavo.backend.use("reference"):
        want = step(model, x, dy, sizes)
    for name, bound in magnitudes(model, x, dy, splits).items():
        error = (found[name].double() - want[name].double()).abs()
        assert (error <= 1e-3 * bound + 2**-7 * want[name].double().abs()).all(), name
    assert not found["y"][sum(splits) :].any()
    assert not found["dx"][sum(splits) :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "fp8-block"])
def test_a_step_is_the_same_every_time_and_reads_nothing_back(recipe):
    splits = (700, 0, 900, 500, 3)
    model, x, dy = on_gpu(recipe, splits)
    sizes = torch.tensor(splits, device="cuda")
    want = step(model, x, dy, sizes)
    with no_waiting():
        runs = [step(model, x, dy, sizes) for _ in range(20)]
    for run in runs:
        assert_steps(run, want)


@pytest.mark.gpu
@pytest.mark.gpu_smoke
@pytest.mark.parametrize("recipe", ["bf16", "fp8-block"])
def test_a_captured_step_follows_sizes_that_change(recipe):
    first = (700, 0, 900, 500, 3)
    model, x, dy = on_gpu(recipe, first)
    sizes, leaf = torch.tensor(first, device="cuda"), x.clone().requires_grad_()

    def run():
        leaf.grad = None
        model.zero_grad()
        y = model(leaf, sizes)
        y.backward(dy)
        return y

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    gradients = leaf.grad, model.weight.grad, model.bias.grad
    for splits in (first, (3, 500, 900, 0, 700), (0, 0, 2103, 0, 0), (0,) * 5, (1, 1, 1, 1, 1), (2000, 0, 0, 0, 103)):
        new_x, new_dy = (
            t.cuda() for t in batch(splits, len(x) - sum(splits), k=256, n=384, seed=3, dtype=torch.bfloat16)
        )
        sizes.copy_(torch.tensor(splits))
        leaf.data.copy_(new_x)
        dy.copy_(new_dy)
        for _ in range(3):
            graph.replay()
        found = dict(zip(("y", "dx", "dw", "db"), [t.clone() for t in (y, *gradients)], strict=True))
        twin = copy.deepcopy(model)
        assert_steps(found, step(twin, new_x, new_dy, torch.tensor(splits, device="cuda")))


@pytest.mark.gpu
@pytest.mark.gpu_smoke
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8-block"])
def test_compiled_on_a_gpu(recipe, mode):
    torch._dynamo.reset()
    counters.clear()
    model, _, _ = on_gpu(recipe, (700, 0, 900, 500, 3))
    twin = copy.deepcopy(model)
    call = torch.compile(model, fullgraph=True, mode=mode)
    sizes = torch.zeros(5, dtype=torch.int32, device="cuda")
    for i, splits in enumerate(((700, 0, 900, 500, 3), (3, 500, 900, 0, 700), (0, 0, 2103, 0, 0), (1, 1, 1, 1, 1))):
        x, dy = (t.cuda() for t in batch(splits, 2133 - sum(splits), k=256, n=384, seed=i, dtype=torch.bfloat16))
        sizes.copy_(torch.tensor(splits))
        want = step(twin, x, dy, sizes)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        leaf = x.clone().requires_grad_()
        y = call(leaf, sizes)
        out = y.detach().clone()
        y.backward(dy)
        assert_steps({"y": out, "dx": leaf.grad, "dw": model.weight.grad, "db": model.bias.grad}, want)
    assert counters["inductor"]["cudagraph_skips"] == 0
