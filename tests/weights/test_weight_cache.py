"""The weight cache: what each is_first_microbatch means, where codes live, and every way for them to be stale."""

import copy
import pickle

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.func import functional_call

import octavo
from octavo.errors import UnsupportedConfig
from octavo.recipes import SHIPPED
from octavo.weights import cache as weights
from octavo.weights import optimizer_hooks as optimizers
from tests.support.experts import addresses
from tests.support.linear_oracle import assert_same, check, expected, make, run, spiky
from tests.support.recipe_traits import QUANTIZED, STATELESS
from tests.support.state_tensors import named_state
from tests.support.steps import batch

every = pytest.mark.parametrize("recipe", SHIPPED)
quantized = pytest.mark.parametrize("recipe", QUANTIZED)
stateless = pytest.mark.parametrize("recipe", STATELESS)


def change(layer, by=0.05):
    with torch.no_grad():
        layer.weight.add_(by)


def same_seeds(*layers):
    for other in layers[1:]:
        octavo.load_state_dict(other, octavo.state_dict(layers[0]))


# -- values --------------------------------------------------------------------------------------------------------


@every
def test_deferred_backwards(recipe):
    """All forwards, then all backwards, first to last."""
    cached, plain = make(recipe), make(recipe)
    same_seeds(cached, plain)
    for layer, flags in ((cached, (True, False, False)), (plain, (None, None, None))):
        layer.leaves = [batch(i)[0].requires_grad_() for i in range(3)]
        outputs = [layer(x, is_first_microbatch=flag) for x, flag in zip(layer.leaves, flags, strict=True)]
        for i, y in enumerate(outputs):
            y.backward(batch(i)[1])
    assert torch.equal(cached.weight.grad, plain.weight.grad)
    assert torch.equal(cached.bias.grad, plain.bias.grad)
    for a, b in zip(cached.leaves, plain.leaves, strict=True):
        assert torch.equal(a.grad, b.grad)


@stateless
def test_a_refresh_under_a_pending_backward_is_never_silently_wrong(recipe):
    layer = make(recipe)
    (x, dy), old = batch(0), layer.weight.detach().clone()
    leaf = x.clone().requires_grad_()
    y = layer(leaf, is_first_microbatch=True)
    change(layer)
    layer(batch(1)[0], is_first_microbatch=True)
    seed = octavo.state_dict(layer).get("rounding.seed")
    try:
        y.backward(dy)
    except RuntimeError:  # as nn.Linear would: a tensor needed for backward was modified in place
        return
    assert torch.equal(leaf.grad, expected(recipe, x, old, layer.bias, dy, seed=seed).dx)


@quantized
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_cache_made_without_gradients_is_completed_for_training(recipe, mode):
    layer, (x, dy) = make(recipe), batch(0)
    with mode():
        layer(x, is_first_microbatch=True)
    check(layer, recipe, x, dy, is_first_microbatch=False)


@quantized
def test_a_frozen_inputs_cache_is_completed_when_dx_is_wanted(recipe):
    layer, (x, dy) = make(recipe), batch(0)
    layer(x, is_first_microbatch=True)  # x wants no gradient: no column of w was needed
    check(layer, recipe, x, dy, is_first_microbatch=False)


@quantized
def test_inference_reads_the_cache_of_training(recipe):
    layer, (x, dy) = make(recipe), batch(0)
    found = run(layer, x, dy, is_first_microbatch=True)
    with torch.no_grad():
        assert torch.equal(layer(x, is_first_microbatch=False), found.y)


@stateless
def test_none_neither_reads_nor_writes_the_cache(recipe):
    layer, (x, dy) = make(recipe), batch(0)
    run(layer, x, dy)
    layer_cached = make(recipe)
    run(layer_cached, x, dy, is_first_microbatch=True)
    held = {name: b.clone() for name, b in named_state(layer_cached)}
    change(layer_cached)
    check(layer_cached, recipe, x, dy, is_first_microbatch=None)  # the new weights
    for name, b in named_state(layer_cached):
        if "seed" not in name:
            assert torch.equal(b.view(torch.uint8), held[name].view(torch.uint8)), name
    with pytest.raises(UnsupportedConfig):  # still the old ones in there
        layer_cached(x, is_first_microbatch=False)


