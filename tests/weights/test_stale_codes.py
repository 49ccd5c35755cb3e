"""Cached codes of a weight that has changed since, where no version counter tells of it: graphs, inference tensors, and
optimizers that write to `p.data`."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.errors import UnsupportedConfig
from octavo.weights import optimizer_hooks
from tests.support.compiled_twins import graphs, refused
from tests.support.linear_oracle import assert_same, make, spiky
from tests.support.recipe_traits import QUANTIZED
from tests.support.steps import compiled
from tests.support.training import seeded

X = spiky(24, 48, seed=7)
MARKS = ("is_first_microbatch=False uses cached codes", "has changed since")


grouped = partial(seeded, octavo.GroupedLinear, 2, 48, 40, recipe="fp8-block", single_grouped_weight=False)


class Experts(nn.Module):
    """Groups as a module that takes x alone."""

    def __init__(self):
        super().__init__()
        self.layer = grouped()
        self.register_buffer("sizes", torch.tensor([10, 14]))

    def forward(self, x, **flags):
        return self.layer(x, self.sizes, **flags)


def sgd(layer, **settings):
    return torch.optim.SGD(layer.parameters(), lr=0.5, **settings)


def train(call, *flags, x=X):
    for flag in flags:
        call(x, is_first_microbatch=flag).sum().backward()


def fresh(call, layer):
    """Codes of the newest weight are used."""
    with torch.no_grad():
        assert_same(call(X, is_first_microbatch=False), layer(X))
    return True


# -- in a graph --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
class TestInAGraph:
    @pytest.mark.parametrize("recipe", QUANTIZED)
    def test_a_step_makes_a_cache_stale(self, recipe):
        layer = make(recipe)
        call, optimizer = compiled(layer), sgd(layer)
        for _ in range(2):
            train(call, True, False, False)
            optimizer.step()
            assert refused(lambda: call(X, is_first_microbatch=False), words=MARKS)

    def test_a_step_costs_no_graph(self):
        layer = make("fp8-block")
        call, optimizer = compiled(layer), sgd(layer)
        for _ in range(4):
            train(call, True, False)
            optimizer.step()
        assert graphs() == 2

    def test_a_step_makes_a_cache_of_groups_stale(self):
        model = Experts()
        call, optimizer = compiled(model), torch.optim.SGD([model.layer.weight1], lr=0.5)
        train(call, True, False)
        optimizer.step()
        assert refused(lambda: call(X, is_first_microbatch=False), words=MARKS)

    def test_a_graph_with_breaks_refuses_too(self):
        layer = make("fp8-block")
        call, optimizer = torch.compile(layer, backend="aot_eager"), sgd(layer)
        train(call, True, False)
        optimizer.step()
        assert refused(lambda: call(X, is_first_microbatch=False), words=MARKS)

    def test_a_block_around_the_graph(self):
        layer = make("fp8-block")
        call, optimizer = compiled(layer), sgd(layer)
        for first in (True, False):
            with octavo.microbatch(first=first):
                call(X).sum().backward()
        optimizer.step()
        with octavo.microbatch(first=False):
            assert refused(lambda: call(X), words=MARKS)
        with octavo.microbatch(first=True):
            call(X)
        with octavo.microbatch(first=False):
            call(X)

    @pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
    def test_a_compiled_step(self, backend):
        layer = make("fp8-block")
        call, optimizer = compiled(layer, backend=backend), sgd(layer, fused=True)
        step = torch.compile(optimizer.step, backend=backend)
        for _ in range(2):
            train(call, True, False)
            step()
            assert refused(lambda: call(X, is_first_microbatch=False), words=MARKS)

    def test_a_step_with_a_closure(self):
        layer = make("fp8-block")
        call, optimizer = compiled(layer), sgd(layer)

        def closure():
            train(call, True, False)
            return torch.ones(())

        optimizer.step(closure)
        assert refused(lambda: call(X, is_first_microbatch=False), words=MARKS)

    @pytest.mark.parametrize("how", ["eager", "graph", "attach", "refresh_weights"])
    def test_ways_out(self, how):
        layer = make("fp8-block")
        call, optimizer = compiled(layer), sgd(layer)
        if how == "attach":
            octavo.attach(layer, optimizer)
        train(call, True, False)
        for _ in range(2):
            optimizer.step()
            if how in ("eager", "graph"):
                {"eager": layer, "graph": call}[how](X, is_first_microbatch=True)
            if how == "refresh_weights":
                octavo.refresh_weights(layer)
            assert fresh(call, layer)

    def test_layers_that_share_a_graph_have_caches_of_their_own(self):
        layers = [make("fp8-block", seed=i) for i in range(2)]
        optimizers = [sgd(layer) for layer in layers]

        def forward(layer, x, first):
            return layer(x, is_first_microbatch=first)

        call = compiled(forward)
        for layer in layers:
            for first in (True, False):
                call(layer, X, first).sum().backward()
        optimizers[0].step()
        assert fresh(lambda x, is_first_microbatch: call(layers[1], x, is_first_microbatch), layers[1])
        assert refused(lambda: call(layers[0], X, False), words=MARKS)

    def test_a_copy_is_heard_from_the_start(self):
        layer = make("fp8-block")
        call = compiled(lambda layer, x, first: layer(x, is_first_microbatch=first))
        call(layer, X, True)
        call(layer, X, False)
        twin = copy.deepcopy(layer)
        call(twin, X, False).sum().backward()
        optimizer, other = sgd(twin), sgd(layer)
        optimizer.step()
        assert fresh(lambda x, is_first_microbatch: call(twin, x, is_first_microbatch), twin)  # cold: filled
        optimizer.step()
        assert refused(lambda: call(twin, X, False), words=MARKS)
        assert fresh(lambda x, is_first_microbatch: call(layer, x, is_first_microbatch), layer)
        assert other.param_groups

    def test_a_step_that_leaves_a_weight_alone_leaves_its_cache(self):
        layer, other = make("fp8-block"), nn.Linear(3, 3)
        call = compiled(layer)
        optimizer = torch.optim.SGD([*layer.parameters(), *other.parameters()], lr=0.5)
        call(X, is_first_microbatch=True)
        other(torch.ones(3)).sum().backward()
        optimizer.step()
        assert fresh(call, layer)

    def test_an_optimizer_that_has_not_stepped_yet_keeps_its_weights_caches(self):
        """Two players in turn: the second one's optimizer exists, and its steps will be heard."""
        layer, other = make("fp8-block"), make("fp8-block", seed=3)
        call, mine, theirs = compiled(layer), sgd(layer), sgd(other)
        for _ in range(2):
            train(call, True)
            train(other, True)
            theirs.step()
            assert fresh(call, layer)
            train(call, False)
            mine.step()

    def test_a_frozen_layer_keeps_its_cache(self):
        layer, other = make("fp8-block"), make("fp8-block", seed=3)
        layer.requires_grad_(False)
        call, optimizer = compiled(layer), sgd(other)
        call(X, is_first_microbatch=True)
        for _ in range(2):
            train(other, True)
            optimizer.step()
            octavo.step(layer)
            assert fresh(call, layer)
        assert graphs() == 2

    def test_an_optimizer_of_copies_vouches_for_nothing(self):
        layer = make("fp8-block")
        call, masters = compiled(layer), [p.detach().clone().requires_grad_() for p in layer.parameters()]
        optimizer = torch.optim.SGD(masters, lr=0.5)
        train(call, True, False)
        for master, p in zip(masters, layer.parameters(), strict=True):
            master.grad = p.grad.clone()
        optimizer.step()
        for master, p in zip(masters, layer.parameters(), strict=True):
            p.data.copy_(master.detach())
        assert refused(lambda: call(X, is_first_microbatch=False), words=("no torch optimizer holds this weight",))

    def test_the_end_of_a_step_without_an_optimizer_of_torchs(self):
        layer = make("fp8-block")
        call = compiled(layer)
        train(call, True, False)
        layer.weight.data.sub_(layer.weight.grad)
        octavo.step(layer)
        assert refused(lambda: call(X, is_first_microbatch=False), words=("no torch optimizer holds this weight",))
        train(call, True, False)

    def test_loaded_weights(self):
        layer, other = make("fp8-block"), make("fp8-block", seed=3)
        call = compiled(layer)
        train(call, True, False)
        layer.load_state_dict(other.state_dict())
        assert refused(lambda: call(X, is_first_microbatch=False), words=MARKS)

    def test_a_captured_step_is_never_trusted_again(self, monkeypatch):
        layer = make("fp8-block")
        call, optimizer = compiled(layer), sgd(layer)
        train(call, True, False)
        monkeypatch.setattr(optimizer_hooks, "is_capturing", lambda: True)
        optimizer.step()
        monkeypatch.undo()
        train(call, True)
        assert refused(lambda: call(X, is_first_microbatch=False), words=("captured in a CUDA graph",))

    def test_inside_a_checkpoint(self):
        """There a graph can leave nothing behind in Python, so it checks nothing."""
        layer = make("fp8-block")
        optimizer = sgd(layer)
        call = compiled(lambda x, first: checkpoint(layer, x, first, use_reentrant=False))
        for _ in range(2):
            for first in (True, False):
                y = call(X, first)
                assert_same(y.detach(), layer(X).detach())
                y.sum().backward()
            optimizer.step()


