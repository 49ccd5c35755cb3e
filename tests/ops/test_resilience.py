"""After an exception the next step is that of a fresh process; threads and neighbouring models do not mix."""

import threading

import pytest
import torch

import octavo
from octavo.kernels.gemm import reference as gemm_reference
from octavo.quant.block import reference as block
from octavo.quant.mx import reference as mx
from octavo.quant.nvfp4 import reference as nvfp4
from octavo.quant.rowwise import reference as rowwise
from octavo.quant.tensorwise import reference as tensorwise
from octavo.recipes import SHIPPED
from tests.support.experts import assert_steps
from tests.support.linear_oracle import Result, assert_result, assert_same, check, expected, make, run, spiky
from tests.support.recipe_traits import QUANTIZED, is_stateful, is_stochastic
from tests.support.steps import batch

TWINS = (block, mx, nvfp4, rowwise, tensorwise)
every = pytest.mark.parametrize("recipe", SHIPPED)


class OutOfMemory(RuntimeError):
    pass


def fail_at(monkeypatch, what, n):
    """Let the n-th GEMM or cast from now on fail, once."""
    count = [0]

    def failing(function):
        def call(*args, **kwargs):
            count[0] += 1
            if count[0] == n:
                raise OutOfMemory("no memory")
            return function(*args, **kwargs)

        return call

    if what == "gemm":
        monkeypatch.setattr(gemm_reference, "gemm", failing(gemm_reference.gemm))
    else:
        for twin in TWINS:
            monkeypatch.setattr(twin, "cast", failing(twin.cast))


def pair(recipe, **settings):
    fresh, layer = make(recipe, **settings), make(recipe, **settings)
    octavo.load_state_dict(layer, octavo.state_dict(fresh))
    return fresh, layer


def assert_as_fresh(layer, fresh, steps=2, **settings):
    """The next steps, and what they leave behind, to the bit."""
    for p in layer.parameters():
        p.grad = None
    for i in range(steps):
        assert_result(run(layer, *batch(i), **settings), run(fresh, *batch(i), **settings))
        octavo.step(layer)
        octavo.step(fresh)
    for key, value in octavo.state_dict(fresh).items():
        assert_same(octavo.state_dict(layer)[key], value, key)


@every
@pytest.mark.parametrize("bad", [torch.full((3, 47), 1e4), torch.zeros(3, 48, dtype=torch.int32), None, "x"], ids=str)
def test_a_bad_input_leaves_no_mark(recipe, bad):
    fresh, layer = pair(recipe)
    with pytest.raises((RuntimeError, ValueError, TypeError, AttributeError)):
        layer(bad)
    assert_as_fresh(layer, fresh)


@every
def test_a_failing_gemm_in_forward_leaves_no_mark(recipe, monkeypatch):
    """But for the amax of what was cast, which is raised at that moment: the same batch again raises it no higher."""
    fresh, layer = pair(recipe)
    x, _ = batch(0)
    x = x if is_stateful(recipe) else 1000 * x
    with monkeypatch.context() as patch:
        fail_at(patch, "gemm", 1)
        with pytest.raises(OutOfMemory):
            layer(x.requires_grad_())
    assert_as_fresh(layer, fresh)


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("first", [None, True])
def test_a_failing_cast_in_forward_leaves_no_mark(recipe, n, first, monkeypatch):
    fresh, layer = pair(recipe)
    x, _ = batch(0)
    x = x if is_stateful(recipe) else 1000 * x
    with monkeypatch.context() as patch:
        fail_at(patch, "cast", n)
        with pytest.raises(OutOfMemory):
            layer(x.requires_grad_(), is_first_microbatch=first)
    assert_as_fresh(layer, fresh, is_first_microbatch=first)


@every
@pytest.mark.parametrize("n", [1, 2])
def test_a_failing_gemm_in_backward_leaves_no_mark(recipe, n, monkeypatch):
    """The step is done again with the same batch, as a trainer would that frees memory and retries."""
    fresh, layer = pair(recipe)
    x, dy = batch(0)
    y = layer(x.requires_grad_())
    with monkeypatch.context() as patch:
        fail_at(patch, "gemm", n)
        with pytest.raises(OutOfMemory):
            y.backward(dy)
    assert_as_fresh(layer, fresh)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_failing_cast_in_backward_leaves_no_mark(recipe, monkeypatch):
    fresh, layer = pair(recipe)
    x, dy = batch(0)
    y = layer(x.requires_grad_())
    with monkeypatch.context() as patch:
        fail_at(patch, "cast", 1)
        with pytest.raises(OutOfMemory):
            y.backward(dy)
    assert_as_fresh(layer, fresh)


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("n", [1, 2])
def test_a_half_refreshed_cache_is_not_trusted(recipe, n, monkeypatch):
    layer, (x, dy) = make(recipe), batch()
    run(layer, x, dy, is_first_microbatch=True)
    with torch.no_grad():
        layer.weight.mul_(2)
    with monkeypatch.context() as patch:
        fail_at(patch, "cast", n)
        with pytest.raises(OutOfMemory):
            layer(x.clone().requires_grad_(), is_first_microbatch=True)
    try:
        found = run(layer, x, dy, is_first_microbatch=False)
    except ValueError:  # said to be stale: right as well
        found = run(layer, x, dy, is_first_microbatch=True)
    if not is_stochastic(recipe):
        assert_result(found, expected(recipe, x, layer.weight, layer.bias, dy))
    else:
        assert_same(found.y, expected(recipe, x, layer.weight, layer.bias, dy, seed=torch.tensor([1, 1])).y)


