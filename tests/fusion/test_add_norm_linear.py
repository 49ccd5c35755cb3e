"""add-norm-linear: the norm's kernel adds the residual. Nothing but the plan tells a call from one without the rule."""

import copy
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch

import octavo
from octavo import ops
from octavo.errors import UnsupportedConfig
from octavo.fusion import rule as pattern
from octavo.recipes import SHIPPED
from tests.support.custom_operations import Emit
from tests.support.linear_oracle import assert_same, spiky
from tests.support.saved_bytes import Saved
from tests.support.sequentials import (
    FUSED_AT_ONCE,
    QUANTIZED,
    Graphs,
    H,
    M,
    fill,
    fired,
    quantized,
    recipes,
    unbiased,
    unfused,
)
from tests.support.steps import assert_equal, assert_state, compiled, step

RULE = "add-norm-linear"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NORMS = {"rms": ops.RMSNorm, "layer": ops.LayerNorm}
STRANGE = (float("nan"), float("inf"), -float("inf"), -0.0, 3e38, 1e-40)

norms = pytest.mark.parametrize("norm", NORMS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
forks = pytest.mark.parametrize("fork", [True, False], ids=["fork", "no fork"])


def model_of(recipe, *, norm="rms", fork=True, dtype=torch.float32, width=H, out=H, device="cpu", **settings):
    """x + extra, which is an extra output if there is a fork, then the norm and a Linear."""
    forked = [ops.MakeExtraOutput()] if fork else []
    model = octavo.Sequential(
        ops.AddExtraInput(), *forked, NORMS[norm](width), unbiased(recipe, out, width), **settings
    )
    return fill(model.to(dtype)).to(device)


def block_of(recipe, *, dtype=torch.float32, width=H, hidden=2 * H, device="cpu"):
    """Two blocks of a transformer without attention: x + Linear(norm(x)), then y + MLP(norm(y)); then a norm."""
    parts = []
    for i in range(2):
        parts += [
            ops.MakeExtraOutput(channel=f"a{i}", output_to_caller=False), ops.RMSNorm(width),
            unbiased(recipe, width, width), ops.AddExtraInput(source=f"a{i}"),
            ops.MakeExtraOutput(channel=f"m{i}", output_to_caller=False), ops.RMSNorm(width),
            unbiased(recipe, 2 * hidden, width), ops.SwiGLU(), unbiased(recipe, width, hidden),
            ops.AddExtraInput(source=f"m{i}"),
        ]  # fmt: skip
    return fill(octavo.Sequential(*parts, ops.RMSNorm(width)).to(dtype)).to(device)


def batch(*lead, dtype=torch.float32, width=H, out=H, fork=True, device="cpu"):
    """x and extra; dy, and one for the extra output."""
    lead = lead or (M,)
    inputs = [spiky(*lead, width, seed=i, dtype=dtype, size=8.0).to(device) for i in range(2)]
    widths = (out, width) if fork else (out,)
    return inputs, [spiky(*lead, w, seed=90 + i, dtype=dtype).to(device) for i, w in enumerate(widths)]


@contextmanager
def rule_off():
    """Every rule but this one."""
    real = pattern.global_rules()
    pattern.replace_global_rules(tuple(rule for rule in real if rule.name != RULE))
    try:
        yield
    finally:
        pattern.replace_global_rules(real)


def step_without(model, inputs, dys, **given):
    with rule_off():
        return step(model, inputs, dys, **given)


# -- chosen ------------------------------------------------------------------------------------------------------------


@quantized
@norms
@forks
def test_the_plan_has_one_step(recipe, norm, fork):
    model = model_of(recipe, norm=norm, fork=fork)
    inputs, _ = batch(fork=fork)
    explained = model.explain(*[t.requires_grad_() for t in inputs])
    assert explained.runs[0].forward == (RULE,)
    gradient = {("rms", True): ("linear", "add-rmsnorm", "add"), ("layer", True): ("linear", "norm", "fork", "add")}
    assert explained.runs[0].backward == gradient.get((norm, fork), ("linear", "norm", "add"))
    assert [r.by for r in explained.refused if r.rule == "norm-linear"] == [RULE]


def test_every_residual_but_the_last_goes_into_a_norm():
    model, x = block_of("fp8-block"), spiky(M, H).requires_grad_()
    run = model.explain(x).runs[0]
    whole = (RULE, "mlp")
    assert run.forward == ("fork", "norm-linear", *whole, RULE, *whole, "add", "norm")
    assert run.backward.count("add-rmsnorm") == 4 and run.backward.count("mlp") == 2


@pytest.mark.parametrize(
    ("recipe", "condition"),
    [
        ("bf16", "fprop is quantized"),
        ("fp8-current(wgrad='bf16')", "x is kept as codes"),
        ("fp8-delayed", "scales do not wait for data"),
    ],
)
def test_refusals_are_those_of_the_norm_and_the_linear(recipe, condition):
    model = model_of(recipe)
    inputs, dys = batch()
    explained = model.explain(*[t.clone().requires_grad_() for t in inputs])
    assert RULE not in explained.fired
    assert [r.condition for r in explained.refused if r.rule == RULE] == [condition]
    assert_equal(step(model, inputs, dys), step_without(copy.deepcopy(model), inputs, dys))


def test_the_second_step_of_delayed_scaling_fuses():
    model = model_of("fp8-delayed")
    twin, (inputs, dys) = copy.deepcopy(model), batch()
    for i in range(3):
        assert (RULE in fired(model, inputs)) == (i > 0)
        assert_equal(step(model, inputs, dys), step_without(twin, inputs, dys), f"step {i}")
        octavo.step(model), octavo.step(twin)
    assert_state(model, twin)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("other", DTYPES, ids=str)
def test_a_residual_of_another_dtype_is_added_on_its_own(dtype, other):
    model = model_of("fp8-current", dtype=dtype)
    inputs, dys = batch(dtype=dtype)
    inputs[1] = inputs[1].to(other)
    explained = model.explain(*[t.clone().requires_grad_() for t in inputs])
    if dtype == other:
        assert RULE in explained.fired
        return
    assert "norm-linear" in explained.fired and RULE not in explained.fired
    assert [r.condition for r in explained.refused if r.rule == RULE] == ["one dtype"]
    assert_equal(step(model, inputs, dys), step_without(copy.deepcopy(model), inputs, dys))


def test_a_block_that_requires_norm_linear_may_follow_a_sum():
    block = octavo.LayerNormLinear(H, H, recipe="fp8-current")
    model = octavo.Sequential(ops.AddExtraInput(), block)
    (x, extra), _ = batch()
    assert model.explain(x, extra).fired == (RULE,)
    assert_same(model(x, extra), block(x + extra))


def test_required_and_refused_says_why():
    model = model_of("bf16", require=RULE)
    with pytest.raises(UnsupportedConfig, match="'add-norm-linear' is required and was refused: the recipe multiplies"):
        model(*batch()[0])


def test_a_sum_in_place_is_not_taken():
    model = octavo.Sequential(ops.AddExtraInput(in_place=True), ops.RMSNorm(H), unbiased("fp8-current", H, H))
    (x, extra), _ = batch()
    want = extra + x
    assert model.explain(x, extra.clone()).fired == ("norm-linear",)
    model(x, extra)
    assert_same(extra, want)


# -- the same bits -----------------------------------------------------------------------------------------------------


@quantized
@dtypes
@norms
@forks
def test_a_step_has_the_bits_of_one_without_the_rule(recipe, dtype, norm, fork):
    model = model_of(recipe, norm=norm, fork=fork, dtype=dtype)
    twin, plain = copy.deepcopy(model), unfused(model)
    inputs, dys = batch(2, 12, dtype=dtype, fork=fork)
    assert RULE in fired(model, inputs)
    found = step(model, inputs, dys)
    assert_equal(found, step_without(twin, inputs, dys))
    assert_equal(found[: len(dys)], step(plain, inputs, dys)[: len(dys)], "no rules at all")  # dx may be rounded once
    assert_state(model, twin)


@recipes(SHIPPED)
@dtypes
def test_blocks_have_the_bits_of_those_without_the_rule(recipe, dtype):
    model = block_of(recipe, dtype=dtype)
    twin = copy.deepcopy(model)
    x, dy = spiky(M, H, dtype=dtype), spiky(M, H, seed=1, dtype=dtype)
    for i in range(2):
        assert_equal(step(model, x, dy), step_without(twin, x, dy), f"step {i}")
        octavo.step(model), octavo.step(twin)
    assert_state(model, twin)


LAYOUTS = {
    "turned": lambda t: t.mT.contiguous().mT,
    "every other row": lambda t: t.repeat_interleave(2, 0)[::2],
    "one row again and again": lambda t: t[:1].expand(t.shape),
    "one column again and again": lambda t: t[..., :1].expand(t.shape),
    "at an odd address": lambda t: torch.cat((t.new_zeros(3), t.reshape(-1)))[3:].view(t.shape),
    "part of wider rows": lambda t: torch.cat((t, t), -1)[..., 1 : t.shape[-1] + 1],
}


def assert_layouts(model, inputs, dys, call=None, places=((0,), (1,), (0, 1))):
    """Whatever the memory of x and extra, a step is that of contiguous ones."""
    for change in LAYOUTS.values():
        for changed in places:
            laid = [change(t) if i in changed else t for i, t in enumerate(inputs)]
            want = step(model, [t.contiguous() for t in laid], dys)
            leaves = [t.detach().requires_grad_() for t in laid]
            model.zero_grad()
            outputs = (call or model)(*leaves)
            torch.autograd.backward(outputs, dys)
            found = [*[t.detach() for t in outputs], *[t.grad for t in leaves], *[p.grad for p in model.parameters()]]
            assert_equal(found, want)


@pytest.mark.parametrize("lead", [(M,), (2, 3, 4)], ids=str)
def test_strides_do_not_matter(lead):
    model = model_of("fp8-block", dtype=torch.bfloat16)
    assert_layouts(model, *batch(*lead, dtype=torch.bfloat16))


def test_x_may_be_the_residual_itself():
    model, (inputs, dys) = model_of("fp8-current"), batch()
    leaves = [inputs[0].clone().requires_grad_() for _ in range(2)]
    outputs = model(leaves[0], leaves[0])
    torch.autograd.backward(outputs, dys)
    with rule_off():
        want = model(leaves[1], leaves[1])
    torch.autograd.backward(want, dys)
    assert_equal([*outputs, leaves[0].grad], [*want, leaves[1].grad])


@forks
@pytest.mark.parametrize("lead", [(0,), (2, 0), (1,), ()], ids=str)
def test_hardly_any_rows(lead, fork):
    model = model_of("fp8-current", fork=fork)
    inputs = [spiky(*lead, H, seed=i) for i in range(2)]
    dys = [spiky(*lead, H, seed=9 + i) for i in range(1 + fork)]
    assert RULE in fired(model, inputs)
    found = step(model, inputs, dys)
    assert found[0].shape == (*lead, H)
    assert_equal(found, step_without(copy.deepcopy(model), inputs, dys))


@pytest.mark.parametrize("width", [1, 7, 33, 130])
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-rowwise", FUSED_AT_ONCE["fp8-delayed"]])
def test_widths_that_are_multiples_of_nothing(width, recipe):
    model = model_of(recipe, width=width, out=5)
    inputs, dys = batch(9, width=width, out=5)
    assert RULE in fired(model, inputs)
    assert_equal(step(model, inputs, dys), step_without(copy.deepcopy(model), inputs, dys))


@dtypes
@pytest.mark.parametrize("recipe", ["fp8-rowwise", "fp8-block", "mxfp8", FUSED_AT_ONCE["fp8-delayed"]])
def test_values_that_are_not_finite(dtype, recipe):
    model, (inputs, dys) = model_of(recipe, dtype=dtype), batch(dtype=dtype)
    for i, value in enumerate(STRANGE):
        inputs[i % 2][3 * i, 5] = torch.tensor(value).to(dtype)
    inputs[0][20, 1] = torch.finfo(dtype).max
    inputs[1][20, 1] = torch.finfo(dtype).max  # each is finite, and the sum is not
    assert_equal(step(model, inputs, dys), step_without(copy.deepcopy(model), inputs, dys))


@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("parameters", [True, False], ids=["parameters", "no parameters"])
def test_gradients_that_nobody_wants(frozen, parameters):
    model, (inputs, dys) = model_of("fp8-current"), batch()
    for p in model.parameters():
        p.requires_grad_(parameters)
    if len(frozen) == 2:
        dys[1] = None  # the extra output wants no gradient then
        if not parameters:
            return
    found = step(model, inputs, dys, frozen=frozen)
    assert_equal(found, step_without(copy.deepcopy(model), inputs, dys, frozen=frozen))


def test_an_extra_of_unknown_shape_is_spread_as_without_the_rule():
    """The shape of what a user's operation returns is not known when a run is planned."""
    model = fill(octavo.Sequential(Emit(), ops.AddExtraInput(), ops.RMSNorm(H), unbiased("fp8-current", H, H)))
    x, extra = spiky(2, 3, H), spiky(2, 1, H, seed=1)
    assert RULE in model.explain(x, extra).fired
    found = model(x, extra)
    with rule_off():
        assert_equal(found, model(x, extra))


# -- memory ------------------------------------------------------------------------------------------------------------


def test_the_extra_output_is_the_sum_that_the_norm_keeps():
    model = model_of("fp8-current", dtype=torch.bfloat16)
    inputs = [t.requires_grad_() for t in batch(256, dtype=torch.bfloat16)[0]]
    kept = []
    for mode in (nullcontext(), rule_off()):
        with mode, Saved(model) as saved:
            _, extra = model(*inputs)
        assert extra.untyped_storage().data_ptr() in saved.storages
        assert_same(extra.detach(), inputs[0].detach() + inputs[1].detach())
        kept.append(saved.nbytes)
    assert kept[0] == kept[1]


# -- graphs ------------------------------------------------------------------------------------------------------------


@quantized
@forks
def test_a_graph_has_one_node_each_way_and_the_bits_of_eager(recipe, fork):
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of(recipe, fork=fork, dtype=dtype)
        inputs, dys = batch(dtype=dtype, fork=fork)
        want, graphs = step(copy.deepcopy(model), inputs, dys), Graphs()
        assert_equal(step(model, inputs, dys, call=compiled(model, graphs)), want)
        assert graphs.runs() == (1, 1)
        torch._dynamo.reset()


@pytest.mark.parametrize("recipe", ["fp8-block", FUSED_AT_ONCE["fp8-delayed"]])
def test_blocks_in_a_graph(recipe):
    model = block_of(recipe, dtype=torch.bfloat16)
    x, dy = (spiky(M, H, seed=i, dtype=torch.bfloat16) for i in range(2))
    want, graphs = step(copy.deepcopy(model), x, dy), Graphs()
    assert_equal(step(model, x, dy, call=compiled(model, graphs)), want)
    assert graphs.runs() == (1, 1)


def test_strides_do_not_matter_in_a_graph():
    for places in ((0,), (1,)):
        model = model_of("fp8-block", dtype=torch.bfloat16)
        assert_layouts(model, *batch(dtype=torch.bfloat16), compiled(model, dynamic=False), (places,))
        torch._dynamo.reset()


# -- on a GPU ----------------------------------------------------------------------------------------------------------

WIDE = partial(model_of, width=256, out=384, device="cuda")


@pytest.mark.gpu
@recipes(QUANTIZED)
@dtypes
@norms
def test_triton_has_the_bits_of_a_step_without_the_rule(recipe, dtype, norm):
    """The third call and those after it replay."""
    model = WIDE(recipe, norm=norm, dtype=dtype)
    twin = copy.deepcopy(model)
    assert RULE in fired(model, batch(160, width=256, out=384, dtype=dtype, device="cuda")[0])
    for i in range(5):
        inputs, dys = batch(160, width=256, out=384, dtype=dtype, device="cuda")
        inputs = [t * 1.5**i for t in inputs]
        assert_equal(step(model, inputs, dys), step_without(twin, inputs, dys), f"step {i}")
        octavo.step(model), octavo.step(twin)
    assert_state(model, twin)


@pytest.mark.gpu
@recipes(["fp8-delayed", "fp8-current", "fp8-block"])
@pytest.mark.parametrize("width", [256, 4096, 8192, 8704])
def test_triton_blocks_have_the_bits_of_those_without_the_rule(recipe, width):
    """Rows of the last width are longer than a program holds, and the sum is made on its own."""
    model = block_of(recipe, dtype=torch.bfloat16, width=width, hidden=256, device="cuda")
    twin = copy.deepcopy(model)
    x, dy = (spiky(144, width, seed=i, dtype=torch.bfloat16).cuda() for i in range(2))
    for i in range(4):
        assert_equal(step(model, x, dy), step_without(twin, x, dy), f"step {i}")
        octavo.step(model), octavo.step(twin)
    assert_state(model, twin)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", ["fp8-block", FUSED_AT_ONCE["fp8-delayed"]])
def test_triton_blocks_in_a_graph(recipe, backend):
    model = block_of(recipe, dtype=torch.bfloat16, width=256, device="cuda")
    x, dy = (spiky(160, 256, seed=i, dtype=torch.bfloat16).cuda() for i in range(2))
    twin = copy.deepcopy(model)
    call = compiled(model, backend)
    for i in range(4):
        assert_equal(step(model, x, dy, call=call), step(twin, x, dy), f"step {i}")


@pytest.mark.gpu
@pytest.mark.parametrize("lead", [(160,), (2, 5, 16)], ids=str)
def test_triton_strides_do_not_matter(lead):
    model = WIDE("fp8-block", dtype=torch.bfloat16)
    assert_layouts(model, *batch(*lead, width=256, out=384, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("recipe", ["fp8-rowwise", "fp8-block", FUSED_AT_ONCE["fp8-delayed"]])
def test_triton_values_that_are_not_finite(dtype, recipe):
    model = WIDE(recipe, dtype=dtype)
    inputs, dys = batch(160, width=256, out=384, dtype=dtype, device="cuda")
    for i, value in enumerate(STRANGE):
        inputs[i % 2][3 * i, 5] = torch.tensor(value).to(dtype)
    inputs[0][20, 1] = inputs[1][20, 1] = torch.finfo(dtype).max
    assert_equal(step(model, inputs, dys), step_without(copy.deepcopy(model), inputs, dys))


@pytest.mark.gpu
@pytest.mark.gpu_smoke
def test_triton_launches_no_sum():
    """A step that fuses calls no torch.add; z comes from the kernel that measures the rows."""
    model = WIDE("fp8-block", dtype=torch.bfloat16)
    inputs, _ = batch(160, width=256, out=384, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        model(*inputs)  # the first call of a process probes GEMMs and fast paths, which adds tensors
        with torch.profiler.profile() as profile:
            model(*inputs)
    assert not [event.key for event in profile.key_averages() if event.key.startswith("aten::add")]


def test_the_backward_of_a_fused_norm_reads_the_sum_and_not_its_first_term():
    model = octavo.Sequential(ops.AddExtraInput(), ops.RMSNorm(64), octavo.Linear(64, 32, recipe="fp8-current"))
    x, extra, dy = torch.randn(8, 64, requires_grad=True), torch.randn(8, 64), torch.randn(8, 32)
    (dx,) = torch.autograd.grad(model(x, extra), x, dy)
    (exact,) = torch.autograd.grad(model[2](model[1](x + extra)), x, dy)
    assert_same(dx, exact)
