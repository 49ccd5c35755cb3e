"""octavo.microbatch: the weight cache of every layer in a block, in models whose forward passes no flag on."""

import copy
import threading
from functools import partial

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import octavo
from octavo.errors import UnsupportedConfig, UnsupportedShape
from octavo.recipes import SHIPPED
from octavo.recipes.ambient import ambient
from tests.support.linear_oracle import assert_same, make, spiky
from tests.support.recipe_traits import is_stateful
from tests.support.state_tensors import named_state

WIDTH, ROWS, EXPERTS = 32, 24, 2
every = pytest.mark.parametrize("recipe", SHIPPED)
some = pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-block", "nvfp4"])


class Flag:
    """Keywords of a model's forward, by hand; None in a model that takes none."""

    value = None


class Small(nn.Module):
    """A layer and a run of operations, in a forward that knows of no flag unless it is told one."""

    def __init__(self, recipe):
        super().__init__()
        self.flag = Flag()
        self.first = octavo.Linear(WIDTH, WIDTH, recipe=recipe)
        self.run = octavo.Sequential(octavo.Linear(WIDTH, WIDTH, recipe=recipe), octavo.ops.GELU())

    def forward(self, x):
        first = self.flag.value
        h = self.first(x, is_first_microbatch=first)
        return self.run(h, op_kwargs=None if first is None else {0: {"is_first_microbatch": first}})


class One(nn.Module):
    def __init__(self, recipe):
        super().__init__()
        self.flag = Flag()
        self.first = octavo.Linear(WIDTH, WIDTH, recipe=recipe)

    def forward(self, x):
        return self.first(x, is_first_microbatch=self.flag.value)