@every
def test_a_failing_microbatch_leaves_nothing_pending(recipe, monkeypatch):
    fresh, layer = pair(recipe, delay_wgrad_compute=True)
    x, dy = batch(0)
    y = layer(x.clone().requires_grad_())
    with monkeypatch.context() as patch:
        fail_at(patch, "gemm", 1)
        with pytest.raises(OutOfMemory):
            y.backward(dy)
    del y
    for m in (fresh, layer):
        m(batch(1)[0].requires_grad_()).backward(batch(1)[1])
        m.backward_dw()
    assert_same(layer.weight.grad, fresh.weight.grad)
    with pytest.warns(UserWarning, match="no backward to finish"):
        layer.backward_dw()


# -- fused runs --------------------------------------------------------------------------------------------------------

ELSEWHERE = {
    "main_grad": {"fuse_wgrad_accumulation": True},
    "delayed": {"delay_wgrad_compute": True},
    "grad": {},
}
RUNS = {
    "mlp": lambda **s: (octavo.ops.RMSNorm(48), make(k=48, n=64, **s), octavo.ops.GELU(), make(k=64, n=48, **s)),
    "shared": lambda **s: (layer := make(k=48, n=48, **s), octavo.ops.GELU(), layer),
    "strange": lambda **s: (make(k=48, n=48, **s), Fails(), make(k=48, n=48, **s), octavo.ops.SiLU()),
}


class Fails(octavo.ops.BasicOperation):
    """2x, of somebody else's, whose backward fails."""

    @staticmethod
    def op_forward_compute(config, inputs):
        return 2 * inputs.x, ()

    @staticmethod
    def op_forward_save_ctx(config, inputs, y, fresh):
        return ()

    @staticmethod
    def op_backward(config, saved, dy, wants):
        raise OutOfMemory


def a_run(name, recipe, way):
    torch.manual_seed(0)
    model = octavo.Sequential(*RUNS[name](recipe=recipe, **ELSEWHERE[way]))
    for layer in linears(model):
        layer.weight.main_grad, layer.weight.grad_added_to_main_grad = torch.ones_like(layer.weight), False
    return model


def linears(model):
    return [m for m in model.modules() if isinstance(m, octavo.Linear)]


def marks(model):
    """All that a backward writes besides gradients, but for amaxes, which are raised when something is cast."""
    found = {k: v.clone() for k, v in octavo.state_dict(model).items() if "seed" in k}
    for i, layer in enumerate(linears(model)):
        found |= {
            f"main_grad {i}": layer.weight.main_grad.clone(),
            f"waits {i}": torch.tensor(len(layer._wgrad.queue)),
        }
        found |= {f"added {i}": torch.tensor(layer.weight.grad_added_to_main_grad)}
    return found


WITHIN = [
    *[(name, recipe, way, "eager") for name in ("mlp", "shared") for recipe, way in (
        ("bf16", "main_grad"), ("fp8-current", "main_grad"), ("fp8-delayed", "main_grad"), ("nvfp4", "main_grad"),
        ("nvfp4", "grad"), ("nvfp4", "delayed"), ("bf16", "delayed"),
    )],
    ("mlp", "fp8-current", "main_grad", "graph"), ("mlp", "nvfp4", "main_grad", "graph"),
]  # fmt: skip


@pytest.mark.parametrize("what", ["gemm", "cast"])
@pytest.mark.parametrize(("name", "recipe", "way", "mode"), WITHIN, ids=str)
def test_a_backward_that_fails_within_a_run_leaves_no_mark(name, recipe, way, mode, what, monkeypatch):
    """At any of its GEMMs, or casts; and the same again, when there is memory, is as if it had not failed."""
    model, twin = (a_run(name, recipe, way) for _ in range(2))
    octavo.load_state_dict(twin, octavo.state_dict(model))
    (x, _), dy = batch(0), spiky(21, 48, seed=3)
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = (model if mode == "eager" else torch.compile(model, backend="aot_eager"))(leaf)
    before, failures = marks(model), 0
    for n in range(1, 12):
        with monkeypatch.context() as patch:
            fail_at(patch, what, n)
            try:
                y.backward(dy, retain_graph=True)
            except OutOfMemory:
                failures += 1
            else:
                break
        assert_steps(marks(model), before)
        assert leaf.grad is None
    assert failures == n - 1 and (failures >= 2 or (what == "cast" and recipe == "bf16"))
    twin(other).backward(dy)
    assert_steps(marks(model), marks(twin))
    assert_same(leaf.grad, other.grad)


