"""Sequentials in CUDA graphs: captured by hand, by torch.cuda.make_graphed_callables and by torch.compile, with sizes
of groups that change between replays, gradients that go to main_grad, and weight gradients that are deferred.

Capturing wants warm-up steps, and those move what a recipe remembers: it is saved before and loaded after. Tails of
grouped inputs hold NaN."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import octavo
from octavo import ops
from octavo.errors import UnsupportedConfig
from tests.support.cuda_work import captured
from tests.support.linear_oracle import spiky
from tests.support.sequentials import fill, recipes, unfused
from tests.support.steps import assert_equal, assert_state
from tests.support.waiting import no_waiting

pytestmark = pytest.mark.gpu

H, FFN, M, G = 256, 384, 512, 4
SPLITS = {
    "as captured": (100, 0, 300, 60),
    "permuted": (300, 60, 0, 100),
    "one emptied": (100, 0, 0, 60),
    "all on one, to the last row": (0, 0, 512, 0),
    "none": (0, 0, 0, 0),
    "multiples of nothing": (65, 129, 97, 15),
}
FIRST = SPLITS["as captured"]
NATIVE = ("bf16", "fp8-delayed", "fp8-current", "fp8-block")
dense = recipes([*NATIVE, "nvfp4"])
grouped = recipes(["bf16", "fp8-delayed", "fp8-current"])
fusing = pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])


# -- models ------------------------------------------------------------------------------------------------------------


def dense_model(recipe, **settings):
    """A residual around an MLP."""
    settings = {"bias": False, "recipe": recipe, "dtype": torch.bfloat16, **settings}
    model = octavo.Sequential(
        ops.MakeExtraOutput(channel="residual", output_to_caller=False),
        ops.RMSNorm(H, dtype=torch.bfloat16),
        octavo.Linear(H, 2 * FFN, **settings),
        ops.SwiGLU(),
        octavo.Linear(FFN, H, **settings),
        ops.AddExtraInput(source="residual"),
    )
    return fill(model.cuda())


def block_model(recipe, **settings):
    settings = {"bias": True, "recipe": recipe, "dtype": torch.bfloat16, **settings}
    return fill(octavo.LayerNormMLP(H, FFN, activation="situglu", **settings).cuda())


def grouped_model(recipe, **settings):
    """Experts, and a scale. Extra inputs: sizes, probabilities, sizes."""
    settings = {"recipe": recipe, "dtype": torch.bfloat16, **settings}
    model = octavo.Sequential(
        octavo.GroupedLinear(G, H, 2 * FFN, **settings),
        ops.ScaledSwiGLU(),
        octavo.GroupedLinear(G, FFN, H, **settings),
        ops.ConstantScale(0.5),
    )
    return fill(model.cuda())


def layers(model):
    return [op for op in model if isinstance(op, octavo.Linear | octavo.GroupedLinear)]


def give_buffers(model):
    for op in layers(model):
        op.fuse_wgrad_accumulation = True
        op.weight.main_grad = torch.zeros_like(op.weight, dtype=torch.float32)


def buffers(model):
    return [op.weight.main_grad for op in layers(model) if hasattr(op.weight, "main_grad")]


def refill(model, value=0.25):
    for buffer in buffers(model):
        buffer.fill_(value)


def twin_of(model):
    """A copy that runs in eager mode; parameters leave their main_grad behind when they are copied."""
    twin = copy.deepcopy(model)
    if buffers(model):
        give_buffers(twin)
    return twin


class Static:
    """What a captured step reads, at addresses of their own."""

    def __init__(self, is_grouped):
        self.is_grouped = is_grouped
        self.x = torch.zeros(M, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.dy = torch.zeros(M, H, device="cuda", dtype=torch.bfloat16)
        self.sizes = torch.zeros(G, device="cuda", dtype=torch.int32)
        self.probs = torch.zeros(M, device="cuda", requires_grad=True)
        self.load(0)

    def load(self, seed, splits=FIRST):
        x, dy, probs = spiky(M, H, seed=seed, size=8.0), spiky(M, H, seed=seed + 90), spiky(M, seed=seed + 40).abs()
        if self.is_grouped:
            for t in (x, dy, probs):
                t[sum(splits) :] = float("nan")
        with torch.no_grad():
            self.x.copy_(x), self.dy.copy_(dy), self.probs.copy_(probs), self.sizes.copy_(torch.tensor(splits))

    @property
    def leaves(self):
        return [self.x, self.probs] if self.is_grouped else [self.x]

    @property
    def extra(self):
        return (self.sizes, self.probs, self.sizes) if self.is_grouped else ()


def run(model, static, *, dw=False):
    """One step from no gradients on; everything it gives."""
    for t in (*static.leaves, *model.parameters()):
        t.grad = None
    y = model(static.x, *static.extra)
    y.backward(static.dy)
    if dw:
        for op in layers(model):
            op.backward_dw()
    return [y.detach(), *(t.grad for t in static.leaves), *(p.grad for p in model.parameters())]


def used(found, static, splits):
    """Without the rows that are nobody's."""
    if not static.is_grouped:
        return found
    rows = sum(splits)
    return [t if t is None or i > len(static.leaves) else t[:rows] for i, t in enumerate(found)]


