"""GroupedLinear on a GPU: steps in CUDA graphs that follow whatever sizes they find when they are replayed, bit for bit
what eager mode gives for those sizes, with nothing read back and nothing copied.

Capturing wants warm-up steps, and those move what a recipe remembers: it is saved before and loaded after. Tails hold
NaN everywhere."""

import copy
import gc
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import octavo
from octavo.errors import Unsupported, UnsupportedConfig
from octavo.quant.grouped import quantize_groups
from octavo.quant.groups import split
from octavo.recipes import SHIPPED
from tests.support.cuda_work import captured, kernels_of
from tests.support.experts import (
    LAYOUTS,
    addresses,
    assert_steps,
    batch,
    cached_codes,
    change,
    experts,
    give,
    named,
    own,
    same_seed,
    slices,
)
from tests.support.linear_oracle import assert_same, graphs_of, spiky
from tests.support.pairs import pairs
from tests.support.recipe_traits import QUANTIZED, STATELESS
from tests.support.state_tensors import named_state
from tests.support.steps import assert_state
from tests.support.waiting import no_waiting

pytestmark = pytest.mark.gpu

G, K, N, ROWS = 4, 256, 384, 1000
SPLITS = {
    "as captured": (300, 0, 500, 100),
    "permuted": (500, 100, 0, 300),
    "one emptied": (300, 0, 0, 100),
    "all on one, to the last row": (0, 0, 1000, 0),
    "none": (0, 0, 0, 0),
    "grown to the last row": (400, 299, 300, 1),
    "shrunk": (1, 1, 1, 1),
    "multiples of nothing": (65, 129, 97, 15),
}
FIRST = SPLITS["as captured"]
SAMPLE = ("bf16", "fp8-current", "fp8-delayed", "fp8-block", "nvfp4")
every = pytest.mark.parametrize("recipe", SHIPPED)
quantized = pytest.mark.parametrize("recipe", QUANTIZED)
sample = pytest.mark.parametrize("recipe", SAMPLE)
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
BIASES = ("none", "bias", "scaled")
FUSING = {"grad": False, "main_grad": True}
biases = pytest.mark.parametrize("bias", BIASES)
fusing = pytest.mark.parametrize("main_grad", FUSING.values(), ids=FUSING)


def experts_on_gpu(recipe, layout=LAYOUTS["single"], bias="bias", *, main_grad=False, dtype=torch.bfloat16, **settings):
    settings = {"fuse_wgrad_accumulation": main_grad, **settings}
    with_bias = {"bias": bias != "none", "scale_bias": bias == "scaled"}
    layer = experts(recipe, G, K, N, dtype=dtype, **with_bias, **layout, **settings).cuda()
    if main_grad:
        give(layer, torch.zeros(G, N, K, device="cuda"))
    return layer


def twin_of(layer):
    """A copy that runs in eager mode; parameters leave their main_grad behind when they are copied."""
    twin = copy.deepcopy(layer)
    if hasattr(next(iter(named(layer, "weight").values())), "main_grad"):
        give(twin, torch.zeros(G, N, K, device="cuda"))
    return twin


class Static:
    """What a captured step reads, at addresses of their own."""

    def __init__(self, bias="bias", dtype=torch.bfloat16):
        self.x = torch.zeros(ROWS, K, device="cuda", dtype=dtype, requires_grad=True)
        self.dy = torch.zeros(ROWS, N, device="cuda", dtype=dtype)
        self.sizes = torch.zeros(G, device="cuda", dtype=torch.int32)
        self.scales = torch.zeros(ROWS, device="cuda", requires_grad=True) if bias == "scaled" else None
        self.load(FIRST)

    def load(self, splits, seed=1):
        x, dy = batch(splits, ROWS - sum(splits), seed=seed, k=K, n=N)
        scales = spiky(ROWS, seed=seed + 9)
        scales[sum(splits) :] = float("nan")
        with torch.no_grad():
            self.x.copy_(x)
            self.dy.copy_(dy)
            self.sizes.copy_(torch.tensor(splits))
            if self.scales is not None:
                self.scales.copy_(scales)

    @property
    def given(self):
        return {} if self.scales is None else {"scales": self.scales}


def clear(layer, static):
    for p in (static.x, static.scales, *layer.parameters()):
        if p is not None:
            p.grad = None


