"""Overflow is seen: an Inf or a NaN in x, w or dy reaches every check that finds it behind an nn.Linear.

The checks are those of a training loop: `torch.isfinite(loss)`, `clip_grad_norm_`, anomaly mode, DDP's averaged
gradients and `torch.amp.GradScaler`. A recipe may spread a value that is not finite over all that shares its scale, so
a check may see more of them than behind an nn.Linear, and never fewer.
"""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import octavo
from octavo.recipes import SHIPPED
from tests.support.linear_oracle import assert_same, randn
from tests.support.recipe_traits import is_stateful
from tests.support.steps import assert_equal

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PLACES = ("x", "w", "dy")
VALUES = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
M, K, H, N = 21, 40, 48, 24

every = pytest.mark.parametrize("recipe", SHIPPED)
on_devices = pytest.mark.parametrize("device", DEVICES)
places = pytest.mark.parametrize("place", PLACES)
values = pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)


def mlp(recipe=None, *, bias=True, device="cpu", seed=1):
    """Two linear layers, of torch or converted. Weights are the same for every recipe."""
    model = nn.Sequential(nn.Linear(K, H, bias=bias), nn.GELU(), nn.Linear(H, N, bias=bias)).to(device)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(randn(*p.shape, seed=seed + i) * 0.2)
    if recipe is not None:
        octavo.convert(model, recipe)
    return model


def corrupt(tensor, value, at=(3, 5)):
    """A copy with one element replaced."""
    tensor = tensor.detach().clone()
    tensor[at] = value
    return tensor


def has_nonfinite(tensor):
    return not tensor.isfinite().all().item()


class Step:
    """One forward and backward of an MLP with `value` in x, in a weight, or in the gradient of y."""

    def __init__(self, model, place=None, value=0.0, device="cpu", dtype=torch.float32):
        self.model = model
        x = randn(M, K, seed=9).to(device, dtype)
        self.x = (corrupt(x, value) if place == "x" else x).requires_grad_()
        if place == "w":
            with torch.no_grad():
                model[2].weight[3, 5] = value
        self.spoil = (lambda dy: corrupt(dy, value)) if place == "dy" else None

    def forward(self):
        y = self.model(self.x)
        if self.spoil is not None:
            y.register_hook(self.spoil)
        return y.float().square().mean()

    def backward(self):
        self.forward().backward()
        return [self.x.grad, *(p.grad for p in self.model.parameters())]


def cases():
    yield None, 0.0
    for place in PLACES:
        for value in VALUES.values():
            yield place, value


# -- the checks of a training loop -------------------------------------------------------------------------------------


@every
@on_devices
def test_the_loss_is_finite_where_that_of_a_plain_model_is(recipe, device):
    for place, value in cases():
        plain, model = (Step(mlp(r, device=device), place, value, device).forward() for r in (None, recipe))
        assert torch.isfinite(model).item() == torch.isfinite(plain).item() == (place not in ("x", "w")), (place, value)


@every
@on_devices
def test_clip_grad_norm(recipe, device):
    """The norm is not finite in the same cases, of the whole model and of every parameter alone."""
    for place, value in cases():
        found = []
        for r in (None, recipe):
            model = mlp(r, device=device)
            grads = Step(model, place, value, device).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
            found.append([has_nonfinite(norm), *map(has_nonfinite, grads)])
            if has_nonfinite(norm):
                with pytest.raises(RuntimeError, match="non-finite"):
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        assert found[0] == found[1], (place, value)
        assert found[0][0] == (place is not None), (place, value)


@every
@on_devices
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:.*Error detected in")
def test_anomaly_mode_names_the_backward_that_makes_a_nan(recipe, device):
    """A backward that makes a NaN is named. An Inf that stays one is no anomaly, behind an nn.Linear either."""
    for place, value in cases():
        raised = []
        for r in (None, recipe):
            layer = mlp(r, device=device)[:1]
            x = randn(M, K, seed=9).to(device)
            dy = randn(M, H, seed=8).to(device)
            with torch.no_grad():
                if place == "w":
                    layer[0].weight[3, 5] = value
            x = (corrupt(x, value) if place == "x" else x).requires_grad_()
            dy = corrupt(dy, value) if place == "dy" else dy
            layer(x).backward(dy)
            makes_nan = any(g.isnan().any().item() for g in (x.grad, *(p.grad for p in layer.parameters())))
            raises = pytest.raises(RuntimeError, match="returned nan values") if makes_nan else nullcontext()
            with raises, torch.autograd.detect_anomaly():
                layer(x).backward(dy)
            raised.append(makes_nan)
        assert raised[1] >= raised[0], (place, value)
        assert raised[0] == (place is not None and math.isnan(value)), (place, value)