def captured_step(model, static, **given):
    state = {key: value.clone() for key, value in octavo.state_dict(model).items()}
    ((graph, found),) = captured(lambda: run(model, static, **given))
    octavo.load_state_dict(model, state)
    return graph, found


def assert_follows(model, static, graph, found, twin, **given):
    """Replayed three times for every batch, against as many eager steps; scales are stepped between."""
    other = Static(static.is_grouped)
    for i, (name, splits) in enumerate(SPLITS.items()):
        for each, data in ((model, static), (twin, other)):
            data.load(i, splits)
            refill(each)
        torch.cuda.synchronize()
        for _ in range(3):
            graph.replay()
        for _ in range(3):
            want = run(twin, other, **given)
        assert_equal(used(found, static, splits), used(want, other, splits), name)
        assert_equal(buffers(model), buffers(twin), f"{name} main_grad")
        for each in (model, twin):
            octavo.step(each)
    assert_state(model, twin)


# -- by hand -----------------------------------------------------------------------------------------------------------


@dense
@fusing
def test_a_captured_step_of_a_dense_model(recipe, main_grad):
    model, static = dense_model(recipe), Static(False)
    if main_grad:
        give_buffers(model)
    twin = twin_of(model)
    assert_follows(model, static, *captured_step(model, static), twin)


@grouped
@fusing
def test_a_captured_step_of_grouped_layers_follows_sizes_that_change(recipe, main_grad):
    model, static = grouped_model(recipe), Static(True)
    if main_grad:
        give_buffers(model)
    twin = twin_of(model)
    assert_follows(model, static, *captured_step(model, static), twin)