def results(layer, static, y):
    found = {"y": y.detach(), "dx": static.x.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    return found | ({} if static.scales is None else {"ds": static.scales.grad})


def run(layer, static, *, dw=False, **given):
    """One step from no gradients on; everything it gives."""
    clear(layer, static)
    y = layer(static.x, static.sizes, **static.given, **given)
    y.backward(static.dy)
    if dw:
        layer.backward_dw()
    return results(layer, static, y)


def captured_step(layer, static, **given):
    """The graph of one step; the layer remembers what it did before."""
    state = octavo.state_dict(layer)
    ((graph, found),) = captured(lambda: run(layer, static, **given))
    octavo.load_state_dict(layer, state)
    return graph, found


def buffers(layer):
    return [p.main_grad for p in named(layer, "weight").values() if hasattr(p, "main_grad")]


def refill(layer, value=0.25):
    for buffer in buffers(layer):
        buffer.fill_(value)


def assert_main_grads(a, b, what=""):
    for found, want in zip(buffers(a), buffers(b), strict=True):
        assert_same(found, want, f"{what} main_grad")


def assert_follows(layer, static, graph, found, twin, replays=3, **given):
    """Replayed back to back for every way of splitting, against as many eager steps; scales are stepped between."""
    bias = "bias" if static.scales is None else "scaled"
    other = Static(bias, static.x.dtype)
    for i, (name, splits) in enumerate(SPLITS.items()):
        for model, data in ((layer, static), (twin, other)):
            data.load(splits, seed=i)
            refill(model)
        torch.cuda.synchronize()
        for _ in range(replays):
            graph.replay()
        for _ in range(replays):
            want = run(twin, other, **given)
        assert_steps(found, want, name)
        assert_main_grads(layer, twin, name)
        for model in (layer, twin):
            octavo.step(model)
    assert_state(layer, twin)


# -- a captured step ---------------------------------------------------------------------------------------------------


@every
@layouts
@biases
@fusing
def test_a_captured_step_follows_sizes_that_change(recipe, layout, bias, main_grad):
    layer, static = experts_on_gpu(recipe, layout, bias, main_grad=main_grad), Static(bias)
    twin = twin_of(layer)
    assert_follows(layer, static, *captured_step(layer, static), twin)


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_captured_step_of_other_dtypes(recipe, dtype):
    layer, static = experts_on_gpu(recipe, bias="scaled", dtype=dtype), Static("scaled", dtype)
    twin = twin_of(layer)
    assert_follows(layer, static, *captured_step(layer, static), twin)


@quantized
@layouts
def test_a_captured_step_of_weights_held_as_codes(recipe, layout):
    layer, static = experts_on_gpu(recipe, layout), Static()
    octavo.quantize_weights(layer)
    twin = copy.deepcopy(layer)
    assert_follows(layer, static, *captured_step(layer, static), twin)


@sample
def test_a_captured_step_that_overwrites(recipe):
    layer, static = experts_on_gpu(recipe, main_grad=True), Static()
    twin = twin_of(layer)
    for model in (layer, twin):
        model.weight.overwrite_main_grad = True
        refill(model, float("nan"))
    assert_follows(layer, static, *captured_step(layer, static), twin)
    assert not any(buffer.isnan().any() for buffer in buffers(layer))


@sample
@layouts
def test_a_captured_step_with_frozen_experts(recipe, layout):
    layer, static = experts_on_gpu(recipe, layout), Static()
    frozen = ["bias"] if not layout else ["weight1", "bias2"]
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    twin = twin_of(layer)
    graph, found = captured_step(layer, static)
    assert all(found[name] is None for name in frozen)
    assert_follows(layer, static, graph, found, twin)


@every
@layouts
def test_weights_change_between_replays(recipe, layout):
    layer, static, other = experts_on_gpu(recipe, layout), Static(), Static()
    twin = twin_of(layer)
    graph, found = captured_step(layer, static)
    for i, splits in enumerate(SPLITS.values()):
        static.load(splits, seed=i), other.load(splits, seed=i)
        graph.replay()
        want = run(twin, other)
        assert_steps(found, want, f"step {i}")
        with torch.no_grad():
            for name, p in layer.named_parameters():
                p.sub_(found[name] * 0.01)
            for p in twin.parameters():
                p.sub_(p.grad * 0.01)
        for model in (layer, twin):
            octavo.step(model)
    assert_state(layer, twin)


@every
def test_two_instances_on_two_streams(recipe):
    """Each has its own graph; they are replayed at the same time, and share no scratch."""
    layers = [experts_on_gpu(recipe, seed=s, bias="scaled", main_grad=True) for s in (1, 20)]
    twins, statics = [twin_of(m) for m in layers], [Static("scaled"), Static("scaled")]
    graphs = [captured_step(layer, static) for layer, static in zip(layers, statics, strict=True)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    names = list(SPLITS)
    for i in range(len(names)):
        for j in range(2):
            statics[j].load(SPLITS[names[(i + 3 * j) % len(names)]], seed=2 * i + j)
            refill(layers[j]), refill(twins[j])
        torch.cuda.synchronize()
        for _ in range(5):
            for (graph, _), stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for j in range(2):
            other = Static("scaled")
            other.load(SPLITS[names[(i + 3 * j) % len(names)]], seed=2 * i + j)
            for _ in range(5):
                want = run(twins[j], other)
            assert_steps(graphs[j][1], want, f"{names[i]} {j}")
            assert_main_grads(layers[j], twins[j])


@every
def test_two_eager_instances_on_two_streams(recipe):
    layers, data = [experts_on_gpu(recipe, seed=s) for s in (1, 20)], [Static(), Static()]
    data[1].load(SPLITS["permuted"], seed=8)
    want = [run(layer, static) for layer, static in zip(layers, data, strict=True)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(10):
        found = []
        for layer, static, stream in zip(layers, data, streams, strict=True):
            with torch.cuda.stream(stream):
                same_seed(layer)
                found.append(run(layer, static))
        torch.cuda.synchronize()
        for a, b in zip(found, want, strict=True):
            assert_steps(a, b)


# -- torch.cuda.make_graphed_callables ---------------------------------------------------------------------------------


class Call(nn.Module):
    """Tensors by position, as make_graphed_callables wants them."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, sizes, scales=None):
        return self.layer(x, sizes, **({} if scales is None else {"scales": scales}))


def through(call, layer, static):
    """One step; gradients have tensors of their own, or the first would be the graph's memory."""
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    leaves = [t.detach().clone().requires_grad_() for t in (static.x, static.scales) if t is not None]
    y = call(leaves[0], static.sizes, *leaves[1:])
    out = y.detach().clone()
    y.backward(static.dy)
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return {"y": out, **grads, **{f"d{i}": leaf.grad.clone() for i, leaf in enumerate(leaves)}}


@every
@layouts
@biases
@fusing
def test_graphed_callables_follow_sizes_that_change(recipe, layout, bias, main_grad):
    layer, static = experts_on_gpu(recipe, layout, bias, main_grad=main_grad), Static(bias)
    twin, state = twin_of(layer), octavo.state_dict(layer)
    arguments = [t.detach().clone().requires_grad_(t.requires_grad) for t in (static.x, static.sizes)]
    if static.scales is not None:
        arguments.append(static.scales.detach().clone().requires_grad_())
    call = torch.cuda.make_graphed_callables(Call(layer), tuple(arguments), allow_unused_input=main_grad)
    octavo.load_state_dict(layer, state)
    for i, (name, splits) in enumerate(SPLITS.items()):
        static.load(splits, seed=i)
        refill(layer), refill(twin)
        for _ in range(3):
            found, want = through(call, layer, static), through(Call(twin), twin, static)
            assert_steps(found, want, name)
        assert_main_grads(layer, twin, name)
        for model in (layer, twin):
            change(model)
            octavo.step(model)
    assert_state(layer, twin)


# -- weight gradients deferred -----------------------------------------------------------------------------------------


@every
@layouts
@fusing
def test_deferred_weight_gradients_and_taken_in_the_same_graph(recipe, layout, main_grad):
    layer, static = experts_on_gpu(recipe, layout, main_grad=main_grad, delay_wgrad_compute=True), Static()
    twin = twin_of(layer)
    twin.delay_wgrad_compute = False
    graph, found = captured_step(layer, static, dw=True)
    assert_follows(layer, static, graph, found, twin)


def backward_of(layer, static):
    def step():
        clear(layer, static)
        y = layer(static.x, static.sizes, **static.given)
        y.backward(static.dy)
        return {"y": y.detach(), "dx": static.x.grad}

    return step


def weight_gradients_of(layer):
    def step():
        layer.backward_dw()
        return {name: p.grad for name, p in named(layer, "weight").items()}

    return step


@pairs(recipe=SAMPLE, layout=LAYOUTS, bias=BIASES, main_grad=FUSING)
def test_deferred_weight_gradients_by_graphed_callables(recipe, layout, bias, main_grad):
    """backward_dw() has a graph of its own, captured before the first call: what the three warm-ups left is dropped,
    and what the capture left is where every replay leaves its own."""
    layer, static = experts_on_gpu(recipe, layout, bias, main_grad=main_grad, delay_wgrad_compute=True), Static(bias)
    twin, state = twin_of(layer), octavo.state_dict(layer)
    twin.delay_wgrad_compute = False
    given = [static.x, static.sizes] + ([] if static.scales is None else [static.scales])
    arguments = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in given)
    call = torch.cuda.make_graphed_callables(Call(layer), arguments, allow_unused_input=True)
    with pytest.raises(UnsupportedConfig, match=r"3 were left outside of captures.* and 1 captured.*discard_dw"):
        layer.backward_dw()
    assert layer.discard_dw() == 3
    with pytest.raises(UnsupportedConfig, match=r"0 were left outside of captures.*Capture it"):
        layer.backward_dw()
    torch.cuda.synchronize()
    gc.collect()
    later = torch.cuda.CUDAGraph()
    with torch.cuda.graph(later, capture_error_mode="global"):
        gradients = weight_gradients_of(layer)()
    octavo.load_state_dict(layer, state)
    assert all((gradient is None) == main_grad for gradient in gradients.values())
    for i, (name, splits) in enumerate(SPLITS.items()):
        static.load(splits, seed=i)
        refill(layer), refill(twin)
        for _ in range(2):
            found = through(call, layer, static)
            later.replay()
            want = through(Call(twin), twin, static)
            assert_steps({**found, **({} if main_grad else gradients)}, want, name)
        assert_main_grads(layer, twin, name)
        for model in (layer, twin):
            change(model)
            octavo.step(model)
    assert_state(layer, twin)


@every
@layouts
@fusing
def test_deferred_weight_gradients_to_a_graph_of_their_own(recipe, layout, main_grad):
    layer, static = experts_on_gpu(recipe, layout, main_grad=main_grad, delay_wgrad_compute=True), Static()
    twin, other, state = twin_of(layer), Static(), octavo.state_dict(layer)
    twin.delay_wgrad_compute = False
    (first, found), (second, gradients) = captured(backward_of(layer, static), weight_gradients_of(layer))
    octavo.load_state_dict(layer, state)
    for i, (name, splits) in enumerate(SPLITS.items()):
        static.load(splits, seed=i), other.load(splits, seed=i)
        refill(layer), refill(twin)
        for _ in range(2):
            before = [b.clone() for b in buffers(layer)] or [g.clone() for g in gradients.values()]
            first.replay()
            after = buffers(layer) or list(gradients.values())
            for a, b in zip(after, before, strict=True):
                assert_same(a, b, f"{name}: before backward_dw")
            second.replay()
            want = run(twin, other)
            assert_steps(found, {"y": want["y"], "dx": want["dx"]}, name)
            if not main_grad:
                assert_steps(gradients, {n: want[n] for n in gradients}, name)
            assert_main_grads(layer, twin, name)
        for model in (layer, twin):
            change(model)
            octavo.step(model)


@sample
def test_two_captured_microbatches_wait_in_order(recipe):
    layer = experts_on_gpu(recipe, main_grad=True, delay_wgrad_compute=True)
    twin, state, statics = twin_of(layer), octavo.state_dict(layer), [Static(), Static()]
    twin.delay_wgrad_compute = False
    later = weight_gradients_of(layer)
    made = captured(backward_of(layer, statics[0]), backward_of(layer, statics[1]), later, later)
    octavo.load_state_dict(layer, state)
    names = list(SPLITS)
    for i in range(len(names)):
        refill(layer), refill(twin)
        for j in range(2):
            statics[j].load(SPLITS[names[(i + j) % len(names)]], seed=2 * i + j)
        for graph, _ in made[:3]:
            graph.replay()
        run(twin, statics[0])
        assert_main_grads(layer, twin, f"{names[i]}: the first")
        made[3][0].replay()
        run(twin, statics[1])
        assert_main_grads(layer, twin, f"{names[i]}: both")


# -- the weight cache --------------------------------------------------------------------------------------------------


@every
@layouts
def test_a_flag_on_the_device_decides_in_one_graph_over_three_optimizer_steps(recipe, layout):
    layer, static, other = experts_on_gpu(recipe, layout), Static(), Static()
    twin, state, flag = twin_of(layer), octavo.state_dict(layer), torch.ones(1, dtype=torch.int32, device="cuda")
    ((graph, found),) = captured(lambda: run(layer, static, is_first_microbatch=flag))
    octavo.load_state_dict(layer, state)
    places, names = addresses(layer), list(SPLITS)
    for i in range(3):
        total = {name: torch.zeros_like(p) for name, p in layer.named_parameters()}
        for j, first in enumerate((True, False, False)):
            static.load(SPLITS[names[(3 * i + j) % len(names)]], seed=3 * i + j)
            other.load(SPLITS[names[(3 * i + j) % len(names)]], seed=3 * i + j)
            flag.fill_(int(first))
            codes = cached_codes(layer)
            graph.replay()
            want = run(twin, other, is_first_microbatch=first)
            assert_steps(found, want, f"step {i}, microbatch {j}")
            if not first:
                for name, then in codes.items():
                    assert torch.equal(cached_codes(layer)[name], then), name
            for name in total:
                total[name] += found[name]
        assert addresses(layer) == places
        with torch.no_grad():
            for model in (layer, twin):
                for name, p in model.named_parameters():
                    p.sub_(total[name] * 0.01)
                octavo.step(model)
    assert_state(layer, twin)


@quantized
@layouts
def test_a_zero_keeps_the_old_codes_and_a_one_replaces_them_in_place(recipe, layout):
    layer, static = experts_on_gpu(recipe, layout), Static()
    flag = torch.ones(1, dtype=torch.int32, device="cuda")
    ((graph, found),) = captured(lambda: run(layer, static, is_first_microbatch=flag))
    graph.replay()
    y, codes, places = found["y"].clone(), cached_codes(layer), addresses(layer)
    assert sum(t.numel() for t in codes.values()) >= G * N * K // 2
    for p in named(layer, "weight").values():
        p.data.mul_(1.7)
    flag.zero_()
    graph.replay()
    for name, then in codes.items():
        assert torch.equal(cached_codes(layer)[name], then), name
    assert_same(found["y"], y)
    flag.fill_(1)
    graph.replay()
    assert any(not torch.equal(cached_codes(layer)[name], then) for name, then in codes.items())
    assert addresses(layer) == places
    assert not torch.equal(found["y"], y)


# -- nothing is read back ----------------------------------------------------------------------------------------------


@contextmanager
def nothing_read_back():
    """What waits for the device raises, and so does what would give a number of the device to the host."""

    def on_the_host(read):
        def checked(tensor, *arguments, **keywords):
            assert not tensor.is_cuda, "a tensor of the device was read on the host"
            return read(tensor, *arguments, **keywords)

        return checked

    with no_waiting(), pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy"):
            patch.setattr(torch.Tensor, name, on_the_host(getattr(torch.Tensor, name)))
        yield


@every
@layouts
def test_an_eager_step_with_everything_on_reads_nothing_back(recipe, layout):
    layer = experts_on_gpu(recipe, layout, "scaled", main_grad=True, delay_wgrad_compute=True)
    static, flag = Static("scaled"), torch.ones(1, dtype=torch.int32, device="cuda")
    out, dx = (torch.empty(ROWS, n, device="cuda", dtype=torch.bfloat16) for n in (N, K))
    given = {"out": out, "dgrad_out": dx, "is_first_microbatch": flag, "dw": True}
    static.load(SPLITS["multiples of nothing"])  # rows for each: delayed scaling asks the device until all were seen
    run(layer, static, **given)
    octavo.step(layer), octavo.refresh_weights(layer)
    static.load(FIRST)
    with nothing_read_back():
        for _ in range(2):
            run(layer, static, **given)
            octavo.step(layer)
            octavo.refresh_weights(layer)
        with torch.no_grad():
            layer(static.x, static.sizes, scales=static.scales)


@sample
def test_sizes_on_the_host_are_uploaded_without_waiting(recipe):
    layer, static = experts_on_gpu(recipe), Static()
    want = layer(static.x, static.sizes).detach()
    on_host = torch.tensor(FIRST)
    with nothing_read_back():
        found = [layer(static.x, splits).detach() for splits in (list(FIRST), on_host)]
    for y in found:
        assert_same(y, want)


@sample
def test_wrong_buffers_are_refused_without_waiting(recipe):
    layer, static = experts_on_gpu(recipe), Static()
    with nothing_read_back():
        for name, buffer in (
            ("out", torch.empty(ROWS + 1, N, device="cuda", dtype=torch.bfloat16)),
            ("out", torch.empty(ROWS, N, dtype=torch.bfloat16)),
            ("out", torch.empty(N, ROWS, device="cuda", dtype=torch.bfloat16).T),
            ("dgrad_out", torch.empty(ROWS, K, device="cuda")),
        ):
            with pytest.raises(ValueError, match=name):
                layer(static.x, static.sizes, **{name: buffer}).backward(static.dy)


@every
@layouts
def test_forward_backward_and_optimizer_in_one_graph(recipe, layout):
    layer, static, other = experts_on_gpu(recipe, layout, "scaled"), Static("scaled"), Static("scaled")
    twin, state = twin_of(layer), octavo.state_dict(layer)
    weights = {name: p.detach().clone() for name, p in layer.state_dict().items()}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (layer, twin)]

    def step():
        with nothing_read_back():
            found = run(layer, static)
            optimizers[0].step()
        return found

    run(layer, static)  # whatever is compiled or uploaded once
    ((graph, found),) = captured(step)
    layer.load_state_dict(weights)
    octavo.load_state_dict(layer, state)
    for i, (name, splits) in enumerate(SPLITS.items()):
        static.load(splits, seed=i), other.load(splits, seed=i)
        graph.replay()
        want = run(twin, other)
        optimizers[1].step()
        assert_steps(found, want, name)
        for a, b in zip(layer.parameters(), twin.parameters(), strict=True):
            assert_same(a.detach(), b.detach(), name)
        for model in (layer, twin):
            octavo.step(model)


@sample
@pytest.mark.parametrize("splits", [list(FIRST), torch.tensor(FIRST)], ids=["list", "host"])
def test_sizes_that_a_graph_would_freeze_are_refused(recipe, splits):
    layer, static = experts_on_gpu(recipe), Static()
    run(layer, static)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")  # an empty graph is a warning
        with pytest.raises(Unsupported, match=r"(?i)captur|graph"):
            layer(static.x, splits)
    found = layer(static.x, static.sizes)  # and all is well afterwards
    assert found[:400].isfinite().all()


# -- buffers of the caller ---------------------------------------------------------------------------------------------


@every
@layouts
@pytest.mark.parametrize("given", [("out",), ("dgrad_out",), ("out", "dgrad_out")], ids=str)
def test_buffers_keep_their_tails_in_a_captured_step(recipe, layout, given):
    """Views into larger allocations; whatever the sizes become, rows past them hold what they held."""
    layer, static, other = experts_on_gpu(recipe, layout, "scaled"), Static("scaled"), Static("scaled")
    twin = twin_of(layer)
    widths = {"out": N, "dgrad_out": K}
    rooms = {n: torch.empty(ROWS + 24, widths[n], device="cuda", dtype=torch.bfloat16) for n in given}
    parts = {name: room[8 : 8 + ROWS] for name, room in rooms.items()}
    graph, found = captured_step(layer, static, **parts)
    if "out" in given:
        assert found["y"].data_ptr() == parts["out"].data_ptr()
    for i, (name, splits) in enumerate(SPLITS.items()):
        static.load(splits, seed=i), other.load(splits, seed=i)
        for room in rooms.values():
            room.fill_(7.0 if i % 2 else float("nan"))
        want, used = run(twin, other), sum(splits)
        graph.replay()
        for key in want:
            rows = slice(used if key in ("y", "dx") else None)
            assert_same(found[key][rows], want[key][rows], f"{name} {key}")
        for buffer, room in rooms.items():
            assert_same(room[8 : 8 + used], want["y" if buffer == "out" else "dx"][:used], f"{name} {buffer}")
            around = torch.cat((room[:8], room[8 + used :]))
            assert_same(around, torch.full_like(around, 7.0 if i % 2 else float("nan")), f"{name} around {buffer}")


def launches(step):
    """How often each kernel and copy ran, by name."""
    return Counter(kernels_of(step, warm=False))


@every
@layouts
def test_a_buffer_costs_no_launch(recipe, layout):
    layer, static = experts_on_gpu(recipe, layout), Static()
    out, dx = (torch.empty(ROWS, n, device="cuda", dtype=torch.bfloat16) for n in (N, K))
    ways = ({}, {"out": out}, {"dgrad_out": dx}, {"out": out, "dgrad_out": dx})

    def step(given):
        clear(layer, static)
        # of a leaf's gradient torch makes a copy, where somebody else has it too
        layer(static.x * 1, static.sizes, **static.given, **given).backward(static.dy)

    for given in ways:
        step(given)
    plain, *with_buffers = [launches(lambda given=given: step(given)) for given in ways]
    assert plain.total() > 0
    for given, found in zip(ways[1:], with_buffers, strict=True):
        assert found.total() <= plain.total(), f"{list(given)}: {found - plain}"
        copies = [name for name in found - plain if "copy" in name.lower() or "memcpy" in name.lower()]
        assert not copies, f"{list(given)}: {copies}"


@every
def test_more_groups_are_no_more_launches(recipe):
    """Work is found on the device: the host starts as many kernels for 4 groups as for 64."""
    counts, rows = [], 64 * 80  # of either number of groups, an emulated format decodes its operands first
    for groups in (4, 64):
        layer = experts(recipe, groups, K, N, dtype=torch.bfloat16).cuda()
        x = torch.randn(rows, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        sizes = torch.full((groups,), rows // groups, device="cuda", dtype=torch.int32)

        def step(layer=layer, x=x, sizes=sizes):
            layer.zero_grad()
            layer(x, sizes).backward(torch.ones(rows, N, device="cuda", dtype=torch.bfloat16))

        step()
        counts.append(launches(step).total())
    assert counts[0] == counts[1]


# -- every group by itself, every time ---------------------------------------------------------------------------------


@pytest.mark.gpu_smoke
@pairs(
    recipe=SHIPPED,
    dtype=[torch.bfloat16, torch.float16, torch.float32],
    name=["as captured", "multiples of nothing", "all on one, to the last row"],
)
def test_each_group_is_a_layer_of_one_group(recipe, dtype, name):
    splits, layer, static = SPLITS[name], experts_on_gpu(recipe, dtype=dtype), Static(dtype=dtype)
    static.load(splits)
    found = run(layer, static)
    for g, rows in enumerate(slices(splits)):
        one = experts(recipe, 1, K, N, dtype=dtype).cuda()
        own(one)[0].copy_(own(layer)[g])
        own(one, "bias")[0].copy_(own(layer, "bias")[g])
        leaf = static.x.detach()[rows].clone().requires_grad_()
        y = one(leaf, torch.tensor([splits[g]], device="cuda"))
        y.backward(static.dy[rows])
        assert_same(found["y"][rows], y.detach(), f"y of {g}")
        assert_same(found["dx"][rows], leaf.grad, f"dx of {g}")
        assert_same(found["weight"][g], one.weight.grad[0], f"dw of {g}")
        assert_same(found["bias"][g], one.bias.grad[0], f"db of {g}")


@every
@layouts
def test_a_hundred_runs_and_a_hundred_replays_give_the_same_bits(recipe, layout):
    layer, static = experts_on_gpu(recipe, layout, "scaled"), Static("scaled")
    seed = dict(named_state(layer)).get("rounding_seed")
    kept = None if seed is None else seed.clone()

    def again():
        if seed is not None:
            seed.copy_(kept)
        return run(layer, static)

    want = {name: t.clone() for name, t in again().items()}
    ((graph, replayed),) = captured(again)
    for i in range(100):
        assert_steps(again(), want, f"run {i}")
        graph.replay()
        assert_steps(replayed, want, f"replay {i}")


@every
@pytest.mark.parametrize("groups", [1, 2, 65, 256])
def test_any_number_of_groups_in_a_captured_step(recipe, groups):
    layer = experts(recipe, groups, 64, 48, dtype=torch.bfloat16).cuda()
    twin, rows = copy.deepcopy(layer), 1500
    x = torch.zeros(rows, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy, sizes = torch.zeros(rows, 48, device="cuda", dtype=torch.bfloat16), torch.zeros(groups, device="cuda").int()

    def step(model):
        x.grad = None
        model.zero_grad()
        y = model(x, sizes)
        y.backward(dy)
        return {"y": y.detach(), "dx": x.grad, "dw": model.weight.grad, "db": model.bias.grad}

    def load(splits, seed):
        new_x, new_dy = batch(splits, rows - sum(splits), seed=seed, k=64, n=48)
        with torch.no_grad():
            x.copy_(new_x), dy.copy_(new_dy), sizes.copy_(torch.tensor(splits))

    state = octavo.state_dict(layer)
    load([rows // groups] * groups, 1)
    ((graph, found),) = captured(lambda: step(layer))
    octavo.load_state_dict(layer, state)
    for i, splits in enumerate(([(7 * g + 1) % 6 for g in range(groups)], [0] * (groups - 1) + [rows], [0] * groups)):
        load(splits, i)
        graph.replay()
        kept = {name: t.clone() for name, t in found.items()}
        assert_steps(kept, step(twin), f"{i}")


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "fp8-rowwise", "fp8-block"])
@pytest.mark.usefixtures("large_memory")
def test_elements_beyond_two_to_the_31(recipe):
    """The last group begins past them, in x, in its codes and in dx."""
    k, n, splits = 4096, 128, (1000, 524000, 200)
    rows = sum(splits) + 88
    assert (rows - 288) * k > 2**31
    layer = experts(recipe, 3, k, n, dtype=torch.bfloat16).cuda()
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16)
    x[-88:] = dy[-88:] = float("nan")
    x.requires_grad_()
    y = layer(x, torch.tensor(splits, device="cuda"))
    y.backward(dy)
    for g, part in enumerate(slices(splits)):
        if g == 1:
            continue
        one = experts(recipe, 1, k, n, dtype=torch.bfloat16).cuda()
        own(one)[0].copy_(own(layer)[g])
        own(one, "bias")[0].copy_(own(layer, "bias")[g])
        leaf = x.detach()[part].clone().requires_grad_()
        want = one(leaf, torch.tensor([splits[g]], device="cuda"))
        want.backward(dy[part])
        assert_same(y.detach()[part], want.detach(), f"y of {g}")
        assert_same(x.grad[part], leaf.grad, f"dx of {g}")
        assert_same(layer.weight.grad[g], one.weight.grad[0], f"dw of {g}")
    assert not x.grad[-88:].any() and not y[-88:].any()


# -- groups quantized in a graph ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", STATELESS)
@pytest.mark.parametrize("sides", ["row", "column", "both"])
def test_groups_are_quantized_in_a_graph_as_they_are_outside(recipe, sides):
    gemms, static = octavo.recipe(recipe).linear(), Static()
    row = gemms.fprop.left if sides != "column" else None
    column = gemms.wgrad.right if sides != "row" else None

    def quantize():
        return quantize_groups(static.x.detach(), row, column, split(static.sizes, ROWS))

    ((graph, found),) = captured(quantize)
    for i, (name, splits) in enumerate(SPLITS.items()):
        static.load(splits, seed=i)
        graph.replay()
        for a, b in zip(found, quantize(), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_same(a.dequantize(), b.dequantize(), name)
                for mine, theirs in zip(a.members(), b.members(), strict=True):
                    for s, t in zip(mine.tensors(), theirs.tensors(), strict=True):
                        assert_same(s.view(torch.uint8) if s.element_size() == 1 else s,
                                    t.view(torch.uint8) if t.element_size() == 1 else t, name)  # fmt: skip


# -- torch.compile -----------------------------------------------------------------------------------------------------


fresh = pytest.mark.usefixtures("forgetful_compiler")
modes = pytest.mark.parametrize("mode", ["default", "reduce-overhead"])


def assert_compiled_follows(layer, twin, call, static, **given):
    """Gradients are added to tensors of their own; what a graph returns is copied before the next replay."""
    for i, (name, splits) in enumerate(SPLITS.items()):
        static.load(splits, seed=i)
        refill(layer), refill(twin)
        found = through(lambda *a: call(*a, **given), layer, static)
        want, used = through(Call(twin), twin, static), sum(splits)
        for key in want:
            rows = slice(used if given and key in ("y", "d0") else None)
            assert_same(found[key][rows], want[key][rows], f"{name} {key}")
        assert_main_grads(layer, twin, name)
        for model in (layer, twin):
            octavo.step(model)
    assert_state(layer, twin)
    assert counters["inductor"]["cudagraph_skips"] == 0


@fresh
@modes
@every
@pytest.mark.parametrize("bias", ["bias", "scaled"])
def test_compiled_follows_sizes_that_change(recipe, bias, mode):
    layout = LAYOUTS["per group"] if bias == "scaled" else LAYOUTS["single"]
    layer, static = experts_on_gpu(recipe, layout, bias, main_grad=bias == "scaled"), Static(bias)
    twin = twin_of(layer)
    assert_compiled_follows(layer, twin, torch.compile(Call(layer), fullgraph=True, mode=mode), static)


class Into(nn.Module):
    """A layer with buffers of its own for y and dx."""

    def __init__(self, layer, out, dx):
        super().__init__()
        self.layer = layer
        self.register_buffer("out", out, persistent=False)
        self.register_buffer("dx", dx, persistent=False)

    def forward(self, x, sizes):
        return self.layer(x, sizes, out=self.out, dgrad_out=self.dx)


@fresh
@modes
@sample
def test_compiled_buffers_are_written_and_keep_their_tails(recipe, mode):
    layer, static = experts_on_gpu(recipe), Static()
    twin, settings = twin_of(layer), {"dtype": torch.bfloat16, "device": "cuda"}
    out, dx = octavo.buffer(ROWS, N, **settings), octavo.buffer(ROWS, K, **settings)
    call = torch.compile(layer, fullgraph=True, mode=mode)
    for i, (name, splits) in enumerate(SPLITS.items()):
        static.load(splits, seed=i)
        out.fill_(7.0), dx.fill_(7.0)
        want, used = through(Call(twin), twin, static), sum(splits)
        for p in layer.parameters():
            p.grad = torch.zeros_like(p)
        leaf = static.x.detach().clone().requires_grad_()
        y = call(leaf, static.sizes, out=out, dgrad_out=dx)
        assert y.data_ptr() == out.data_ptr()
        y.backward(static.dy)
        for buffer, key in ((out, "y"), (dx, "d0")):
            assert_same(buffer[:used], want[key][:used], f"{name} {key}")
            assert (buffer[used:] == 7).all(), f"{name} {key}"
        for key, p in layer.named_parameters():
            assert_same(p.grad, want[key], f"{name} {key}")
    assert counters["inductor"]["cudagraph_skips"] == 0


@fresh
@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
def test_buffers_of_a_module_are_static_enough(recipe):
    layer, static = experts_on_gpu(recipe), Static()
    twin, settings = twin_of(layer), {"dtype": torch.bfloat16, "device": "cuda"}
    into = Into(layer, torch.empty(ROWS, N, **settings), torch.empty(ROWS, K, **settings))
    call = torch.compile(into, fullgraph=True, mode="reduce-overhead")
    for i, splits in enumerate(SPLITS.values()):
        static.load(splits, seed=i)
        into.out.fill_(7.0), into.dx.fill_(7.0)
        through(call, layer, static)
        want, used = through(Call(twin), twin, static), sum(splits)
        assert_same(into.out[:used], want["y"][:used])
        assert_same(into.dx[:used], want["d0"][:used])
        assert (into.out[used:] == 7).all() and (into.dx[used:] == 7).all()
    assert counters["inductor"]["cudagraph_skips"] == 0


@fresh
@pytest.mark.parametrize("name", ["out", "dgrad_out"])
def test_a_buffer_that_moves_is_refused_where_graphs_are_replayed(name):
    """It would be left unwritten, without a word."""
    layer, static = experts_on_gpu("fp8-current"), Static()
    buffer = torch.empty(ROWS, N if name == "out" else K, device="cuda", dtype=torch.bfloat16)
    call = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    with pytest.raises(Exception, match=r"octavo\.buffer"):
        call(static.x, static.sizes, **{name: buffer})


@fresh
@modes
@sample
def test_compiled_deferred_weight_gradients(recipe, mode):
    layer, static = experts_on_gpu(recipe, main_grad=True, delay_wgrad_compute=True), Static()
    twin = twin_of(layer)
    twin.delay_wgrad_compute = False
    call = torch.compile(layer, fullgraph=True, mode=mode)
    for i, (name, splits) in enumerate(SPLITS.items()):
        static.load(splits, seed=i)
        refill(layer), refill(twin)
        torch.compiler.cudagraph_mark_step_begin()
        through(call, layer, static)
        assert all((b == 0.25).all() for b in buffers(layer)), name
        layer.backward_dw()
        through(twin, twin, static)
        assert_main_grads(layer, twin, name)


@fresh
@modes
@sample
def test_compiled_weight_cache_by_a_flag_on_the_device(recipe, mode):
    layer, static = experts_on_gpu(recipe), Static()
    twin, flag = twin_of(layer), torch.ones(1, dtype=torch.int32, device="cuda")
    call = torch.compile(layer, fullgraph=True, mode=mode)
    for i in range(3):
        for j, first in enumerate((True, False)):
            static.load(list(SPLITS.values())[2 * i + j], seed=2 * i + j)
            flag.fill_(int(first))
            found = through(lambda x, s: call(x, s, is_first_microbatch=flag), layer, static)
            want = through(lambda x, s, first=first: twin(x, s, is_first_microbatch=first), twin, static)
            assert_steps(found, want, f"step {i}, microbatch {j}")
        for model in (layer, twin):
            change(model)
            octavo.step(model)
    assert counters["stats"]["unique_graphs"] == graphs_of(recipe)
    assert counters["inductor"]["cudagraph_skips"] == 0