class Stranger(nn.Module):
    """All layers that have a weight."""

    def __init__(self, recipe):
        super().__init__()
        self.flag = Flag()
        self.first = octavo.Linear(WIDTH, WIDTH, recipe=recipe)
        self.experts = octavo.GroupedLinear(EXPERTS, WIDTH, WIDTH, recipe=recipe)
        self.norm_linear = octavo.LayerNormLinear(WIDTH, WIDTH, recipe=recipe)
        self.mlp = octavo.LayerNormMLP(WIDTH, WIDTH, recipe=recipe)
        self.run = octavo.Sequential(octavo.Linear(WIDTH, WIDTH, recipe=recipe), octavo.ops.GELU())
        self.register_buffer("sizes", torch.tensor([ROWS // 2, ROWS // 2]), persistent=False)

    def forward(self, x):
        first = self.flag.value
        h = self.experts(self.first(x, is_first_microbatch=first), self.sizes, is_first_microbatch=first)
        given = {} if first is None else {"is_first_microbatch": first}
        h = h + self.norm_linear(h, op_kwargs={1: given} if given else None)
        h = h + self.mlp(h, op_kwargs={1: given, 3: given} if given else None)
        return self.run(h, op_kwargs={0: given} if given else None)


def pair(recipe, kind=Small):
    """A model that is told nothing, and one that is given flags by hand."""
    torch.manual_seed(0)
    ours = kind(recipe)
    by_hand = copy.deepcopy(ours)
    by_hand.flag = Flag()
    return ours, by_hand


def batch(i):
    return spiky(ROWS, WIDTH, seed=30 + i)


def caches(model):
    return {name: buffer.clone() for name, buffer in named_state(model) if "codes" in name}


def assert_alike(ours, by_hand):
    for (name, p), q in zip(ours.named_parameters(), by_hand.parameters(), strict=True):
        assert_same(p.detach(), q.detach(), name)
        assert_same(p.grad, q.grad, f"{name}.grad")
    states = [octavo.state_dict(m) | caches(m) for m in (ours, by_hand)]
    assert states[0].keys() == states[1].keys()
    for name, want in states[1].items():
        assert_same(states[0][name], want, name)


def train(models, calls, steps=2, flags=(True, False, False), as_flag=lambda first: first):
    """Accumulation over microbatches: the first model in contexts, the second by hand."""
    optimizers = [torch.optim.SGD(m.parameters(), 0.01) for m in models]
    for step in range(steps):
        for i, first in enumerate(flags):
            with octavo.microbatch(first=as_flag(first)):
                y = calls[0](batch(3 * step + i))
            models[1].flag.value = as_flag(first)
            want = calls[1](batch(3 * step + i))
            assert_same(y.detach(), want.detach(), "y")
            y.square().mean().backward()
            want.square().mean().backward()
        assert_alike(*models)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.step()
            octavo.step(model)
            optimizer.zero_grad()


# -- the same as by hand -----------------------------------------------------------------------------------------------


@every
def test_accumulation_has_the_bits_of_flags_by_hand(recipe):
    models = pair(recipe, Stranger)
    train(models, models)
    assert bool(caches(models[0])) == (recipe != "bf16")


@some
def test_a_flag_on_the_device_decides_there(recipe):
    models = pair(recipe, Stranger)
    train(models, models, as_flag=lambda first: torch.tensor([first]))
    assert caches(models[0])


def compiled(model):
    """(the model compiled, a count of its graphs)"""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=counter, fullgraph=True), counter


@every
def test_compiled_accumulation_has_the_bits_of_flags_and_a_graph_for_each_value(recipe):
    models = pair(recipe, One)
    if is_stateful(recipe):  # whose first step measures, and is compiled for itself
        train(models, models, steps=1)
    call, counter = compiled(models[0])
    train(models, (call, models[1]), steps=2)
    assert counter.frame_count == 2


def test_all_kinds_of_layers_compiled():
    models = pair("fp8-block", Stranger)
    call, counter = compiled(models[0])
    train(models, (call, models[1]), steps=1, flags=(True, False))
    assert counter.frame_count == 2 and caches(models[0])


def test_a_flag_on_the_device_is_one_graph():
    models = pair("fp8-block", One)
    call, counter = compiled(models[0])
    train(models, (call, models[1]), as_flag=lambda first: torch.tensor([first]))
    assert counter.frame_count == 1


def test_entered_inside_of_a_compiled_function():
    ours, by_hand = pair("nvfp4", One)

    def step(x, more):
        with octavo.microbatch(first=True):
            y = ours(x)
            with octavo.microbatch(first=False):
                return y, ours(more)

    outputs, wanted = compiled(step)[0](batch(0), batch(1)), []
    assert ambient.first is None and ambient.outer_first is None
    for i, y in enumerate(outputs):
        by_hand.flag.value = i == 0
        wanted.append(by_hand(batch(i)))
        assert_same(y.detach(), wanted[i].detach(), "y")
    for made in (outputs, wanted):
        sum(y.square().mean() for y in made).backward()
    assert_alike(ours, by_hand)
    assert caches(ours)


# -- where it holds ----------------------------------------------------------------------------------------------------


X = spiky(21, 48, seed=10)


def served(layer):
    """How a call gets its weight: the cache is written (True), read (False) or left alone (None)."""
    before = layer._hidden.weight_row_codes.clone()
    with torch.no_grad():
        layer._hidden.weight_row_codes.fill_(0x38)  # ones of E4M3
        y, left = layer(X), layer._hidden.weight_row_codes.clone()
        layer._hidden.weight_row_codes.copy_(before)
    if torch.equal(left, before):
        return True
    assert (left == 0x38).all()
    plain = y - layer.bias  # of equal weights: equal columns
    return False if torch.allclose(plain, plain[:, :1].expand_as(plain), rtol=1e-3) else None


@pytest.fixture
def layer():
    found = make("fp8-current")
    found(X, is_first_microbatch=True)
    return found


def test_the_three_values(layer):
    assert served(layer) is None
    with octavo.microbatch(first=True):
        assert served(layer) is True
    with octavo.microbatch(first=False):
        assert served(layer) is False
    with octavo.microbatch(first=None):
        assert served(layer) is None


def test_a_flag_of_the_call_wins(layer):
    with octavo.microbatch(first=False):
        layer._hidden.weight_row_codes.zero_()
        layer(X, is_first_microbatch=True)
        assert layer._hidden.weight_row_codes.any()
    with octavo.microbatch(first=True):
        layer._hidden.weight_row_codes.zero_()
        layer(X, is_first_microbatch=False)
        assert not layer._hidden.weight_row_codes.any()


def test_nesting_and_entering_again(layer):
    first, later = octavo.microbatch(first=True), octavo.microbatch(first=False)
    with first:
        with later:
            assert served(layer) is False
            with first, octavo.microbatch(first=None):
                assert served(layer) is None
            assert served(layer) is False
        assert served(layer) is True
    assert served(layer) is None
    with later, octavo.autocast("mxfp8"):
        assert served(layer) is False
    with octavo.autocast("mxfp8"), later, octavo.autocast("nvfp4"):
        assert served(layer) is False
    assert served(layer) is None


def test_an_exception_leaves_the_block(layer):
    with pytest.raises(ZeroDivisionError), octavo.microbatch(first=True), octavo.microbatch(first=False):
        raise ZeroDivisionError
    assert served(layer) is None


def test_a_microbatch_context_belongs_to_its_thread(layer):
    seen = []
    with octavo.microbatch(first=False):
        thread = threading.Thread(target=lambda: seen.append(served(layer)))
        thread.start()
        thread.join()
        assert served(layer) is False
    assert seen == [None]


def test_a_stale_cache_is_refused_and_the_way_out_named(layer):
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(UnsupportedConfig, match=r"octavo\.microbatch\(first=True\)"), octavo.microbatch(first=False):
        layer(X)


def test_layers_without_a_recipe_follow_both_contexts():
    layer = make(None)
    with octavo.autocast("fp8-current"):
        with octavo.microbatch(first=True):
            with torch.no_grad():  # of a layer that is trained, an optimizer that is not torch's may have moved weights
                layer(X)
            assert served(layer) is False  # by now it is filled
        with octavo.microbatch(first=True):
            assert served(layer) is True
    with octavo.microbatch(first=False):
        layer(X)  # bf16 has nothing to cache


def test_a_layer_whose_weight_is_made_at_every_call_has_no_cache():
    """By hand that is refused; in a model of many layers the others still have theirs."""
    model = nn.Sequential(parametrizations.weight_norm(make("fp8-block", 48, 48)), make("fp8-block"))
    want = model(X)
    for first in (True, False):
        with octavo.microbatch(first=first):
            assert_same(model(X).detach(), want.detach())
    assert set(caches(model)) == {"1.weight_row_codes", "1.weight_column_codes"}


def test_weights_held_as_codes_stay():
    layer = make("fp8-block")
    octavo.quantize_weights(layer)
    want = layer(X)
    with octavo.microbatch(first=True):
        assert torch.equal(layer(X), want)


@pytest.mark.parametrize("first", [1, 0, "True", 1.0, [True], object], ids=repr)
def test_anything_else_is_refused_in_a_sentence(first):
    with pytest.raises(UnsupportedConfig, match=r"first=.* takes True, False, None or a tensor of one element, got"):
        octavo.microbatch(first=first)


@pytest.mark.parametrize("shape", [(2,), (0,), (1, 3)])
def test_a_tensor_of_several_elements_is_refused(shape):
    with pytest.raises(UnsupportedShape, match="one element"):
        octavo.microbatch(first=torch.zeros(shape))


# -- checkpoints -------------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A block that is recomputed in backward, outside of the context that its forward ran in."""

    def __init__(self, model, **settings):
        super().__init__()
        self.model, self.settings = model, settings

    def forward(self, x):
        return checkpoint(self.model, x, **self.settings)


REENTRANT = pytest.mark.parametrize("reentrant", [True, False])


def elsewhere(call):
    """In another thread, as backward on a GPU is."""
    errors = []

    def run():
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@REENTRANT
@pytest.mark.parametrize(
    ("recipe", "where"),
    [*[("fp8-delayed", w) for w in ("after", "inside", "thread")], ("fp8-block", "thread"), ("nvfp4", "after")],
)
def test_recomputation_uses_the_codes_of_its_forward(recipe, reentrant, where):
    ours, plain = pair(recipe)
    model = Checkpointed(ours, use_reentrant=reentrant)
    for step in range(2):
        for i in range(3):
            x, same = (batch(3 * step + i).requires_grad_() for _ in range(2))
            with octavo.microbatch(first=i == 0):
                y = model(x)
                loss = y.square().mean()
                if where == "inside":
                    loss.backward()
                elif where == "thread":
                    elsewhere(loss.backward)
            if where == "after":
                loss.backward()
            plain.flag.value = i == 0
            want = plain(same)
            want.square().mean().backward()
            assert_same(y.detach(), want.detach(), "y")
            assert_same(x.grad, same.grad, "dx")
        assert_alike(ours, plain)
        for m in (ours, plain):
            with torch.no_grad():
                for p in m.parameters():
                    p.sub_(p.grad, alpha=0.01)
            m.zero_grad()
            octavo.step(m)


@REENTRANT
@some
def test_backwards_of_several_microbatches_that_come_late(recipe, reentrant):
    ours, plain = pair(recipe)
    model = Checkpointed(ours, use_reentrant=reentrant)
    losses = []
    for i in range(3):
        with octavo.microbatch(first=i == 0):
            losses.append(model(batch(i).requires_grad_()).square().mean())
    for i, loss in enumerate(losses):
        loss.backward()
        plain(batch(i)).square().mean().backward()
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert_same(p.grad, q.grad, name)


def policy(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in octavo.sac_save_ops() else CheckpointPolicy.PREFER_RECOMPUTE


@some
def test_selective_checkpoints_find_the_operators_of_the_forward(recipe):
    ours, plain = pair(recipe, One)
    selective = partial(create_selective_checkpoint_contexts, policy)
    model = Checkpointed(nn.Sequential(ours, nn.ReLU()), use_reentrant=False, context_fn=selective)
    for i in range(3):
        with octavo.microbatch(first=i == 0):
            loss = model(batch(i).requires_grad_()).square().mean()
        loss.backward()
        plain.flag.value = i == 0
        plain(batch(i).requires_grad_()).relu().square().mean().backward()
    assert_alike(ours, plain)


@REENTRANT
def test_recomputation_of_a_forward_without_a_context_is_what_it_was(reentrant):
    """After a microbatch that had one: nothing of it is left over."""
    ours, plain = pair("fp8-block")
    model = Checkpointed(ours, use_reentrant=reentrant)
    with octavo.microbatch(first=True):
        model(batch(9).requires_grad_()).square().mean().backward()
    ours.zero_grad()
    with torch.no_grad():
        for m in (ours, plain):
            m.first.weight.mul_(1.5)  # the cache is stale, and not asked
    for i in range(2):
        model(batch(i).requires_grad_()).square().mean().backward()
        plain(batch(i)).square().mean().backward()
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert_same(p.grad, q.grad, name)


@pytest.mark.parametrize(
    ("recipe", "in_graph"), [("fp8-delayed", False), ("fp8-block", False), ("nvfp4", False), ("fp8-block", True)]
)
def test_a_block_that_recomputes_itself(recipe, in_graph):
    torch.manual_seed(0)
    block = octavo.LayerNormMLP(WIDTH, WIDTH, recipe=recipe, activation_recompute=True)
    twin = copy.deepcopy(block)
    call = compiled(block)[0] if in_graph else block
    for i in range(3):
        with octavo.microbatch(first=i == 0):
            y = call(batch(i))
        given = {"is_first_microbatch": i == 0}
        want = twin(batch(i), op_kwargs={1: given, 3: given})
        y.square().mean().backward()
        want.square().mean().backward()
        assert_same(y.detach(), want.detach())
    assert_alike(block, twin)


def test_a_checkpoint_inside_of_a_graph():
    ours, by_hand = pair("fp8-block", One)
    call, _ = compiled(Checkpointed(ours, use_reentrant=False))
    train((ours, by_hand), (call, by_hand), steps=1)


def test_a_checkpoint_around_a_graph_enters_the_block_itself():
    """The graph does not know that it is run for a second time: around it, torch notices that other tensors were
    saved."""
    ours, by_hand = pair("fp8-block", One)
    call, _ = compiled(ours)
    with octavo.microbatch(first=True):
        y = checkpoint(call, batch(0).requires_grad_(), use_reentrant=False)
    with pytest.raises(CheckpointError):
        y.sum().backward()
    ours.zero_grad()

    def block(x, first):
        with octavo.microbatch(first=first):
            return call(x)

    for i in range(2):
        by_hand.flag.value = i == 0
        checkpoint(block, batch(i).requires_grad_(), i == 0, use_reentrant=False).square().mean().backward()
        by_hand(batch(i).requires_grad_()).square().mean().backward()
    assert_alike(ours, by_hand)


# -- layers that are called twice, and flags on the device -------------------------------------------------------------


class Twice(nn.Module):
    """One layer at two depths, as ALBERT has them."""

    def __init__(self, recipe):
        super().__init__()
        self.layer = octavo.Linear(32, 32, recipe=recipe)

    def forward(self, x):
        return self.layer(torch.relu(self.layer(x)))


def gradients(model, call, x):
    model.zero_grad()
    call(x).sum().backward()
    return model.layer.weight.grad.clone()


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "fp8-block", "mxfp8"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_layer_that_is_called_twice_fills_its_cache_once_a_block(recipe, compiled):
    torch.manual_seed(0)
    model, x = Twice(recipe), torch.randn(4, 32)
    twin = copy.deepcopy(model)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for _ in range(2):
        want = gradients(twin, twin, x)
        with octavo.microbatch(first=True):
            assert torch.equal(gradients(model, call, x), want)
        with torch.no_grad():
            model.layer.weight.mul_(0.5)
            twin.layer.weight.mul_(0.5)
        octavo.step(model), octavo.step(twin)


def test_a_weight_that_changes_within_a_block_is_quantized_again():
    layer, x = octavo.Linear(32, 32, recipe="fp8-current"), torch.randn(4, 32)
    with octavo.microbatch(first=True), torch.no_grad():
        layer(x)
        layer.weight.mul_(2.0)
        again = layer(x)
    assert torch.equal(again, layer(x))


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_in_a_block_whose_flag_is_a_tensor(recipe, reentrant):
    model = nn.Sequential(octavo.Linear(32, 32, recipe=recipe), octavo.Linear(32, 32, recipe=recipe))
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, twin)]
    for _ in range(3):
        for i in range(2):
            x = torch.randn(4, 32, requires_grad=True)
            with octavo.microbatch(first=torch.tensor(float(i == 0))):
                y = checkpoint(model, x, use_reentrant=reentrant)
            y.sum().backward()
            twin(x.detach()).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        octavo.step(model), octavo.step(twin)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_recomputation_does_not_read_the_block_around_backward():
    layer, x = octavo.Linear(32, 32, recipe="fp8-current"), torch.randn(4, 32, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=False)
    with octavo.microbatch(first=True):
        y.sum().backward()
    with octavo.microbatch(first=True):
        a, b = checkpoint(layer, x, use_reentrant=False), layer(x)
        a.sum().backward()
    b.sum().backward()
    assert x.grad is not None


def test_the_flag_of_a_microbatch_ends_with_its_block(layer):
    with octavo.microbatch(first=False):
        assert served(layer) is False
    assert served(layer) is None