@pytest.mark.parametrize("way", ELSEWHERE)
def test_somebody_elses_backward_that_fails_leaves_no_mark(way):
    model = a_run("strange", "nvfp4", way)
    y, before = model(batch(0)[0].requires_grad_()), marks(model)
    with pytest.raises(OutOfMemory):
        y.backward(torch.ones(21, 48))
    assert_steps(marks(model), before)


def test_a_main_grad_that_is_missing_in_a_run_leaves_the_others_alone():
    model = a_run("mlp", "fp8-current", "main_grad")
    first, last = linears(model)
    y = model(batch(0)[0].requires_grad_())
    first.weight.main_grad = None
    with pytest.raises(octavo.errors.UnsupportedConfig, match="main_grad"):
        y.sum().backward()
    assert (last.weight.main_grad == 1).all() and not last.weight.grad_added_to_main_grad


def test_a_raising_hook_inside_backward_leaves_no_mark():
    fresh, layer = pair("nvfp4")
    x, dy = batch(0)

    def raising(gradient):
        raise OutOfMemory

    handle = layer.weight.register_hook(raising)
    x.requires_grad_()
    with pytest.raises(OutOfMemory):
        layer(x).backward(dy)
    handle.remove()
    run(fresh, *batch(0))  # backward itself was done, and its step of random bits is spent
    assert_as_fresh(layer, fresh)


# -- neighbours ------------------------------------------------------------------------------------------------------


def test_two_models_with_two_recipes_interleaved_do_not_mix():
    recipes = ("fp8-delayed(history=2)", "fp8-delayed(history=3,margin=1)", "nvfp4", "fp8-block")
    alone = [Trainer(recipe) for recipe in recipes]
    together = [Trainer(recipe, like=other) for recipe, other in zip(recipes, alone, strict=True)]
    for trainer in alone:
        for i in range(4):
            trainer.step(i)
    for i in range(4):
        outputs = [trainer.forward(i) for trainer in together]
        for trainer, y in reversed(list(zip(together, outputs, strict=True))):
            trainer.backward(i, y)
    for a, b in zip(alone, together, strict=True):
        a.assert_equals(b)


class Trainer:
    """A layer without a recipe, trained under octavo.autocast."""

    def __init__(self, recipe, like=None):
        self.recipe, self.layer = recipe, make(None)
        with octavo.autocast(recipe), torch.no_grad():
            self.layer(batch()[0])  # state, if any, is made here
        if like is not None:
            octavo.load_state_dict(self.layer, octavo.state_dict(like.layer))
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.01)
        self.losses = []

    def forward(self, i):
        with octavo.autocast(self.recipe):
            return self.layer(batch(i)[0])

    def backward(self, i, y):
        loss = y.square().mean()
        loss.backward()
        self.losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        octavo.step(self.layer)

    def step(self, i):
        self.backward(i, self.forward(i))

    def assert_equals(self, other):
        assert self.losses == other.losses
        assert_same(self.layer.weight.detach(), other.layer.weight.detach())
        for key, value in octavo.state_dict(self.layer).items():
            assert_same(octavo.state_dict(other.layer)[key], value, key)


def test_threads_do_not_mix():
    recipes = ("fp8-delayed(history=2)", "nvfp4", "fp8-block", "mxfp8")
    alone = [Trainer(recipe) for recipe in recipes]
    together = [Trainer(recipe, like=other) for recipe, other in zip(recipes, alone, strict=True)]
    for trainer in alone:
        for i in range(6):
            trainer.step(i)
    start, errors = threading.Barrier(len(together)), []

    def work(trainer):
        try:
            start.wait(30)
            for i in range(6):
                trainer.step(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(trainer,)) for trainer in together]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for a, b in zip(alone, together, strict=True):
        a.assert_equals(b)


def test_backward_in_another_thread_uses_forwards_recipe():
    layer, (x, dy) = make(None), batch()
    leaf = x.clone().requires_grad_()
    with octavo.autocast("fp8-rowwise"):
        y = layer(leaf)

    def backward():
        with octavo.autocast("nvfp4"):
            y.backward(dy)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    want = expected("fp8-rowwise", x, layer.weight, layer.bias, dy)
    assert_result(Result(y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad), want)


def test_the_injected_failures_do_happen(monkeypatch):
    layer, (x, dy) = make("fp8-rowwise"), batch()
    with monkeypatch.context() as patch:
        fail_at(patch, "gemm", 99)
        check(layer, "fp8-rowwise", x, dy)