# -- where it lives ------------------------------------------------------------------------------------------------


@quantized
def test_without_the_flag_there_is_no_cache(recipe):
    layer = make(recipe)
    before = addresses(layer)
    run(layer, *batch(0))
    octavo.refresh_weights(layer)
    assert addresses(layer) == before


# -- refresh -------------------------------------------------------------------------------------------------------


@stateless
def test_refresh_weights_brings_every_cache_up_to_date(recipe):
    model = nn.Sequential(make(recipe, 48, 48), nn.ReLU(), make(recipe, 48, 40))
    x, dy = batch(0)
    for layer in (model[0], model[2]):
        run(layer, x, is_first_microbatch=True)
        change(layer)
    octavo.refresh_weights(model)
    check(model[0], recipe, x, spiky(21, 48, seed=3), is_first_microbatch=False)
    check(model[2], recipe, x, dy, is_first_microbatch=False)


@stateless
def test_attach_refreshes_after_every_optimizer_step(recipe):
    layer, (x, dy) = make(recipe), batch(0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    handle = octavo.attach(layer, optimizer)
    layer(x, is_first_microbatch=True).backward(dy)
    optimizer.step()
    optimizer.zero_grad()
    check(layer, recipe, x, dy, is_first_microbatch=False)
    handle.remove()
    layer(x, is_first_microbatch=False).backward(dy)
    optimizer.step()
    with pytest.raises(UnsupportedConfig):
        layer(x, is_first_microbatch=False)


# -- stale ---------------------------------------------------------------------------------------------------------


def by_optimizer(layer):
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    layer.weight.grad = None


def by_assignment(layer):
    layer.weight = nn.Parameter(layer.weight.detach() + 1)


def by_data(layer):
    layer.weight.data = layer.weight.data + 1


CHANGES = {
    "in place": change,
    "one element": lambda layer: layer.weight.detach()[3, 5].fill_(7.0),
    "copy_": lambda layer: layer.weight.detach().copy_(layer.weight.detach() + 1),
    "optimizer": by_optimizer,
    "load_state_dict": lambda layer: layer.load_state_dict({k: v + 1 for k, v in layer.state_dict().items()}),
    "another parameter": by_assignment,
    "another storage": by_data,
}


@quantized
@pytest.mark.parametrize("how", CHANGES.values(), ids=CHANGES)
def test_a_weight_that_changed_since_the_refresh_is_refused(recipe, how):
    layer, (x, dy) = make(recipe), batch(0)
    run(layer, x, dy, is_first_microbatch=True)
    how(layer)
    with pytest.raises(UnsupportedConfig, match=r"refresh_weights|is_first_microbatch"):
        layer(x, is_first_microbatch=False)
    if recipe != "fp8-delayed":  # and the way out works
        check(layer, recipe, x, dy, is_first_microbatch=True)
        check(layer, recipe, x, dy, is_first_microbatch=False)


@stateless
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_cast_of_the_module_does_not_cast_codes_or_scales(recipe, dtype):
    """nn.Module.to(dtype) casts every floating-point buffer it finds, FP8 codes and scales among them."""
    layer, (x, dy) = make(recipe), batch(0)
    run(layer, x, dy, is_first_microbatch=True)
    layer.to(dtype).to(torch.float32)
    check(layer, recipe, x, dy, is_first_microbatch=True)
    layer.to(torch.bfloat16)
    check(layer, recipe, x.bfloat16(), dy.bfloat16(), is_first_microbatch=True)


@stateless
def test_one_layer_under_two_recipes_never_mixes_their_codes(recipe):
    other = "fp8-block" if recipe != "fp8-block" else "mxfp8"
    layer, (x, dy) = make(None), batch(0)
    for name in (recipe, other, recipe):
        with octavo.autocast(name):
            run(layer, x, dy)  # a seed may be made now
            check(layer, name, x, dy, is_first_microbatch=False)


@stateless
def test_a_copy_has_a_cache_of_its_own(recipe):
    layer, (x, dy) = make(recipe), batch(0)
    first = run(layer, x, dy, is_first_microbatch=True)
    twin = copy.deepcopy(layer)
    change(twin)
    check(twin, recipe, x, dy, is_first_microbatch=True)
    with torch.no_grad():
        assert torch.equal(layer(x, is_first_microbatch=False), first.y)


@quantized
def test_a_cache_filled_for_another_tensor_is_not_used(recipe):
    layer, x = make(recipe), batch(0)[0]
    for scale in (1.0, 2.0):
        weights = {"weight": layer.weight.detach() * scale}
        y = functional_call(layer, weights, (x,), {"is_first_microbatch": True})
        want = make(recipe)
        with torch.no_grad():
            want.weight.mul_(scale)
        assert_same(y.detach(), want(x).detach())
    with pytest.raises(UnsupportedConfig, match="another tensor"):
        layer(x, is_first_microbatch=False)


def test_a_stale_cache_is_refused_even_where_a_column_is_missing():
    layer, x = make("fp8-current"), batch(0)[0]
    with torch.no_grad():
        layer(x, is_first_microbatch=True)
        layer.weight.mul_(2)
    with pytest.raises(UnsupportedConfig, match="changed since"):
        layer(x.requires_grad_(), is_first_microbatch=False)


# -- what vouches for a cache ----------------------------------------------------------------------------------------

FUSED = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
}
fused = pytest.mark.parametrize("optimizer", FUSED.values(), ids=FUSED)


