"""GroupedLinear with `out` and `dgrad_out` in memory that something else lies in: right, or refused in a sentence."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

import octavo
from octavo.errors import UnsupportedConfig
from octavo.runtime import caller_memory
from tests.support.experts import sizes
from tests.support.training import seeded

G, K, R = 3, 48, 32  # as many outputs as inputs: every buffer fits everywhere
SPLITS = (10, 5, 17)
NEED = "modified by an inplace operation"
RECIPES = ["bf16", "fp8-current", "fp8-block(dgrad='bf16')", "fp8-block(wgrad='bf16')", "nvfp4"]
modes = pytest.mark.parametrize("mode", ["eager", "aot_eager"])
grid = pytest.mark.parametrize(("recipe", "mode"), [*[(r, "eager") for r in RECIPES], ("fp8-current", "aot_eager")])


make = partial(seeded, octavo.GroupedLinear, G, K, K, recipe="bf16")


def rows(seed=1):
    torch.manual_seed(seed)
    return torch.randn(R, K)


def leaf(seed=1):
    return rows(seed).requires_grad_()


def call_of(layer, mode):
    torch._dynamo.reset()
    return layer if mode == "eager" else torch.compile(layer, fullgraph=True, backend=mode)


# -- what a call reads -------------------------------------------------------------------------------------------------


@grid
@pytest.mark.parametrize("ahead", [0, R // 2], ids=["the same", "overlapping"])
def test_a_gradient_buffer_in_the_memory_of_dy_is_refused(recipe, mode, ahead):
    layer, room = make(recipe=recipe, scale_bias=True), torch.randn(2 * R, K)
    dy, buffer = room[:R], room[ahead : ahead + R]
    y = call_of(layer, mode)(leaf(), sizes(SPLITS), dgrad_out=buffer, scales=torch.ones(R, requires_grad=True))
    with pytest.raises(UnsupportedConfig, match="dgrad_out lies in the memory of dy"):
        y.backward(dy)
    assert all(p.grad is None for p in layer.parameters())


@grid
def test_a_gradient_buffer_in_the_memory_of_x_is_refused(recipe, mode):
    layer, h = make(recipe=recipe), torch.relu(leaf())  # whose backward needs h
    with pytest.raises(UnsupportedConfig, match="dgrad_out lies in the memory of x"):
        call_of(layer, mode)(h, sizes(SPLITS), dgrad_out=h.detach())


@pytest.mark.parametrize("name", ["out", "dgrad_out"])
@pytest.mark.parametrize("what", ["weight", "bias", "scales"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
def test_a_buffer_in_the_memory_of_another_input_is_refused(recipe, what, name):
    room = torch.randn(G, K, K)
    layer, scales = make(recipe=recipe, scale_bias=True), torch.ones(R)
    if what == "scales":
        scales = room.view(-1)[5 : 5 + R]
    else:
        getattr(layer, what).data = room if what == "weight" else room.view(-1)[: G * K].view(G, K)
    with pytest.raises(UnsupportedConfig, match=f"{name} lies in the memory of"):
        layer(leaf(), sizes(SPLITS), scales=scales, **{name: room.view(-1, K)[:R]})


@pytest.mark.parametrize("grads", ["none", "frozen", "all"])
def test_y_over_an_x_that_is_multiplied_as_it_is_is_refused(grads):
    layer, h = make(), leaf() * 1
    layer.requires_grad_(grads != "frozen")
    context = torch.no_grad() if grads == "none" else nullcontext()
    with context, pytest.raises(UnsupportedConfig, match="out lies in the memory of x"):
        layer(h, sizes(SPLITS), out=h.detach())


@pytest.mark.parametrize("alias", [torch.Tensor.detach, lambda h: h.data], ids=["detached", "data"])
def test_y_over_codes_of_x_is_told_to_what_made_x(alias):
    layer = make(recipe="fp8-current")
    h = torch.relu(leaf())
    y = layer(h, sizes(SPLITS), out=alias(h))
    with pytest.raises(RuntimeError, match=NEED):
        y.sum().backward()


def test_a_buffer_in_the_memory_of_what_dw_needs_is_refused():
    layer = make()
    h = leaf() * 1
    with pytest.raises(UnsupportedConfig, match="out lies in the memory of x"):
        layer(h, sizes(SPLITS), out=h.detach())
    with pytest.raises(UnsupportedConfig, match="dgrad_out lies in the memory of x"):
        layer(h, sizes(SPLITS), dgrad_out=h.detach()).sum().backward()
    dy = torch.randn(R, K)
    with pytest.raises(UnsupportedConfig, match="dgrad_out lies in the memory of dy"):
        layer(leaf(), sizes(SPLITS), dgrad_out=dy).backward(dy)


def test_where_codes_are_copies_a_buffer_may_be_the_input():
    layer, twin = make(recipe="fp8-current"), make(recipe="fp8-current")
    h = leaf() * 1
    layer(h, sizes(SPLITS), out=h.detach()).sum().backward()
    twin(leaf() * 1, sizes(SPLITS)).sum().backward()
    assert torch.equal(layer.weight.grad, twin.weight.grad)


# -- two gradients -----------------------------------------------------------------------------------------------------


def overlapping():
    room = torch.zeros(2 * R, K)
    return room[:R], room[R // 2 : R // 2 + R]


@pytest.mark.parametrize("mode", ["eager", "aot_eager", "a graph first", "a graph last"])
def test_gradient_buffers_of_one_backward_that_overlap_are_refused(mode):
    torch._dynamo.reset()
    gate, up, x = make(), make(seed=7), leaf()
    how = [mode in ("aot_eager", "a graph first"), mode in ("aot_eager", "a graph last")]
    calls = [torch.compile(m, backend="aot_eager") if c else m for m, c in zip((gate, up), how, strict=True)]
    first, second = (f(x, sizes(SPLITS), dgrad_out=d) for f, d in zip(calls, overlapping(), strict=True))
    with pytest.raises(UnsupportedConfig, match="one dgrad_out"):
        (first * second).sum().backward()


@pytest.mark.parametrize("name", ["out", "dgrad_out"])
def test_buffers_of_one_graph_that_overlap_are_refused(name):
    layer, sizes_, buffers = make(), sizes(SPLITS), overlapping()

    def call(x):
        return sum(torch.relu(layer(x, sizes_, **{name: b})) for b in buffers)

    torch._dynamo.reset()
    with pytest.raises(Exception, match=f"two calls in one graph write to one {name}, or"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(leaf())


def test_y_and_dx_of_one_graph_in_one_place_are_refused():
    layer, sizes_, (out, dx) = make(), sizes(SPLITS), overlapping()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="dgrad_out overlaps another buffer"):
        torch.compile(lambda x: layer(x, sizes_, out=out, dgrad_out=dx), fullgraph=True, backend="aot_eager")(leaf())


@modes
def test_one_gradient_buffer_for_microbatches_in_flight(mode):
    """Each takes what it wants of it before the next backward."""
    layer, twin, buffer = make(), make(), torch.zeros(R, K)
    call = call_of(layer, mode)
    outputs = [call(leaf(i) * 1, sizes(SPLITS), dgrad_out=buffer) for i in range(3)]
    for i, y in enumerate(outputs):
        y.square().sum().backward()
        x = leaf(i)
        twin(x, sizes(SPLITS)).square().sum().backward()
        assert torch.equal(buffer, x.grad)


@modes
def test_gradient_buffers_side_by_side_are_two(mode):
    room, x, twin = torch.zeros(2 * R, K), leaf(), leaf()
    gate, up = make(), make(seed=7)
    calls = [call_of(m, mode) for m in (gate, up)]
    parts = [f(x, sizes(SPLITS), dgrad_out=room[i * R : (i + 1) * R]) for i, f in enumerate(calls)]
    (parts[0] * parts[1]).sum().backward()
    (gate(twin, sizes(SPLITS)) * up(twin, sizes(SPLITS))).sum().backward()
    assert torch.equal(x.grad, twin.grad)


@modes
def test_gradients_of_a_leaf_add_up_although_one_buffer_takes_them(mode):
    layer, buffer, x, twin = make(), torch.zeros(R, K), leaf(), leaf()
    call = call_of(layer, mode)
    for i in (1, 3):
        (call(x, sizes(SPLITS), dgrad_out=buffer) * i).sum().backward()
        (layer(twin, sizes(SPLITS)) * i).sum().backward()
    assert torch.equal(x.grad, twin.grad)


def test_a_gradient_that_waits_for_backward_dw_is_not_overwritten_in_silence():
    first, last, buffer = make(delay_wgrad_compute=True), make(seed=7), torch.zeros(R, K)
    for seed in (1, 2):
        last(first(leaf(seed), sizes(SPLITS)), sizes(SPLITS), dgrad_out=buffer).sum().backward()
    with pytest.raises(UnsupportedConfig, match="written to since"):
        first.backward_dw()  # the first one's dy was in the buffer that has the second one's


# -- one buffer, several calls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("which", ["out", "dgrad_out"])
def test_one_buffer_for_two_calls_of_a_graph_is_refused(which, backend):
    layer = make()
    buffer = torch.zeros(R, K)

    def call(x):
        given = {which: buffer}
        return torch.relu(layer(x, sizes_, **given)) + torch.relu(layer(x * 0.5, sizes_, **given))

    sizes_ = sizes(SPLITS)
    with pytest.raises(Exception, match=f"two calls in one graph write to one {which}"):
        torch.compile(call, fullgraph=True, backend=backend)(leaf())


def test_two_buffers_for_two_calls_of_a_graph():
    layers, sizes_ = [make(), make(seed=7)], sizes(SPLITS)
    outs, grads = [torch.zeros(R, K) for _ in range(2)], [torch.zeros(R, K) for _ in range(2)]

    def call(*inputs):  # nothing but our nodes: what lies between them would be C++ for Inductor to compile
        given = zip(layers, inputs, outs, grads, strict=True)
        return [layer(x, sizes_, out=out, dgrad_out=dx) for layer, x, out, dx in given]

    found = []
    for run in (torch.compile(call, fullgraph=True), call):
        inputs = [leaf(seed) for seed in range(2)]
        parts = run(*inputs)
        (torch.relu(parts[0]) + torch.relu(parts[1])).sum().backward()
        found.append([*[y.detach().clone() for y in parts], *[x.grad.clone() for x in inputs]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_one_gradient_buffer_for_two_calls_of_a_backward_is_refused():
    gate, up, buffer, x = make(), make(seed=7), torch.zeros(R, K), leaf()
    y = gate(x, sizes(SPLITS), dgrad_out=buffer) * up(x, sizes(SPLITS), dgrad_out=buffer)
    with pytest.raises(UnsupportedConfig, match=r"one dgrad_out\. Give each call a buffer"):
        y.sum().backward()


def test_a_buffer_is_reused_in_the_next_backward():
    layer, buffer = make(), torch.zeros(R, K)
    for seed in range(3):
        x, twin = leaf(seed), leaf(seed)
        layer(x, sizes(SPLITS), dgrad_out=buffer).square().sum().backward()
        layer(twin, sizes(SPLITS)).square().sum().backward()
        assert torch.equal(buffer, twin.grad)


def test_values_that_backward_needs_are_not_overwritten_in_silence():
    first, second, buffer, x = make(), make(seed=7), torch.zeros(R, K), leaf()
    y = first(x, sizes(SPLITS), out=buffer).square().sum() + second(x, sizes(SPLITS), out=buffer).square().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_two_slices_of_one_allocation_do_not_disturb_each_other():
    layer, room, x, twin = make(), torch.zeros(2 * R, K), leaf(), leaf()
    sum(layer(x * i, sizes(SPLITS), out=room[i * R : (i + 1) * R]).square().sum() for i in range(2)).backward()
    sum(layer(twin * i, sizes(SPLITS)).square().sum() for i in range(2)).backward()
    assert torch.equal(x.grad, twin.grad)


def test_a_static_buffer_is_not_exchanged_for_one_that_moves():
    layer, sizes_ = make(), sizes(SPLITS)
    call = torch.compile(lambda x, out: layer(x, sizes_, out=out), mode="reduce-overhead", fullgraph=True)
    x = leaf().detach()
    with torch.no_grad():
        call(x, octavo.buffer(R, K))
        with pytest.raises(Exception, match=r"octavo\.buffer"):
            call(x, torch.zeros(R, K))


# -- a second write before the first one's backward --------------------------------------------------------------------


def frozen(layer):
    return layer.requires_grad_(False)


SECOND = {
    "with gradients": (lambda m: m, nullcontext, leaf),
    "no_grad": (lambda m: m, torch.no_grad, leaf),
    "inference_mode": (lambda m: m, torch.inference_mode, rows),
    "frozen": (frozen, nullcontext, rows),
    "compiled": (lambda m: call_of(m, "aot_eager"), nullcontext, leaf),
    "compiled, no_grad": (lambda m: call_of(m, "aot_eager"), torch.no_grad, rows),
    "compiled, frozen": (lambda m: call_of(frozen(m), "aot_eager"), nullcontext, rows),
}
PLACES = {
    "whole": lambda: [torch.zeros(R, K)] * 2,
    "one slice": lambda: [torch.zeros(2 * R, K)[5 : 5 + R]] * 2,
    "overlapping": overlapping,
    "overlapping, versions of their own": lambda: [t.data for t in overlapping()],
}


def assert_noticed(first, second, context, x, places):
    """A second write over a y that the operation after it has saved."""
    y = first(leaf(), sizes(SPLITS), out=places[0])
    loss = (y * torch.ones(K, requires_grad=True)).sum()
    with context():
        second(x, sizes(SPLITS), out=places[1])
    with pytest.raises(RuntimeError, match=r"inplace operation|modified inplace"):
        loss.backward()


@pytest.mark.parametrize(
    ("way", "place"),
    [(way, place) for way in SECOND for place in PLACES if not way.startswith("compiled,") or place == "one slice"],
)
def test_a_second_write_is_noticed(way, place):
    make_call, context, x = SECOND[way]
    assert_noticed(make(), make_call(make(seed=7)), context, x(3), PLACES[place]())


@pytest.mark.parametrize("way", ["no_grad", "frozen", "compiled"])
def test_a_second_write_over_a_y_without_a_gradient_is_noticed(way):
    make_call, context, x = SECOND[way]
    assert_noticed(frozen(make()), make_call(make(seed=7)), context, x(3), PLACES["overlapping"]())


@pytest.mark.parametrize(("first", "second"), [("inductor", "eager"), ("eager", "inductor")])
def test_a_second_write_is_noticed_between_eager_mode_and_inductor(first, second):
    torch._dynamo.reset()
    calls = [
        make(seed=i) if mode == "eager" else torch.compile(make(seed=i), fullgraph=True)
        for i, mode in enumerate((first, second))
    ]
    assert_noticed(*calls, torch.no_grad, rows(3), PLACES["overlapping, versions of their own"]())


@pytest.mark.parametrize("way", list(SECOND)[:5])
def test_a_second_write_beside_an_output_disturbs_nothing(way):
    make_call, context, x = SECOND[way]
    layer, second, room = make(), make_call(make(seed=7)), torch.zeros(2 * R, K)
    a, twin = leaf(), leaf()
    loss = layer(a, sizes(SPLITS), out=room[:R]).square().sum()
    with context():
        second(x(3), sizes(SPLITS), out=room[R:])
    loss.backward()
    layer(twin, sizes(SPLITS)).square().sum().backward()
    assert torch.equal(a.grad, twin.grad)


def test_what_the_caller_writes_to_a_buffer_is_noticed():
    buffer = torch.zeros(R, K)
    loss = make()(leaf(), sizes(SPLITS), out=buffer).square().sum()
    buffer.zero_()
    with pytest.raises(RuntimeError, match=NEED):
        loss.backward()


def test_a_y_may_be_changed_in_place():
    layer, buffer, x, twin = make(), torch.zeros(R, K), leaf(), leaf()
    layer(x, sizes(SPLITS), out=buffer).relu_().square().sum().backward()
    layer(twin, sizes(SPLITS)).relu_().square().sum().backward()
    assert torch.equal(x.grad, twin.grad)


def test_a_gradient_over_a_y_that_is_still_needed_is_noticed():
    layer, buffer, p = make(), torch.zeros(R, K), torch.ones(K, requires_grad=True)
    y = layer(leaf(), sizes(SPLITS), out=buffer)
    kept = (y.detach() * p).sum()
    make(seed=7)(leaf(2), sizes(SPLITS), dgrad_out=buffer).sum().backward()
    with pytest.raises(RuntimeError, match=NEED):
        kept.backward()


def test_a_buffer_that_is_used_again_and_again_is_remembered_once():
    layer, buffer = make(), torch.zeros(R, K)
    for seed in range(5):
        layer(leaf(seed), sizes(SPLITS), out=buffer).sum().backward()
    assert len(caller_memory._values[buffer.untyped_storage().data_ptr()]) == 1


# -- memory that something else has saved ------------------------------------------------------------------------------


def test_a_gradient_written_over_what_another_layer_saved_is_noticed():
    layer, before, saved = make(), torch.nn.Linear(K, K), torch.randn(R, K)
    y = layer(before(saved), sizes(SPLITS), dgrad_out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_slices_of_one_allocation_do_not_disturb_each_other():
    layer, before, room = make(), torch.nn.Linear(K, K), torch.randn(2 * R, K)
    layer(before(room[:R]), sizes(SPLITS), dgrad_out=room[R:]).sum().backward()
    assert before.weight.grad is not None


def test_a_gradient_in_the_grad_of_an_input_is_refused():
    layer, x = make(), leaf()
    layer(x, sizes(SPLITS)).sum().backward()
    with pytest.raises(UnsupportedConfig, match=r"lies in x\.grad"):
        layer(x, sizes(SPLITS), dgrad_out=x.grad)
