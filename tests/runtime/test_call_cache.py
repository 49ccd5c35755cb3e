"""Hits of the call cache, of runs of operations, grouped layers and mixtures: nothing but the recording runs, and only
if everything that decided the call is as it was."""

import copy
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import octavo
from octavo.fusion import runs
from octavo.ops.quantized import Quantized
from octavo.runtime import call_cache
from octavo.runtime.contract import LAYERS, ForwardResult
from octavo.scaling.delayed_scaling import NO_OPERANDS, OperandMask
from tests.support.state_tensors import state_tensors

PACKAGE = str(Path(octavo.__file__).parent) + "/"
K, ROWS, GROUPS = 64, 32, 4
WHERE = {"dtype": torch.bfloat16}
MOST = {
    "run": 40,
    "mlp": 48,
    "grouped": 18,
    "experts": 85,
}  # calls of a forward that is a hit; experts sort the tokens first


@pytest.fixture(autouse=True)
def device(monkeypatch):
    monkeypatch.setattr(call_cache, "DEVICES", {"cpu"})
    call_cache.forget()


def stubbed(monkeypatch, name):
    """Replace the functions of a layer by ones that read no sizes on the host, as kernels do not."""

    def forward_and_save(config, inputs, saving):
        scale = 2 if inputs[1] is None or not inputs[1].is_floating_point() else inputs[1].float().mean()
        return ForwardResult((inputs[0] * scale,), (), ()), (inputs[0],) if saving else ()

    def backward(config, saved, buffers, grads, writes=None):
        return grads[0] * 2 + saved[0], *[None] * 40

    layer = LAYERS[name]
    monkeypatch.setattr(layer, "forward_and_save", forward_and_save)
    monkeypatch.setattr(layer, "backward", backward)