def grouped(recipe="fp8-current", **settings):
    return octavo.GroupedLinear(2, 48, 40, recipe=recipe, single_grouped_weight=False, **settings)


def accumulate(layer, *flags, more=()):
    for i, flag in enumerate(flags):
        layer(batch(i)[0], *more, is_first_microbatch=flag).backward(batch(i)[1])


def refused(layer, *more):
    with pytest.raises(UnsupportedConfig, match=r"refresh_weights|is_first_microbatch"):
        layer(batch(0)[0], *more, is_first_microbatch=False)
    return True


class Wrapped:
    """As the wrappers of training libraries are: no optimizer of torch's, but it has one."""

    def __init__(self, inner):
        self.inner = inner

    def step(self):
        return self.inner.step()


def test_a_write_in_place_makes_the_cached_codes_of_the_weight_stale():
    layer = make("fp8-current")
    accumulate(layer, True)
    change(layer)
    assert refused(layer)


def test_an_optimizer_step_makes_the_cached_codes_of_its_weights_stale():
    """A fused one, which advances no version of its own."""
    layer = make("fp8-current")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
    accumulate(layer, True)
    optimizer.step()
    assert refused(layer)


@fused
@pytest.mark.parametrize("through", [lambda o: o.step(), lambda o: Wrapped(o).step(), lambda o: scaled(o)],
                         ids=["step", "wrapped", "GradScaler"])  # fmt: skip
def test_a_fused_step_makes_a_cache_stale(optimizer, through):
    layer = make("fp8-current")
    chosen = optimizer(layer.parameters())
    for _ in range(2):
        accumulate(layer, True, False, False)
        through(chosen)
        chosen.zero_grad()
        assert refused(layer)


def scaled(optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))  # it begins with its first loss
    scaler.step(optimizer)


@fused
def test_a_fused_step_makes_a_cache_of_groups_stale(optimizer):
    layer, sizes = grouped(), torch.tensor([10, 11])
    chosen = optimizer([layer.weight1])
    accumulate(layer, True, False, more=(sizes,))
    chosen.step()
    assert refused(layer, sizes)


@fused
@pytest.mark.parametrize("recipe", ["bf16", "fp8-block(dgrad='bf16')"])
def test_a_fused_step_between_forward_and_backward_is_noticed(optimizer, recipe):
    for layer, more in ((make(recipe), ()), (grouped(recipe), (torch.tensor([10, 11]),))):
        chosen = optimizer(layer.parameters())
        y, later = (layer(batch(i)[0].requires_grad_(), *more) for i in range(2))
        y.sum().backward()
        chosen.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            later.sum().backward()


def test_a_weight_whose_codes_are_made_again_in_backward_is_watched_too():
    layer = make("fp8-current", keep_weight_codes=False)
    chosen = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
    y, later = (layer(batch(i)[0].requires_grad_()) for i in range(2))
    y.sum().backward()
    chosen.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        later.sum().backward()


