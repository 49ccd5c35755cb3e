"""GroupedLinear used in ways that would give wrong numbers without a word: each is right, or refused in a sentence."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import octavo
from octavo.errors import UnsupportedConfig, UnsupportedDtype, UnsupportedShape

G, K, N, R = 3, 32, 48, 32
EACH = {"single_grouped_weight": False, "single_grouped_bias": False}
each = pytest.mark.parametrize("layout", [{}, EACH], ids=["single", "per group"])


def sizes():
    return torch.tensor([10, 5, 17])


def make(seed=0, n=N, **settings):
    torch.manual_seed(seed)
    return octavo.GroupedLinear(G, K, n, **settings)


def leaf(seed=1):
    torch.manual_seed(seed)
    return torch.randn(R, K).requires_grad_()


# -- buffers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("which", ["out", "dgrad_out"])
def test_one_buffer_for_two_calls_of_a_graph_is_refused(which, backend):
    layer = make()
    buffer = torch.zeros(R, N if which == "out" else K)

    def call(x):
        given = {which: buffer}
        return torch.relu(layer(x, sizes_, **given)) + torch.relu(layer(x * 0.5, sizes_, **given))

    sizes_ = sizes()
    with pytest.raises(Exception, match=f"two calls in one graph write to one {which}"):
        torch.compile(call, fullgraph=True, backend=backend)(leaf())


def test_two_buffers_for_two_calls_of_a_graph():
    layer, sizes_ = make(), sizes()
    outs, grads = [torch.zeros(R, N) for _ in range(2)], [torch.zeros(R, K) for _ in range(2)]

    def call(x):
        parts = [layer(x * (i + 1), sizes_, out=outs[i], dgrad_out=grads[i]) for i in range(2)]
        return torch.relu(parts[0]) + torch.relu(parts[1])

    x, twin = leaf(), leaf()
    torch.compile(call, fullgraph=True)(x).sum().backward()
    call(twin).sum().backward()
    assert torch.equal(x.grad, twin.grad)


def test_one_gradient_buffer_for_two_calls_of_a_backward_is_refused():
    gate, up, buffer, x = make(), make(7), torch.zeros(R, K), leaf()
    y = gate(x, sizes(), dgrad_out=buffer) * up(x, sizes(), dgrad_out=buffer)
    with pytest.raises(UnsupportedConfig, match=r"one dgrad_out\. Give each call a buffer"):
        y.sum().backward()


def test_a_buffer_is_reused_in_the_next_backward():
    layer, buffer = make(), torch.zeros(R, K)
    for seed in range(3):
        x, twin = leaf(seed), leaf(seed)
        layer(x, sizes(), dgrad_out=buffer).square().sum().backward()
        layer(twin, sizes()).square().sum().backward()
        assert torch.equal(buffer, twin.grad)


def test_values_that_backward_needs_are_not_overwritten_in_silence():
    first, second, buffer, x = make(), make(7), torch.zeros(R, N), leaf()
    y = first(x, sizes(), out=buffer).square().sum() + second(x, sizes(), out=buffer).square().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_two_slices_of_one_allocation_do_not_disturb_each_other():
    layer, room, x, twin = make(), torch.zeros(2 * R, N), leaf(), leaf()
    sum(layer(x * i, sizes(), out=room[i * R : (i + 1) * R]).square().sum() for i in range(2)).backward()
    sum(layer(twin * i, sizes()).square().sum() for i in range(2)).backward()
    assert torch.equal(x.grad, twin.grad)


def test_a_buffer_in_the_memory_of_what_dw_needs_is_refused():
    layer = make(n=K)
    h = leaf() * 1
    with pytest.raises(UnsupportedConfig, match="out lies in the memory of x"):
        layer(h, sizes(), out=h.detach())
    with pytest.raises(UnsupportedConfig, match="dgrad_out lies in the memory of x"):
        layer(h, sizes(), dgrad_out=h.detach()).sum().backward()
    dy = torch.randn(R, K)
    with pytest.raises(UnsupportedConfig, match="dgrad_out lies in the memory of dy"):
        layer(leaf(), sizes(), dgrad_out=dy).backward(dy)


def test_where_codes_are_copies_a_buffer_may_be_the_input():
    layer, twin = make(n=K, recipe="fp8-current"), make(n=K, recipe="fp8-current")
    h = leaf() * 1
    layer(h, sizes(), out=h.detach()).sum().backward()
    twin(leaf() * 1, sizes()).sum().backward()
    assert torch.equal(layer.weight.grad, twin.weight.grad)


def test_a_static_buffer_is_not_exchanged_for_one_that_moves():
    layer, sizes_ = make(), sizes()
    call = torch.compile(lambda x, out: layer(x, sizes_, out=out), mode="reduce-overhead", fullgraph=True)
    x = leaf().detach()
    with torch.no_grad():
        call(x, octavo.buffer(R, N))
        with pytest.raises(Exception, match=r"octavo\.buffer"):
            call(x, torch.zeros(R, N))


# -- parameters --------------------------------------------------------------------------------------------------------


@each
def test_a_weight_that_changed_before_backward_is_noticed(layout):
    layer, x = make(**layout), leaf()
    y = layer(x, sizes())
    with torch.no_grad():
        next(layer.parameters()).mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def given_gradients(layer):
    for p in layer.weight_parts():
        p.main_grad = torch.zeros_like(p)


def all_frozen(layer):
    for p in layer.weight_parts():
        p.requires_grad_(False)


WAYS = {
    "trained": ({}, lambda layer: None),
    "frozen": ({}, all_frozen),
    "one frozen": ({}, lambda layer: layer.weight_parts()[0].requires_grad_(False)),
    "main_grad": ({"fuse_wgrad_accumulation": True}, given_gradients),
    "delayed": ({"delay_wgrad_compute": True}, lambda layer: None),
}


@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("recipe", ["bf16", "fp8-block(dgrad='bf16')", "fp8-current"])
@pytest.mark.parametrize("way", WAYS)
@each
def test_a_weight_that_changes_before_backward_is_refused_or_does_not_matter(layout, way, recipe, which):
    settings, prepare = WAYS[way]
    layer, twin = (make(recipe=recipe, **layout, **settings) for _ in range(2))
    x, other = leaf(), leaf()
    prepare(layer), prepare(twin)
    y, want = layer(x, sizes()), twin(other, sizes())
    want.sum().backward()
    with torch.no_grad():
        layer.weight_parts()[which].mul_(3)
    if recipe == "fp8-current":  # codes are copies
        y.sum().backward()
        assert torch.equal(x.grad, other.grad)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        assert x.grad is None


def test_weights_that_lie_apart_are_copied_by_forward():
    layer, twin = make(**EACH), make(**EACH)
    x, other = leaf(), leaf()
    layer.weight1.data = layer.weight1.data.clone()
    y = layer(x, sizes())
    with torch.no_grad():
        layer.weight1.mul_(3)
    y.sum().backward()
    twin(other, sizes()).sum().backward()
    assert torch.equal(x.grad, other.grad)


def lies_together(layer):
    first, *rest = layer.weight_parts()
    return all(p.data_ptr() == first.data_ptr() + (i + 1) * first.nbytes for i, p in enumerate(rest))


def test_weights_of_the_groups_stay_in_one_allocation():
    layer = make(**EACH)
    for other in (
        layer, copy.deepcopy(layer), make(**EACH).to(torch.bfloat16), make(**EACH, device="meta").to_empty(device="cpu")
    ):  # fmt: skip
        assert lies_together(other)
    layer.load_state_dict({k: v.clone() for k, v in make(3).state_dict().items()}, assign=True)
    assert lies_together(layer)


def test_shared_memory_stays_shared():
    for layer in (make(**EACH), copy.deepcopy(make(**EACH))):
        assert all(p.is_shared() for p in layer.share_memory().parameters())


def test_held_codes_of_groups_are_all_there_is():
    layer = make(recipe="fp8-current", **EACH)
    octavo.quantize_weights(layer)
    for p in layer.weight_parts():
        p.requires_grad_(False)
    assert layer._stacked_weight(layer.weight_parts()).untyped_storage().nbytes() == 4
    octavo.revert(layer)
    assert not layer._codes.held
    assert all(p.stride() == (K, 1) for p in layer.weight_parts())


def test_a_checkpoint_of_both_forms_is_refused():
    state = {**make().state_dict(), "weight1": torch.zeros(N, K), "weight2": torch.zeros(N, K)}
    with pytest.raises(RuntimeError, match="weight"):
        make(**EACH).load_state_dict(state)
    with pytest.raises(RuntimeError, match="weight0"):
        make(**EACH).load_state_dict({**make(single_grouped_bias=False).state_dict(), "weight": torch.tensor(1.0)})


# -- main_grad ---------------------------------------------------------------------------------------------------------


def fused(buffers):
    layer = make(fuse_wgrad_accumulation=True, **EACH)
    for p, buffer in zip(layer.weight_parts(), buffers, strict=True):
        p.main_grad = buffer
    return layer


def test_an_empty_buffer_of_a_trained_weight_is_refused():
    with pytest.raises(UnsupportedShape, match="must hold"):
        fused([torch.zeros(N, K), torch.zeros(0), torch.zeros(N, K)])(leaf(), sizes()).sum().backward()


def test_a_wide_buffer_beside_a_narrow_one_keeps_its_bits():
    layer, twin = fused([torch.zeros(N, K, dtype=d) for d in (torch.bfloat16, torch.float32, torch.float32)]), make()
    for m in (layer, twin):
        m(leaf(), sizes()).square().sum().backward()
    assert torch.equal(layer.weight1.main_grad, twin.weight.grad[1])


@pytest.mark.parametrize("buffer", [torch.zeros(K, N).t(), torch.zeros(N, 2 * K)[:, :K]], ids=["turned", "apart"])
def test_a_buffer_that_takes_a_copy_is_refused(buffer):
    with pytest.raises(UnsupportedShape, match="contiguous"):
        fused([torch.zeros(N, K), buffer, torch.zeros(N, K)])(leaf(), sizes()).sum().backward()


# -- modes, dtypes, sizes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "nvfp4"])
@pytest.mark.parametrize("what", ["plain", "out", "fused", "delayed", "cached"])
@each
def test_fake_tensors_go_through(layout, recipe, what):
    with FakeTensorMode():
        settings = {"fuse_wgrad_accumulation": what == "fused", "delay_wgrad_compute": what == "delayed"}
        layer = make(recipe=recipe, **settings, **layout)
        for p in layer.weight_parts():
            p.main_grad = torch.zeros(p.shape)
        x = torch.empty(R, K, requires_grad=True)
        given = {"out": torch.empty(R, N), "dgrad_out": torch.empty(R, K)} if what == "out" else {}
        y = layer(x, torch.empty(G, dtype=torch.int64), True if what == "cached" else None, **given)
        y.sum().backward()
        assert y.shape == (R, N) and x.grad.shape == (R, K)


def test_flops_do_not_depend_on_buffers_or_sizes():
    counts = set()
    for given in ({}, {"out": torch.zeros(R, N)}):
        for splits in ([10, 5, 17], [10, 0, 17]):
            with FlopCounterMode(display=False) as counter:
                make(recipe="nvfp4")(leaf(), torch.tensor(splits), **given)
            counts.add(counter.get_total_flops())
    assert counts == {2 * R * K * N}


def test_dtypes_that_nothing_takes_are_named():
    for layer in (make().double(), make(dtype=torch.float64)):
        with pytest.raises(UnsupportedDtype, match="float64"):
            layer(leaf().detach(), sizes())


@pytest.mark.parametrize("groups", [0, 5000])
def test_a_number_of_groups_that_none_can_have_is_refused(groups):
    with pytest.raises(UnsupportedShape, match=f"got {groups}"):
        octavo.GroupedLinear(groups, K, N)


def test_no_features_at_all():
    layer = octavo.GroupedLinear(G, 0, N)
    assert torch.equal(layer(torch.zeros(R, 0), sizes())[:10], layer.bias[0].expand(10, N))


@pytest.mark.parametrize("flag", [torch.ones(2), torch.ones(0), "yes"], ids=str)
def test_a_flag_that_says_nothing_is_refused(flag):
    with pytest.raises((UnsupportedShape, UnsupportedConfig), match="is_first_microbatch"):
        make(recipe="fp8-current")(leaf(), sizes(), flag)


def test_the_meta_device():
    layer = make(device="meta")
    y = layer(torch.empty(R, K, device="meta"), torch.empty(G, dtype=torch.int64, device="meta"))
    assert y.shape == (R, N) and y.is_meta


def test_few_rows_and_many_are_one_graph():
    layer, sizes_ = make(), torch.tensor([1, 0, 1])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    call = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (64, 2, 5, 1000):
        call(torch.randn(rows, K), sizes_)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_an_optimizer_moves_weights_that_lie_together():
    layer, twin = make(**EACH), make()
    for model in (layer, twin):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for seed in range(3):
            optimizer.zero_grad()
            model(leaf(seed), sizes()).square().sum().backward()
            optimizer.step()
    assert torch.equal(torch.stack(layer.weight_parts()), twin.weight)
    assert isinstance(layer.weight0, nn.Parameter)


@pytest.mark.parametrize("recipe", octavo.recipes.SHIPPED)
def test_weights_of_one_element_each(recipe):
    """By its strides a weight [1, 1] looks like the placeholder of a weight held as codes, which is not read."""
    layers = [octavo.GroupedLinear(2, 1, 1, recipe=recipe, **layout) for layout in ({}, EACH)]
    layers[1].load_state_dict(layers[0].state_dict())
    octavo.load_state_dict(layers[1], octavo.state_dict(layers[0]))
    x, found = torch.randn(5, 1), []
    for layer in layers:
        leaf_x = x.clone().requires_grad_()
        y = layer(leaf_x, torch.tensor([2, 3]))
        y.backward(torch.ones(5, 1))
        found.append((y.detach(), leaf_x.grad, torch.stack([p.grad.flatten() for p in layer.weight_parts()]).flatten()))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) and one.count_nonzero()