def test_layers_that_are_no_more_are_told_nothing():
    """One that was reverted, and one whose constructor raised."""
    model = nn.Sequential(nn.Linear(48, 48))
    octavo.convert(model, "fp8-block")
    with octavo.microbatch(first=True):
        model(X).sum().backward()
    octavo.revert(model)
    with pytest.raises(octavo.errors.Unsupported) as kept:
        octavo.Linear(48, 48, recipe="no such recipe")
    sgd(model).step()
    octavo.convert(model, "fp8-block")
    with octavo.microbatch(first=True):
        model(X).sum().backward()
    sgd(model).step()
    assert kept and "changed since" in str(refusal_of(model[0]))


def refusal_of(layer):
    with pytest.raises(UnsupportedConfig) as caught:
        layer(X, is_first_microbatch=False)
    return caught.value


# -- weights without a version counter ---------------------------------------------------------------------------------


@torch.inference_mode()
def inference_layer():
    return make("fp8-block")


def test_a_weight_that_is_an_inference_tensor_is_quantized_at_each_call():
    layer = inference_layer()
    assert layer.weight.is_inference()
    with torch.inference_mode():
        layer(X, is_first_microbatch=True)
        for _ in range(2):
            layer.weight.mul_(1.7)
            assert fresh(layer, layer)
            with octavo.microbatch(first=True):
                layer(X)
                layer.weight.mul_(1.7)
                assert_same(layer(X), layer(X, is_first_microbatch=True))