@fused
def test_refreshes_that_follow_a_fused_step_are_fresh(optimizer):
    """By `attach`, by a hook of the caller's own, and by hand."""
    for how in ("attach", "hook", "hand"):
        layer = make("fp8-current")
        chosen = optimizer(layer.parameters())
        if how == "attach":
            octavo.attach(layer, chosen)
        if how == "hook":
            chosen.register_step_post_hook(lambda *_, layer=layer: octavo.refresh_weights(layer))
        accumulate(layer, True, False)
        for _ in range(2):
            chosen.step()
            chosen.zero_grad()
            if how == "hand":
                octavo.refresh_weights(layer)
            check(layer, "fp8-current", *batch(0), is_first_microbatch=False)
            accumulate(layer, False)


def test_a_cache_that_a_closure_filled_is_stale_after_the_step():
    layer = make("fp8-current")
    chosen = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)

    def closure():
        chosen.zero_grad()
        accumulate(layer, True, False)
        return torch.ones(())

    assert chosen.step(closure) == 1
    assert refused(layer)
    assert chosen.step(closure=closure) == 1
    assert refused(layer)


def test_a_closure_may_run_the_backward_of_an_earlier_forward():
    layer = make("bf16")
    chosen = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
    y = layer(batch(0)[0].requires_grad_()).sum()
    chosen.step(lambda: y.backward())
    assert layer.weight.grad is not None


def test_a_step_that_leaves_a_weight_alone_leaves_its_cache():
    layer, other = make("fp8-current"), nn.Linear(3, 3)
    chosen = torch.optim.AdamW([*layer.parameters(), *other.parameters()], lr=0.1, fused=True)
    want = layer(batch(0)[0], is_first_microbatch=True)
    for _ in range(2):
        other(torch.ones(3)).sum().backward()
        chosen.step()
        assert torch.equal(layer(batch(0)[0], is_first_microbatch=False), want)


def test_optimizers_of_other_weights_do_not_disturb():
    """Two players in turn: each cache has an optimizer of its own, also before that has stepped for the first time."""
    first, second = make("fp8-current"), make("fp8-current", seed=3)
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1, fused=True) for m in (first, second))
    for _ in range(3):
        accumulate(first, True)
        accumulate(second, True)
        theirs.step()
        accumulate(first, False, False)
        assert refused(second)
        mine.step()


def test_a_teacher_and_a_frozen_layer_keep_their_caches_while_another_model_trains():
    teacher, frozen, student = (make("fp8-current", seed=i) for i in range(3))
    frozen.requires_grad_(False)
    chosen = torch.optim.AdamW(student.parameters(), lr=0.1, fused=True)
    x, dx = batch(0)[0], None
    with torch.no_grad():
        taught = teacher(x)
    for step in range(3):
        with torch.no_grad():
            assert_same(teacher(x, is_first_microbatch=step == 0), taught)
        leaf = x.clone().requires_grad_()
        frozen(leaf, is_first_microbatch=step == 0).sum().backward()
        assert dx is None or torch.equal(leaf.grad, dx)
        dx = leaf.grad
        accumulate(student, True, False)
        chosen.step()


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "grouped"])
def test_an_optimizer_of_copies_vouches_for_nothing(sharded):
    """Master weights: what steps is an optimizer of other tensors, and the weights are written behind torch's back."""
    layer, more = (grouped(), (torch.tensor([10, 11]),)) if sharded else (make("fp8-current"), ())
    own = list(layer.parameters())
    masters = [p.detach().clone().requires_grad_() for p in own]
    chosen = torch.optim.AdamW(masters, lr=0.1, fused=True)
    accumulate(layer, True, False, more=more)
    for master, p in zip(masters, own, strict=True):
        master.grad = p.grad.clone()
    chosen.step()
    for master, p in zip(masters, own, strict=True):
        p.data.copy_(master.detach())
    with pytest.raises(UnsupportedConfig, match="no torch optimizer"):
        layer(batch(0)[0], *more, is_first_microbatch=False)
    accumulate(layer, True, False, more=more)


def test_the_end_of_a_step_without_an_optimizer_of_torchs_ends_the_cache():
    layer = make("fp8-current")
    accumulate(layer, True, False)
    layer.weight.data.sub_(layer.weight.grad)  # seen by nothing
    octavo.step(layer)
    with pytest.raises(UnsupportedConfig, match="no torch optimizer"):
        layer(batch(0)[0], is_first_microbatch=False)
    chosen = torch.optim.SGD(layer.parameters(), lr=0.1)
    accumulate(layer, True)
    octavo.step(layer)  # the optimizer skipped it, as a GradScaler lets it, and would have been heard
    accumulate(layer, False)
    del chosen