def _averaged(model, step):
    """Which gradients of a DDP model are not finite on this rank after its buckets were reduced."""
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    y = wrapped(step.x)
    if step.spoil is not None:
        y.register_hook(step.spoil)
    y.square().mean().backward()
    return [has_nonfinite(p.grad) for p in model.parameters()]


def _process(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for place, value in (("x", math.inf), ("w", math.nan), ("dy", math.inf), ("dy", math.nan), (None, 0.0)):
        found = {}
        for recipe in (None, *SHIPPED):
            model = mlp(recipe)
            step = Step(model, place if place == "w" or rank == 1 else None, value)
            found[recipe] = _averaged(model, step)
        assert all(flags == found[None] for flags in found.values()), (place, value, found)
        assert any(found[None]) == (place is not None)
    dist.barrier()  # gloo aborts a process whose peer leaves while it still listens
    dist.destroy_process_group()


def test_the_gradient_buckets_of_ddp(tmp_path):
    """An overflow on one rank is in both ranks' averaged gradients, parameter by parameter as with nn.Linear."""
    mp.spawn(_process, (str(tmp_path / "store"),), nprocs=2)


# -- GradScaler --------------------------------------------------------------------------------------------------------


class Loop:
    """Training in float16 with a GradScaler, one call a step."""

    def __init__(self, model, device, *, ends="attach", call=None, scale=2.0**10):
        self.model, self.device, self.ends, self.call = model, device, ends, call or model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=ends == "fused")
        if ends != "step" and any(isinstance(m, octavo.Linear) for m in model.modules()):
            octavo.attach(model, self.optimizer)
        self.scaler = torch.amp.GradScaler(device, init_scale=scale)

    def __call__(self, seed, place=None):
        x = randn(M, K, seed=seed).to(self.device)
        if place == "x":
            x = corrupt(x, math.inf)
        with torch.autocast(self.device, torch.float16):
            y = self.call(x)
        # finite, but float16's dy is not
        loss = y.float().square().mean() * (1e30 if place == "dy" else 1.0)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ends == "step":
            octavo.step(self.model)
        return loss

    def parameters(self):
        return [p.detach().clone() for p in self.model.parameters()]


def same_rounding(model, other):
    """Give the first model the seeds and counters of the other's stochastic rounding."""
    drawn = {name: t for name, t in octavo.state_dict(other).items() if "rounding" in name}
    octavo.load_state_dict(model, octavo.state_dict(model) | drawn)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("place", ["x", "dy"])
@pytest.mark.parametrize("recipe", [None, *SHIPPED])
@on_devices
def test_a_scaler_skips_the_step_and_goes_on(recipe, place, bias, device):
    """The overflow is found, the step skipped, the scale halved; the next step is that of a run without it."""
    loop = Loop(mlp(recipe, bias=bias, device=device), device)
    twin = Loop(mlp(recipe, bias=bias, device=device), device)
    same_rounding(twin.model, loop.model)
    loop(seed=1), twin(seed=1)
    before, scale = loop.parameters(), loop.scaler.get_scale()

    loop(seed=2, place=place)
    assert_equal(loop.parameters(), before)
    assert loop.scaler.get_scale() == scale / 2

    same_rounding(twin.model, loop.model)  # it drew numbers in the skipped step too
    twin.scaler.update(scale / 2)
    loop(seed=3), twin(seed=3)
    assert loop.scaler.get_scale() == scale / 2
    assert_equal(loop.parameters(), twin.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(loop.parameters(), before, strict=True))