@pytest.mark.usefixtures("fresh_compiler")
def test_and_in_a_graph():
    layer = inference_layer()
    call = compiled(layer)
    with torch.inference_mode():
        call(X, is_first_microbatch=True)
        for _ in range(2):
            layer.weight.mul_(1.7)
            assert fresh(call, layer)


def test_a_weight_that_was_replaced_by_an_inference_tensor_is_another():
    layer = make("fp8-block")
    layer(X, is_first_microbatch=True)
    with torch.inference_mode():
        layer.weight = nn.Parameter(2 * layer.weight.detach(), requires_grad=False)
        with pytest.raises(UnsupportedConfig, match="another tensor"):
            layer(X, is_first_microbatch=False)
        layer(X, is_first_microbatch=True)
        assert fresh(layer, layer)


def test_an_inference_tensor_among_groups():
    layer, sizes = grouped(), torch.tensor([10, 14])
    with torch.inference_mode():
        layer.weight1 = nn.Parameter(layer.weight1.detach().clone(), requires_grad=False)
        assert layer.weight1.is_inference()
        layer(X, sizes, is_first_microbatch=True)
        layer.weight1.mul_(1.7)
        assert_same(layer(X, sizes, is_first_microbatch=False), layer(X, sizes))


# -- optimizers that nothing tells of ----------------------------------------------------------------------------------


class Plain:
    """An optimizer that is none of torch's, and writes behind the version counter's back."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    def step(self):
        for p in self.parameters:
            p.data.sub_(p.grad, alpha=0.5)


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-delayed", "nvfp4"])
@pytest.mark.parametrize("zero", [True, False])
def test_one_block_over_steps_of_an_optimizer_that_writes_data(recipe, zero):
    layer, plain = make(recipe), make(recipe)
    octavo.load_state_dict(plain, octavo.state_dict(layer))
    optimizers = [Plain(m.parameters()) for m in (layer, plain)]
    with octavo.microbatch(first=True):
        for i in range(3):
            y = layer(X)
            with octavo.microbatch(first=None):
                want = plain(X)
            assert_same(y.detach(), want.detach(), f"step {i}")
            for out, m, optimizer in zip((y, want), (layer, plain), optimizers, strict=True):
                out.square().sum().backward()
                optimizer.step()
                if zero:
                    m.zero_grad()
    assert_same(layer.weight.detach(), plain.weight.detach())


def test_forwards_in_flight_in_one_block_keep_their_codes():
    """No optimizer is known, so the second call quantizes again, to the same codes; the first backward still runs."""
    layer, plain = make("fp8-block"), make("fp8-block")
    with octavo.microbatch(first=True):
        losses = [layer(X).sum(), layer(2 * X).square().sum()]
    for loss in losses:
        loss.backward()
    plain(X).sum().backward()
    plain(2 * X).square().sum().backward()
    assert_same(layer.weight.grad, plain.weight.grad)


def test_a_block_quantizes_once_where_torchs_optimizer_holds_the_weight(monkeypatch):
    layer, casts = make("fp8-block"), []
    optimizer, fill = sgd(layer), type(layer._codes).fill
    monkeypatch.setattr(type(layer._codes), "fill", lambda *a, **k: (casts.append(True), fill(*a, **k)))
    for step in range(3):
        with octavo.microbatch(first=True):
            for _ in range(3):
                layer(X).sum().backward()
        assert len(casts) == (3 if step == 0 else 1)  # an optimizer is known once it has stepped
        casts.clear()
        optimizer.step()
