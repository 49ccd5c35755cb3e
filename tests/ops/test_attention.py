"""RotaryAttention: against attention in float64, alone and in runs, compiled, moved and copied."""

import copy

import pytest
import torch
import torch.nn.functional as F

import octavo
from octavo import ops
from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.ops.attention import RotaryAttention
from tests.support.linear_oracle import assert_same

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RECIPES = ["bf16", "fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"]
WIDTH, HEADS, SHARED, CHANNELS, LENGTH = 64, 4, 2, 32, 48
QKV = (HEADS + 2 * SHARED) * CHANNELS


def attention(**settings):
    return RotaryAttention(HEADS, CHANNELS, **{"kv_heads": SHARED, "positions": LENGTH, **settings})


def block(recipe, device="cpu", dtype=torch.bfloat16, residual=False, **settings):
    torch.manual_seed(0)
    layers = [
        ops.Linear(WIDTH, QKV, bias=False, recipe=recipe),
        attention(),
        ops.Linear(HEADS * CHANNELS, WIDTH, bias=False, recipe=recipe),
    ]
    if residual:
        layers = [
            ops.MakeExtraOutput(channel="x", output_to_caller=False), ops.RMSNorm(WIDTH), *layers,
            ops.AddExtraInput(source="x"),
        ]  # fmt: skip
    return octavo.Sequential(*layers, **settings).to(device, dtype)


def given(device="cpu", dtype=torch.bfloat16, length=40, width=WIDTH, seed=1):
    x = torch.randn(2, length, width, generator=torch.Generator().manual_seed(seed))
    return x.to(device, dtype).requires_grad_()


def steps(model, call, device="cpu", dtype=torch.bfloat16, number=3):
    """y and all gradients of the last of some steps."""
    for seed in range(number):
        x = given(device, dtype, seed=seed)
        model.zero_grad()
        y = call(x)
        y.float().square().sum().backward()
        octavo.step(model)
    return [y.detach(), x.grad, *[p.grad for p in model.parameters()]]