@every
@on_devices
def test_a_scaler_and_experts(recipe, device):
    """The same with a GroupedLinear; only the expert that has the overflow sees it, and the whole step is skipped."""
    layer = octavo.GroupedLinear(3, K, N, bias=False, recipe=recipe, device=device)
    sizes = torch.tensor([8, 0, 11], device=device)
    loop = Loop(layer, device, call=lambda x: layer(x, sizes))
    loop(seed=1)
    for place in ("x", "dy"):
        before, scale = loop.parameters(), loop.scaler.get_scale()
        loop(seed=2, place=place)
        assert_equal(loop.parameters(), before)
        assert loop.scaler.get_scale() == scale / 2
        loop(seed=3)
        assert loop.scaler.get_scale() == scale / 2
        assert any(not torch.equal(a, b) for a, b in zip(loop.parameters(), before, strict=True))
        assert all(p.isfinite().all() for p in loop.parameters())


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-rowwise", "nvfp4"])  # each way to keep a value visible
def test_a_scaler_in_a_compiled_step(recipe):
    model = mlp(recipe, bias=False)
    loop = Loop(model, "cpu", call=torch.compile(model, fullgraph=True, backend="aot_eager"))
    loop(seed=1)
    for place in ("x", "dy"):
        before, scale = loop.parameters(), loop.scaler.get_scale()
        loop(seed=2, place=place)
        assert_equal(loop.parameters(), before)
        assert loop.scaler.get_scale() == scale / 2
        loop(seed=3)
        assert loop.scaler.get_scale() == scale / 2
        assert all(p.isfinite().all() for p in loop.parameters())


@every
@on_devices
def test_a_scale_too_large_at_the_start_comes_down_as_with_nn_linear(recipe, device):
    """From 2^40 the first steps overflow by themselves, until the scale fits. It may end higher than the plain run's:
    dW has its parameter's dtype, float32, and torch's is float16 before it is cast."""
    plain, loop = (Loop(mlp(r, device=device), device, scale=2.0**40) for r in (None, recipe))
    for seed in range(26):
        plain(seed), loop(seed)
    assert plain.scaler.get_scale() < 2.0**30
    assert plain.scaler.get_scale() / 2 <= loop.scaler.get_scale() < 2.0**30
    assert all(p.isfinite().all() for p in loop.parameters())


def states(model):
    """(name, state) of every delayed state in a model."""
    flat = octavo.state_dict(model)
    for prefix in [name.removesuffix("history") for name in flat if name.endswith("history")]:
        yield prefix, {name.removeprefix(prefix): t for name, t in flat.items() if name.startswith(prefix)}


@pytest.mark.parametrize("ends", ["attach", "step", "fused"])
@pytest.mark.parametrize("place", ["x", "dy"])
@on_devices
def test_a_skipped_step_leaves_the_windows_of_delayed_scaling_clean(place, ends, device):
    """A value that is not finite is counted in its slot, once, and enters no window; the windows fill on."""
    loop = Loop(mlp("fp8-delayed(history=4)", device=device), device, ends=ends)
    for seed in (1, 2):
        loop(seed)
    before = {prefix: {k: t.clone() for k, t in s.items()} for prefix, s in states(loop.model)}
    loop(seed=3, place=place)
    for _, state in states(loop.model):
        assert state["encode"].isfinite().all() and state["history"].isfinite().all()
    loop(seed=4)
    for prefix, state in states(loop.model):
        assert state["encode"].isfinite().all() and state["history"].isfinite().all()
        poisoned = state["nonfinite"] > 0
        # dy of every layer; with an Inf in x also the x of both, and the weights never
        assert poisoned.tolist() == ([True] if "backward" in prefix else [place == "x", False]), prefix
        assert (state["nonfinite"] <= 1).all() and (before[prefix]["nonfinite"] == 0).all()
    loop(seed=5), loop(seed=6)
    for prefix, state in states(loop.model):
        assert (state["nonfinite"] <= 1).all() and (state["current"] == 0).all(), prefix
        # three good steps; a slot that stayed finite learns from the skipped one too, where it ended a step
        learned, poisoned = state["head"] - before[prefix]["head"], state["nonfinite"] > 0
        assert (learned[~poisoned] == (3 if ends == "attach" else 4)).all(), prefix
        assert (learned[poisoned] >= (2 if ends == "attach" else 3)).all(), prefix


# -- how far a value that is not finite spreads ------------------------------------------------------------------------

ROWS, OUT, IN = 150, 200, 160
TOKEN, FEATURE, OUTPUT = 140, 131, 70  # a token, an input feature, an output feature