@pytest.mark.parametrize("build", [dense_model, grouped_model], ids=["dense", "grouped"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
@fusing
def test_deferred_weight_gradients_in_the_same_graph(build, recipe, main_grad):
    model, static = build(recipe, delay_wgrad_compute=True), Static(build is grouped_model)
    if main_grad:
        give_buffers(model)
    twin = twin_of(model)
    for op in layers(twin):
        op.delay_wgrad_compute = False
    graph, found = captured_step(model, static, dw=True)
    assert_follows(model, static, graph, found, twin)


@pytest.mark.gpu_smoke
@pytest.mark.parametrize("build", [dense_model, grouped_model], ids=["dense", "grouped"])
def test_weights_change_between_replays(build):
    model, static = build("fp8-current"), Static(build is grouped_model)
    twin, other = twin_of(model), Static(build is grouped_model)
    graph, found = captured_step(model, static)
    for i in range(3):
        static.load(i), other.load(i)
        graph.replay()
        want = run(twin, other)
        assert_equal(used(found, static, FIRST), used(want, other, FIRST), f"step {i}")
        with torch.no_grad():
            for p in (*model.parameters(), *twin.parameters()):
                p.sub_(p.grad * 0.01)


# -- make_graphed_callables --------------------------------------------------------------------------------------------


class Call(nn.Module):
    """Tensors by position; sizes are given once."""

    def __init__(self, model, is_grouped):
        super().__init__()
        self.model, self.is_grouped = model, is_grouped

    def forward(self, x, sizes=None, probs=None):
        return self.model(x, sizes, probs, sizes) if self.is_grouped else self.model(x)


def through(call, model, static):
    """One step; gradients have tensors of their own, or the first would be the graph's memory."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    leaves = [t.detach().clone().requires_grad_() for t in static.leaves]
    y = call(leaves[0], static.sizes, leaves[1]) if static.is_grouped else call(leaves[0])
    out = y.detach().clone()
    y.backward(static.dy)
    return [out, *(t.grad.clone() for t in leaves), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("build", [dense_model, grouped_model], ids=["dense", "grouped"])
@recipes(["bf16", "fp8-delayed", "fp8-current"])
def test_graphed_callables_follow_sizes_that_change(build, recipe):
    model, is_grouped = build(recipe), build is grouped_model
    static, twin, state = Static(is_grouped), twin_of(model), octavo.state_dict(model)
    state = {key: value.clone() for key, value in state.items()}
    given = (static.x, static.sizes, static.probs) if is_grouped else (static.x,)
    arguments = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in given)
    call = torch.cuda.make_graphed_callables(Call(model, is_grouped), arguments)
    octavo.load_state_dict(model, state)
    for i, (name, splits) in enumerate(SPLITS.items()):
        static.load(i, splits)
        for _ in range(2):
            found, want = through(call, model, static), through(Call(twin, is_grouped), twin, static)
            assert_equal(used(found, static, splits), used(want, static, splits), name)
        for each in (model, twin):
            octavo.step(each)
    assert_state(model, twin)


builds = pytest.mark.parametrize(
    "build", [dense_model, block_model, grouped_model], ids=["dense", "LayerNormMLP", "grouped"]
)


def graphed(model, static):
    """By make_graphed_callables. Weights whose gradient goes elsewhere are inputs that nobody asks of."""
    given = (static.x, static.sizes, static.probs) if static.is_grouped else (static.x,)
    arguments = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in given)
    return torch.cuda.make_graphed_callables(Call(model, static.is_grouped), arguments, allow_unused_input=True)


@builds
@recipes(["bf16", "fp8-delayed", "fp8-current"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
def test_graphed_callables_with_main_grad(build, recipe, overwrite):
    model, static = build(recipe), Static(build is grouped_model)
    give_buffers(model)
    twin, state = twin_of(model), {key: value.clone() for key, value in octavo.state_dict(model).items()}
    for op in (*layers(model), *layers(twin)):
        op.weight.overwrite_main_grad = overwrite
    call = graphed(model, static)
    octavo.load_state_dict(model, state)
    for i, (name, splits) in enumerate(SPLITS.items()):
        static.load(i, splits)
        refill(model, float("nan") if overwrite else 0.25), refill(twin, float("nan") if overwrite else 0.25)
        for _ in range(2):  # the second time to what the first left there
            found, want = through(call, model, static), through(Call(twin, static.is_grouped), twin, static)
            assert_equal(used(found, static, splits), used(want, static, splits), name)
        assert_equal(buffers(model), buffers(twin), f"{name} main_grad")
        assert not any(buffer.isnan().any() for buffer in buffers(model))
        for each in (model, twin):
            octavo.step(each)
    assert_state(model, twin)


WARM_UPS = 3  # of make_graphed_callables


def graphed_weight_gradients(model):
    """backward_dw() in a graph of its own, right after make_graphed_callables: its warm-ups ran backward too, and what
    they left is dropped; what the capture left is where every replay leaves its own. What it returns are gradients by
    parameter, where they do not go to main_grad."""
    assert [op.discard_dw() for op in layers(model)] == [WARM_UPS] * len(layers(model))
    torch.cuda.synchronize()
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        for op in layers(model):
            op.backward_dw()
    return graph, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@builds
@recipes(["bf16", "fp8-delayed", "fp8-current"])
@fusing
def test_graphed_callables_with_deferred_weight_gradients(build, recipe, main_grad):
    model, static = build(recipe, delay_wgrad_compute=True), Static(build is grouped_model)
    if main_grad:
        give_buffers(model)
    twin, state = twin_of(model), {key: value.clone() for key, value in octavo.state_dict(model).items()}
    for op in layers(twin):
        op.delay_wgrad_compute = False
    call = graphed(model, static)
    later, gradients = graphed_weight_gradients(model)
    octavo.load_state_dict(model, state)
    assert len(gradients) == (0 if main_grad else len(layers(model)))
    for i, (name, splits) in enumerate(SPLITS.items()):
        static.load(i, splits)
        refill(model), refill(twin)
        for _ in range(2):
            before = [t.clone() for t in (*buffers(model), *gradients.values())]
            found = through(call, model, static)
            assert_equal((*buffers(model), *gradients.values()), before, f"{name}: before backward_dw")
            later.replay()
            want = through(Call(twin, static.is_grouped), twin, static)
            own = [gradients.get(n, p.grad) for n, p in model.named_parameters()]
            found = [*found[: 1 + len(static.leaves)], *own]
            assert_equal(used(found, static, splits), used(want, static, splits), name)
        assert_equal(buffers(model), buffers(twin), f"{name} main_grad")
        for each in (model, twin):
            octavo.step(each)
    assert_state(model, twin)


@pytest.mark.parametrize("build", [dense_model, block_model], ids=["dense", "LayerNormMLP"])
def test_a_replayed_backward_leaves_nothing_for_backward_dw_in_eager_mode(build):
    """Python does not run when a graph is replayed: what the warm-ups and the capture left is all there is, and is not
    taken for what the replay did."""
    model, static = build("fp8-current", delay_wgrad_compute=True), Static(False)
    call = graphed(model, static)
    through(call, model, static)
    for op in layers(model):
        with pytest.raises(UnsupportedConfig, match=r"3 were left outside .*Capture it.*discard_dw\(\) drops"):
            op.backward_dw()
        assert op.discard_dw() == WARM_UPS
    through(call, model, static)
    for op in layers(model):
        with pytest.raises(UnsupportedConfig, match=r"0 were left outside of captures.* and 1 captured.*Capture it"):
            op.backward_dw()


# -- torch.compile -----------------------------------------------------------------------------------------------------


@recipes(["bf16", "fp8-delayed", "fp8-current"])
def test_reduce_overhead_replays_without_skips(recipe):
    torch._dynamo.reset()
    counters.clear()
    model, static = dense_model(recipe), Static(False)
    twin = twin_of(model)
    call = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for i in range(4):
        static.load(i)
        torch.compiler.cudagraph_mark_step_begin()
        assert_equal(through(call, model, static), through(twin, twin, static), f"step {i}")
        for each in (model, twin):
            octavo.step(each)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["stats"]["unique_graphs"] == 1
    assert_state(model, twin)


# -- what a step launches ----------------------------------------------------------------------------------------------


def launches(model, static):
    run(model, static), run(model, static)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run(model, static)
        torch.cuda.synchronize()
    return sum(
        e.count for e in seen.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA and "Mem" not in e.key
    )


@recipes(["fp8-delayed"])  # whose scale is known before the tensor is
def test_fused_launches_fewer_kernels(recipe):
    static, model = Static(False), dense_model(recipe)
    assert launches(model, static) < launches(unfused(model), static)


def test_nothing_waits_for_the_device():
    static = Static(True)
    model = grouped_model("fp8-current")
    run(model, static)
    with no_waiting():
        run(model, static)