def build(kind, monkeypatch, recipe="fp8-current"):
    """A module, and its call."""
    more = {"recipe": recipe, **WHERE}
    if kind == "run":
        module = octavo.Sequential(octavo.Linear(K, K, **more), octavo.ops.GELU(), octavo.Linear(K, K, **more))
        return module, module
    if kind == "mlp":
        module = octavo.LayerNormMLP(K, 2 * K, **more)
        return module, module
    if kind == "grouped":
        stubbed(monkeypatch, "grouped-linear")
        module = octavo.GroupedLinear(GROUPS, K, K, **more)
        sizes = torch.full((GROUPS,), ROWS // GROUPS)
        return module, lambda x: module(x, sizes)
    stubbed(monkeypatch, "chain")
    module = octavo.moe.Experts(GROUPS, K, 2 * K, **more)
    indices, probs = torch.randint(0, GROUPS, (ROWS, 2)), torch.rand(ROWS, 2)
    return module, lambda x: module(x, indices, probs)


def example(rows=ROWS):
    return torch.randn(rows, K, **WHERE)


def step(module, x, call=None):
    """Return y, the gradients, and the state that forward and backward leave."""
    x = x.detach().requires_grad_(x.requires_grad)
    module.zero_grad()
    y = (module if call is None else call)(x)
    if y.requires_grad:
        y.backward(torch.ones_like(y))
    return [y.detach(), x.grad, *[p.grad for p in module.parameters()], *state_tensors(module)]


def warmed(kind, monkeypatch, recipe="fp8-current"):
    module, call = build(kind, monkeypatch, recipe)
    for i in range(8):
        step(module, example().requires_grad_(), call)
        if i < 2:
            octavo.step(module)
    return module, call


def is_hit(call, x):
    """Whether a call is a hit: then no operation makes its part of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "planned_run", None)
        patch.setattr(Quantized, "_weight_side", None)
        try:
            call(x)
        except TypeError:
            return False
    return True


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "fp8-current", "fp8-block"])
@pytest.mark.parametrize("kind", MOST)
def test_a_call_like_the_one_before_is_a_hit_and_few_calls(kind, recipe, monkeypatch):
    module, call = warmed(kind, monkeypatch, recipe)
    for layer in [m for m in module.modules() if isinstance(m, Quantized)]:
        layer._scaling.uncalibrated = NO_OPERANDS  # a stub observes nothing
    for _ in range(4):
        step(module, example().requires_grad_(), call)
    assert is_hit(call, example().requires_grad_())
    calls = Counter()

    def seen(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            calls[code.co_filename.removeprefix(PACKAGE)] += 1

    x = example().requires_grad_()
    sys.setprofile(seen)
    try:
        call(x)
    finally:
        sys.setprofile(None)
    assert calls.total() <= MOST[kind], calls


def test_one_hit_serves_sizes_of_groups_that_change(monkeypatch):
    layer, _ = warmed("grouped", monkeypatch)
    assert is_hit(lambda x: layer(x, torch.tensor([0, 0, 0, ROWS])), example().requires_grad_())
    assert not is_hit(lambda x: layer(x, [8, 8, 8, 8]), example().requires_grad_()), "a list is checked and copied"
    assert not is_hit(lambda x: layer(x, torch.full((GROUPS,), 8, dtype=torch.int32)), example().requires_grad_())


def linear_of(module):
    return next(m for m in module.modules() if isinstance(m, octavo.Linear))


def replace_weight(module):
    layer = linear_of(module)
    layer.weight = nn.Parameter(torch.full_like(layer.weight, 0.5))


def set_forward(module):
    layer = linear_of(module)
    layer.forward = lambda x: type(layer).forward(layer, x) * 2


def accumulate(module):
    layer = linear_of(module)
    layer.fuse_wgrad_accumulation = True
    layer.weight.main_grad = torch.ones(K, K)


CHANGES = {
    "weight replaced": replace_weight,
    "weight written to": lambda m: linear_of(m).weight.data.mul_(3),
    "weight frozen": lambda m: linear_of(m).weight.requires_grad_(False),
    "all frozen": lambda m: m.requires_grad_(False),
    "bias dropped": lambda m: setattr(linear_of(m), "bias", None),
    "weight that is codes": lambda m: octavo.quantize_weights(m),
    "evaluation": lambda m: m.eval(),
    "one layer in evaluation": lambda m: linear_of(m).eval(),
    "another recipe": lambda m: setattr(linear_of(m), "recipe", "fp8-rowwise"),
    "scales that are not known": lambda m: setattr(linear_of(m)._scaling, "uncalibrated", OperandMask(x=True)),
    "codes made again": lambda m: setattr(linear_of(m), "keep_weight_codes", False),
    "bias returned": lambda m: setattr(m[2], "return_bias", True),
    "main_grad": accumulate,
    "deferred": lambda m: setattr(linear_of(m), "delay_wgrad_compute", True),
    "a hook": lambda m: linear_of(m).register_forward_hook(lambda module, arguments, y: y * 2),
    "a hook of backward": lambda m: m[1].register_full_backward_hook(lambda module, dx, dy: (dx[0] * 2,)),
    "a forward of the caller's": set_forward,
    "another activation": lambda m: m.__setitem__(1, octavo.ops.ReLU()),
    "no rules": lambda m: setattr(m, "rules", None),
}


def outcome(module, x):
    try:
        return [None if t is None else t.clone() for t in step(module, x)]
    except (octavo.errors.Unsupported, AttributeError) as error:
        return [type(error), str(error)]


def assert_as_written(module, twin, x, monkeypatch):
    made = outcome(module, x)
    with monkeypatch.context() as patch:
        patch.setattr(call_cache, "DEVICES", set())
        want = outcome(twin, x)
    for a, b in zip(made, want, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_an_operation_of_a_run_counts(change, recipe, monkeypatch):
    if change.startswith("scales") and recipe != "fp8-delayed":
        pytest.skip("fp8-current keeps no scales")
    module, _ = warmed("run", monkeypatch, recipe)
    twin = copy.deepcopy(module)
    for one in (module, twin):
        CHANGES[change](one)
    for _ in range(5):  # what was changed is a hit after a while, too
        assert_as_written(module, twin, example().requires_grad_(), monkeypatch)


CALLS = {
    "x without a gradient": lambda x: x.detach(),
    "x of other rows": lambda x: x.detach()[:7].requires_grad_(),
    "x of three dims": lambda x: x.detach().view(2, ROWS // 2, K).requires_grad_(),
    "x transposed in memory": lambda x: x.detach().T.contiguous().T.requires_grad_(),
    "x in float32": lambda x: x.detach().float().requires_grad_(),
}


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
@pytest.mark.parametrize("way", CALLS)
def test_another_x_of_a_run_is_another_call(way, recipe, monkeypatch):
    module, _ = warmed("run", monkeypatch, recipe)
    twin = copy.deepcopy(module)
    for _ in range(4):
        x = example().requires_grad_()
        assert_as_written(module, twin, CALLS[way](x), monkeypatch)
        assert_as_written(module, twin, x, monkeypatch)


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "torch.autocast": lambda: torch.autocast("cpu", torch.float16),
    "first microbatch": lambda: octavo.microbatch(first=True),
    "later microbatch": lambda: octavo.microbatch(first=False),
    "reference": lambda: octavo.backend.use("reference"),
}


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_around_a_run_counts(mode, recipe, monkeypatch):
    module, _ = warmed("run", monkeypatch, recipe)
    twin = copy.deepcopy(module)
    for _ in range(4):
        x = example().requires_grad_()
        with MODES[mode]():
            assert_as_written(module, twin, x, monkeypatch)
        assert_as_written(module, twin, x, monkeypatch)


def test_a_plan_that_a_run_has_not_logged_is_logged_in_spite_of_a_hit(monkeypatch, caplog):
    module, _ = warmed("run", monkeypatch)
    other, x = copy.deepcopy(module), example().requires_grad_()
    assert is_hit(module, x)
    for part in other._layout().parts:
        part.fuser._logged.clear()
    assert not is_hit(other, x)
    step(other, x)
    assert is_hit(other, x)


def test_a_required_fusion_is_checked_in_a_hit(monkeypatch):
    module, _ = warmed("mlp", monkeypatch)
    x = example().requires_grad_()
    assert is_hit(module, x)
    module.require = ("add-norm-linear",)
    with pytest.raises(octavo.errors.UnsupportedConfig, match="is required and was refused"):
        module(x)