ALL = slice(None)
SPREAD = {  # (place, result): the operand of the GEMM, and the elements of the result that are not finite
    ("x", "y"): ("fprop", "left", (TOKEN, ALL)),
    ("x", "dw"): ("wgrad", "right", (ALL, FEATURE)),
    ("w", "y"): ("fprop", "right", (ALL, OUTPUT)),
    ("w", "dx"): ("dgrad", "right", (ALL, FEATURE)),
    ("dy", "dx"): ("dgrad", "left", (TOKEN, ALL)),
    ("dy", "dw"): ("wgrad", "left", (OUTPUT, ALL)),
}
IN_BLOCKS = {("w", "y"): (ALL, slice(0, 128)), ("w", "dx"): (ALL, slice(128, None))}


def spread(recipe, place, name):
    """The elements of a result that are not finite: those of the row of the value, of its block, or all if the amax of
    the whole tensor is measured."""
    if (place, name) == ("dy", "db"):
        return (OUTPUT,)
    gemm, side, row = SPREAD[place, name]
    recipe = octavo.recipe(recipe)
    quantizer = getattr(getattr(recipe.linear(), gemm), side)
    if quantizer is None or recipe.stateful:
        return row
    if quantizer.two_level or quantizer.block == (None, None):
        return ...
    return IN_BLOCKS[place, name] if quantizer.block == (128, 128) else row


AT = {"x": (TOKEN, FEATURE), "w": (OUTPUT, FEATURE), "dy": (TOKEN, OUTPUT)}


def results(layer, x, dy, *sizes):
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    y = layer(x, *sizes)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad, "db": layer.bias.grad}


@every
@places
@values
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@on_devices
def test_a_value_that_is_not_finite_spreads_over_its_scale(recipe, place, value, dtype, device):
    """Each result is not finite exactly where the recipe's units say, which is everywhere nn.Linear's is not."""
    plain = nn.Linear(IN, OUT, device=device, dtype=dtype)
    tensors = {
        "x": randn(ROWS, IN, seed=2).to(device, dtype),
        "w": randn(OUT, IN, seed=3).to(device, dtype) * 0.1,
        "dy": randn(ROWS, OUT, seed=4).to(device, dtype),
    }
    tensors[place] = corrupt(tensors[place], value, AT[place])
    with torch.no_grad():
        plain.weight.copy_(tensors["w"])
    want = results(plain, tensors["x"], tensors["dy"])
    model = nn.Sequential(copy.deepcopy(plain))
    # a fresh delayed scale is measured, so that the first step's unit would be the tensor
    octavo.convert(model, f"{recipe}(cold_start='one')" if is_stateful(recipe) else recipe)
    found = results(model[0], tensors["x"], tensors["dy"])
    for name, result in found.items():
        expected = torch.zeros_like(result, dtype=torch.bool)
        if (place, name) in (*SPREAD, ("dy", "db")):
            expected[spread(recipe, place, name)] = True
        assert torch.equal(~result.isfinite(), expected), (name, (~result.isfinite()).sum(), expected.sum())
        assert (expected | want[name].isfinite()).all(), name


@every
@places
@pytest.mark.parametrize("value", [math.inf, math.nan])
@on_devices
def test_an_expert_does_not_see_another_ones_value_that_is_not_finite(recipe, place, value, device):
    """An expert's results with a value that is not finite elsewhere are those without it, bit for bit."""
    layer = octavo.GroupedLinear(3, IN, OUT, recipe=recipe, device=device)
    sizes = torch.tensor([40, 30, 70], device=device)
    x, dy = randn(ROWS, IN, seed=2).to(device), randn(ROWS, OUT, seed=4).to(device)
    rounding = {name: t.clone() for name, t in octavo.state_dict(layer).items()}
    want = results(layer, x, dy, sizes)
    octavo.load_state_dict(layer, rounding)  # both runs draw the same numbers
    at = (1, OUTPUT, FEATURE) if place == "w" else ((50, FEATURE) if place == "x" else (50, OUTPUT))
    if place == "w":
        with torch.no_grad():
            layer.weight[at] = value
    x = corrupt(x, value, at) if place == "x" else x
    dy = corrupt(dy, value, at) if place == "dy" else dy
    found = results(layer, x, dy, sizes)
    seen = False
    for name, result in found.items():
        by_group = result.split([40, 30, 70, 10]) if name in ("y", "dx") else result.unbind()
        twin = want[name].split([40, 30, 70, 10]) if name in ("y", "dx") else want[name].unbind()
        for g, (a, b) in enumerate(zip(by_group, twin, strict=True)):
            if g == 1:
                seen |= has_nonfinite(a)
            else:
                assert_same(a, b, f"{name} of group {g}")
    assert seen