def test_memory_that_comes_back_to_an_address_is_another_memory():
    """As an allocator gives it out again: the same address, version and tensor."""
    layer, memory = make("fp8-current"), bytearray(4 * 40 * 48)
    layer.weight.data = torch.frombuffer(memory, dtype=torch.float32).view(40, 48)
    accumulate(layer, True, False)
    layer.weight.data = torch.frombuffer(memory, dtype=torch.float32).view(40, 48).fill_(1.0)
    assert refused(layer)


def test_a_captured_step_is_never_trusted_again(monkeypatch):
    """A replay runs no Python: neither the version nor a hook tells of it."""

    def capture(now):
        for module in (optimizers, weights):
            monkeypatch.setattr(module, "is_capturing", lambda: now)

    layer = make("fp8-current")
    chosen = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True, capturable=False)
    accumulate(layer, True)
    capture(True)
    chosen.step()
    capture(False)
    accumulate(layer, True)
    with pytest.raises(UnsupportedConfig, match="captured"):
        layer(batch(0)[0], is_first_microbatch=False)
    octavo.refresh_weights(layer)
    assert refused(layer)
    capture(True)
    accumulate(layer, True, False)  # in what order graphs are replayed is for their owner to know


def test_a_compiled_step_makes_a_cache_stale():
    layer = make("fp8-current")
    chosen = torch.optim.SGD(layer.parameters(), lr=0.1)
    step = torch.compile(chosen.step, backend="aot_eager")
    for _ in range(2):
        accumulate(layer, True, False)
        step()
        assert refused(layer)


def test_a_layer_from_a_file_hears_optimizers_too(monkeypatch):
    """In a process that has made none, where nothing listens yet."""
    stored, heard = pickle.dumps(make("fp8-current")), []
    monkeypatch.setattr(optimizers, "listen", lambda layer: heard.append(True))
    pickle.loads(stored)
    assert heard


def test_copies_and_pickles_of_a_layer_trust_nothing_of_the_originals():
    layer = make("fp8-current")
    chosen = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    accumulate(layer, True, False)
    chosen.step()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        check(twin, "fp8-current", *batch(0), is_first_microbatch=False)  # cold: filled


# -- optimizers that are not Octavo's business -------------------------------------------------------------------------


class Differentiates(torch.optim.Optimizer):
    """Takes the gradients itself, of what the closure returns."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure):
        loss = closure(scale=2.0)
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.grad = g
                p.sub_(0.1 * g)
        return loss


def test_an_optimizer_may_differentiate_what_its_closure_returns():
    octavo.Linear(8, 8)
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)), torch.randn(4, 8)
    optimizer = Differentiates(model.parameters())
    losses = [optimizer.step(lambda scale: scale * model(x).square().mean()).item() for _ in range(3)]
    assert losses[2] < losses[0]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_fused_step_makes_a_cache_stale(backend):
    torch._dynamo.reset()
    layer, x = octavo.Linear(32, 32, recipe="fp8-current"), torch.randn(8, 32)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    step = torch.compile(optimizer.step, backend=backend)
    for _ in range(3):
        layer(x, is_first_microbatch=True).sum().backward()
        step()
        with pytest.raises(octavo.errors.UnsupportedConfig, match="has changed since"):
            layer(x, is_first_microbatch=False)


def test_a_compiled_optimizer_step_is_compiled_once():
    """The number of steps that were heard is no guard."""
    layer, x = octavo.Linear(16, 16, recipe="fp8-current"), torch.ones(4, 16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    compiles = torch._dynamo.testing.CompileCounter()
    step = torch.compile(optimizer.step, backend=compiles)
    for _ in range(5):
        layer(x).sum().backward()
        step()
    assert compiles.frame_count <= 2  # the first has no gradients to take over from
    layer(x, is_first_microbatch=True)
    step()
    with pytest.raises(UnsupportedConfig, match="changed since"):
        layer(x, is_first_microbatch=False)