def exact(x, base=10000.0, causal=True):
    """The same in float64, head by head."""
    q, k, v = x.double().split((HEADS * CHANNELS, SHARED * CHANNELS, SHARED * CHANNELS), -1)
    q, k, v = (t.unflatten(-1, (-1, CHANNELS)).transpose(1, 2) for t in (q, k, v))
    speed = base ** (-torch.arange(0, CHANNELS, 2, dtype=torch.float64) / CHANNELS)
    angle = torch.arange(x.shape[1])[:, None] * speed

    def turned(t):
        low, high = t.chunk(2, -1)
        return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), -1)

    k, v = (t.repeat_interleave(HEADS // SHARED, 1) for t in (turned(k), v))
    return F.scaled_dot_product_attention(turned(q), k, v, is_causal=causal).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("causal", [True, False])
def test_values_and_gradients_are_those_of_float64(causal):
    x = given(dtype=torch.float32, width=QKV)
    twin = x.detach().double().requires_grad_()
    y, want = attention(causal=causal, base=500.0)(x), exact(twin, 500.0, causal)
    dy = torch.randn_like(y)
    y.backward(dy), want.backward(dy.double())
    torch.testing.assert_close(y, want.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad, twin.grad.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_run_has_the_bits_of_the_modules_one_by_one(recipe, device):
    model, twin, third = (block(recipe, device, rules=rules) for rules in ((), None, ()))
    found, want = steps(model, model, device), steps(twin, twin, device)
    alone = steps(third, lambda x: third[2](third[1](third[0](x))), device)
    for a, b, c in zip(found, want, alone, strict=True):
        assert_same(a, b)
        assert_same(a, c)
    fired = model.explain(given(device)).fired
    assert ("linear-rotary" in fired) == (recipe != "bf16")
    assert "linear-rotary" not in twin.explain(given(device)).fired


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_has_the_same_bits(recipe, device):
    compiler = "aot_eager" if device == "cpu" else "inductor"
    torch._dynamo.reset()
    model, twin = block(recipe, device, residual=True), block(recipe, device, residual=True)
    call = torch.compile(model, fullgraph=True, backend=compiler)
    for a, b in zip(steps(model, call, device), steps(twin, twin, device), strict=True):
        assert_same(a, b)


def test_the_run_ends_with_attention():
    explanation = block("fp8-block", residual=True).explain(given())
    assert [run.ops[-1] for run in explanation.runs] == ["RotaryAttention", "AddExtraInput"]
    assert explanation.runs[0].backward[0] == "linear-rotary"


@pytest.mark.parametrize("before", [[], [ops.MakeExtraOutput(channel="a")], [ops.RMSNorm(QKV)]], ids=str)
def test_after_any_operation_x_is_left_as_it_was(before):
    model = octavo.Sequential(*before, attention())
    x = given(dtype=torch.float32, width=QKV)
    kept = x.detach().clone()
    made = model(x)
    y = made[0] if isinstance(made, tuple) else made
    with torch.no_grad():
        want = attention()(octavo.Sequential(*before)(x) if before and len(before[0].state_dict()) else x)
    y.sum().backward()
    assert_same(y.detach(), want)
    assert_same(x.detach(), kept)
    if isinstance(made, tuple):
        assert_same(made[1].detach(), kept)


def test_a_bias_before_attention_has_a_gradient():
    torch.manual_seed(0)
    model = octavo.Sequential(ops.Linear(WIDTH, QKV, bias=True, recipe="fp8-block"), attention())
    explanation = model.explain(given(dtype=torch.float32))
    assert "linear-rotary" not in explanation.fired and "the bias is a sum over rows" in str(explanation)
    model(given(dtype=torch.float32)).square().sum().backward()
    assert model[0].bias.grad.abs().sum() > 0


@pytest.mark.parametrize("length", [0, 1, LENGTH])
def test_short_and_long_sequences(length):
    x = given(dtype=torch.float32, length=length)
    y = block("fp8-current", dtype=torch.float32)(x)
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape and bool(y.isfinite().all())


def test_without_gradients_attention_has_the_same_bits():
    model = block("fp8-block")
    with torch.no_grad():
        plain = model(given())
    with torch.inference_mode():
        assert_same(model(given().detach()), plain)


# -- its factors -------------------------------------------------------------------------------------------------------


def test_factors_stay_float32_and_are_not_saved():
    layer = attention()
    kept = layer.own.clone()
    assert layer.state_dict() == {}
    for moved in (attention().bfloat16(), attention().half(), attention().double(), copy.deepcopy(layer).bfloat16()):
        assert moved.own.dtype == moved.other.dtype == torch.float32
        assert_same(moved.own, kept)


def test_factors_come_to_life_after_the_meta_device():
    with torch.device("meta"):
        layer = attention()
    assert layer.own.is_meta
    layer.to_empty(device="cpu")
    assert_same(layer.own, attention().own)
    assert_same(layer.other, attention().other)


def test_factors_survive_to_empty_and_come_to_life_where_a_state_is_assigned():
    layer = attention()
    for _ in range(3):
        layer.to_empty(device="cpu")
        assert_same(layer.own, attention().own)
    model = block("fp8-current", "meta", torch.float32)
    state = {name: torch.randn(t.shape) for name, t in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert model[1].own.is_meta
    want = model(given(dtype=torch.float32))
    assert_same(model[1].other, attention().other)
    for place in (lambda m: m.to("cpu"), lambda m: torch.compile(m, fullgraph=True, backend="aot_eager")):
        again = block("fp8-current", "meta", torch.float32)
        again.load_state_dict(state, assign=True)
        assert_same(place(again)(given(dtype=torch.float32)).detach(), want.detach())


def test_a_model_that_stays_on_the_meta_device_keeps_its_factors_there():
    layer = block("bf16", "meta")[1].half()
    assert layer.own.is_meta and layer.own.dtype == torch.float32


def test_factors_of_late_positions_are_those_of_float64():
    layer = RotaryAttention(1, 64, positions=100_000)
    speed = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    want = (99_999 * speed).cos()
    torch.testing.assert_close(layer.own[-1, 0, :32].double(), want, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_another_default_dtype_changes_nothing(default):
    want = attention().own
    torch.set_default_dtype(default)
    try:
        found = attention().own
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(found, want)


# -- what it refuses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"heads": 0}, "heads=.* from 1 up, got 0"), ({"head_width": 7}, "in pairs, got head_width=7"),
        ({"kv_heads": 3}, "heads=4 and kv_heads=3"), ({"positions": 2.5}, "positions=.* got 2.5"),
        ({"base": 0}, "base=.* from 1 up, got 0"), ({"base": float("nan")}, "got nan"), ({"base": "a"}, "got 'a'"),
        ({"causal": "no"}, "causal=.* True or False, got 'no'"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(settings, text):
    with pytest.raises(UnsupportedConfig, match=text):
        RotaryAttention(**{"heads": 4, "head_width": 8, "positions": 16, **settings})


def test_inputs_that_do_not_fit():
    layer = attention()
    with pytest.raises(UnsupportedShape, match=r"takes \[B, T, 256\].*got \(2, 40, 64\)"):
        layer(given(dtype=torch.float32))
    with pytest.raises(UnsupportedShape, match=r"got \(40, 256\)"):
        layer(torch.ones(40, QKV))
    with pytest.raises(UnsupportedShape, match="has 48 positions, got a sequence of 49"):
        layer(torch.ones(1, 49, QKV))
    with pytest.raises(UnsupportedDtype, match="float64"):
        layer(torch.ones(1, 4, QKV, dtype=torch.float64))
    with pytest.raises(UnsupportedDevice, match="on meta and RotaryAttention on cpu"):
        layer(torch.ones(1, 4, QKV, device="meta"))


def test_meta_tensors_get_shapes():
    model = block("fp8-block", "meta")
    assert model(torch.ones(2, 40, WIDTH, dtype=torch.bfloat16, device="meta")).shape == (2, 40, WIDTH)
