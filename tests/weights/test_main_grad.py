"""fuse_wgrad_accumulation: dw goes into weight.main_grad, added or written, or backward says why it cannot."""

import pytest
import torch

import octavo
from octavo.errors import Unsupported, UnsupportedConfig, UnsupportedDtype, UnsupportedShape
from octavo.recipes import SHIPPED
from tests.support.linear_oracle import assert_same, check, expected, make, run, seed_of, spiky
from tests.support.state_tensors import made_in_inference_mode
from tests.support.steps import batch

N, K = 40, 48
every = pytest.mark.parametrize("recipe", SHIPPED)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def fused(recipe="fp8-current", main_grad=None, **settings):
    layer = make(recipe, K, N, fuse_wgrad_accumulation=True, **settings)
    if main_grad is not None:
        layer.weight.main_grad = main_grad
    return layer


def float32_dw(layer, recipe, x, dy):
    """dw before any rounding to the weight's dtype."""
    return expected(recipe, x, layer.weight.detach().float(), layer.bias, dy, seed=seed_of(layer)).dw


@every
@dtypes
def test_microbatches_are_added_after_rounding_to_the_buffers_dtype(recipe, dtype):
    start = spiky(N, K, seed=5, dtype=dtype)
    layer = fused(recipe, start.clone())
    want = start.clone()
    for i in range(3):
        x, dy = batch(i)
        want += float32_dw(layer, recipe, x, dy).to(dtype)
        found = run(layer, x, dy)
        assert found.dw is None
        assert found.dx is not None and found.db is not None
        assert_same(layer.weight.main_grad, want, f"microbatch {i}")


@every
def test_a_float32_buffer_is_not_reached_through_the_weights_bfloat16(recipe):
    layer = fused(recipe, torch.zeros(N, K), dtype=torch.bfloat16)
    x, dy = batch(0, dtype=torch.bfloat16)
    want = expected(recipe, x, layer.weight, layer.bias, dy, seed=seed_of(layer)).dw
    run(layer, x, dy)
    assert_same(layer.weight.main_grad.bfloat16(), want)
    assert not torch.equal(layer.weight.main_grad, want.float())


@every
@dtypes
def test_overwrite_main_grad_writes_over_whatever_was_there(recipe, dtype):
    layer = fused(recipe, torch.full((N, K), float("nan"), dtype=dtype))
    layer.weight.overwrite_main_grad = True
    x, dy = batch()
    want = float32_dw(layer, recipe, x, dy).to(dtype)
    run(layer, x, dy)
    assert_same(layer.weight.main_grad, want)


def test_overwriting_is_decided_at_forward():
    layer = fused(main_grad=torch.full((N, K), float("nan")))
    (x, dy), weight = batch(), layer.weight
    weight.overwrite_main_grad = True
    y = layer(x)
    weight.overwrite_main_grad = False
    later = layer(x)
    y.backward(dy)
    once = weight.main_grad.clone()
    assert not once.isnan().any()
    later.backward(dy)
    assert_same(weight.main_grad, 2 * once)


@every
@pytest.mark.parametrize("first", [True, False, None])
def test_the_cache_flag_does_not_decide_about_overwriting(recipe, first):
    layer = fused(recipe, torch.ones(N, K))
    x, dy = batch()
    want = 1 + float32_dw(layer, recipe, x, dy)
    run(layer, x, dy, is_first_microbatch=first)
    assert_same(layer.weight.main_grad, want)


def test_overwriting_a_minibatch_of_cached_weights():
    layer = fused(main_grad=torch.full((N, K), 7.0))
    want = torch.zeros(N, K)
    for i, first in enumerate((True, False, False)):
        layer.weight.overwrite_main_grad = first
        x, dy = batch(i)
        want += float32_dw(layer, "fp8-current", x, dy)
        run(layer, x, dy, is_first_microbatch=first)
    assert_same(layer.weight.main_grad, want)


# -- the other ways a buffer comes -----------------------------------------------------------------------------------


def test_get_main_grad_is_asked_when_it_exists_and_only_in_backward():
    layer, calls, buffer = fused(main_grad=torch.full((N, K), 5.0)), [], torch.zeros(N, K)
    layer.weight.get_main_grad = lambda: calls.append(1) or buffer
    x, dy = batch()
    want = float32_dw(layer, "fp8-current", x, dy)
    y = layer(x)
    assert not calls
    y.backward(dy)
    assert calls == [1]
    assert_same(buffer, want)
    assert torch.equal(layer.weight.main_grad, torch.full((N, K), 5.0))


VIEWABLE = {
    "flat": lambda: (buffer := torch.zeros(N * K), buffer.view(N, K)),
    "one more dim": lambda: (buffer := torch.zeros(1, N, K), buffer[0]),
    "two to a row": lambda: (buffer := torch.zeros(N // 2, 2 * K), buffer.view(N, K)),
    "every second element": lambda: (buffer := torch.zeros(2 * N * K)[::2], buffer.view(N, K)),
    "transposed": lambda: (buffer := torch.zeros(K, N).T, buffer),
    "inside a bucket": lambda: (buffer := torch.zeros(3 * N * K)[N * K : 2 * N * K], buffer.view(N, K)),
}


@pytest.mark.parametrize("form", VIEWABLE.values(), ids=VIEWABLE)
def test_any_buffer_that_can_be_viewed_as_the_weight(form):
    buffer, view = form()
    layer = fused(main_grad=buffer)
    x, dy = batch()
    want = float32_dw(layer, "fp8-current", x, dy)
    run(layer, x, dy)
    run(layer, x, dy)
    assert_same(view, 2 * want)
    whole = buffer if buffer._base is None else buffer._base
    assert whole.count_nonzero() == view.count_nonzero()  # nothing else was touched


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_fire_where_the_flag_asks_for_a_dummy_gradient(hook):
    layer, fired = fused(main_grad=torch.zeros(N, K)), []
    getattr(layer.weight, hook)(lambda g: fired.append(1))
    layer.weight.grad_added_to_main_grad = False
    x, dy = batch()
    layer(x).backward(dy)
    assert fired == [1]
    assert layer.weight.grad_added_to_main_grad is True
    assert_same(layer.weight.grad, torch.zeros(N, K))
    assert layer.weight.main_grad.any()


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "delayed"])
def test_a_warning_says_once_that_hooks_never_fire_without_the_flag(hook, delayed):
    layer, fired = fused(main_grad=torch.zeros(N, K), delay_wgrad_compute=delayed), []
    getattr(layer.weight, hook)(lambda p: fired.append(1))
    with pytest.warns(UserWarning, match=r"has hooks, .* they never fire.*grad_added_to_main_grad = False") as said:
        y = layer(batch()[0]), layer(batch()[0])
    assert len(said) == 1 and said[0].filename == __file__
    for one in y:
        one.backward(batch()[1])
        layer.backward_dw()
    assert layer.weight.grad is None and not fired and layer.weight.main_grad.any()
    assert not hasattr(layer.weight, "grad_added_to_main_grad")


def test_the_first_layer_of_a_model_where_nothing_but_the_weight_wants_a_gradient():
    layer = fused(main_grad=torch.zeros(N, K), bias=False)
    x, dy = batch()
    layer(x).backward(dy)
    assert_same(layer.weight.main_grad, float32_dw(layer, "fp8-current", x, dy))


def test_a_frozen_weight_needs_no_buffer():
    layer = fused(main_grad=torch.zeros(N, K))
    layer.weight.requires_grad_(False)
    found = run(layer, *batch())
    assert found.dx is not None and not layer.weight.main_grad.any()
    bare = fused()
    bare.weight.requires_grad_(False)
    assert run(bare, *batch()).dx is not None


def test_inference_needs_no_buffer():
    with torch.no_grad():
        y = fused()(batch()[0])
    assert_same(y, make("fp8-current", K, N)(batch()[0]).detach())


# -- errors, in backward ---------------------------------------------------------------------------------------------

WRONG = {
    "missing": (None, UnsupportedConfig, r"main_grad"),
    "too small": (lambda: torch.zeros(N, K - 1), UnsupportedShape, rf"(?s)(?=.*{N}.*{K - 1})(?=.*{K})"),
    "too large": (lambda: torch.zeros(2, N, K), UnsupportedShape, rf"\(2, {N}, {K}\)"),
    "turned": (lambda: torch.zeros(N, K).T, UnsupportedShape, rf"(?s)(?=.*\({K}, {N}\))(?=.*\(1, {K}\))"),
    "float16": (lambda: torch.zeros(N, K, dtype=torch.float16), UnsupportedDtype, r"float16"),
    "float64": (lambda: torch.zeros(N, K, dtype=torch.float64), UnsupportedDtype, r"float64"),
    "on meta": (lambda: torch.zeros(N, K, device="meta"), UnsupportedConfig, r"on meta, where .* is on cpu"),
    "sparse": (lambda: torch.zeros(N, K).to_sparse(), UnsupportedConfig, r"of layout torch.sparse_coo"),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(K)] * N), UnsupportedConfig, r"nested"),
    "inference": (lambda: made_in_inference_mode(N, K), UnsupportedConfig, r"made in torch.inference_mode\(\)"),
    "one number": (lambda: torch.zeros(1).expand(N, K), UnsupportedShape, r"overlap"),
    "one row": (lambda: torch.zeros(K).expand(N, K), UnsupportedShape, r"overlap"),
    "rows that overlap": (lambda: torch.zeros(N * K).as_strided((N, K), (K // 2, 1)), UnsupportedShape, r"overlap"),
    "a diagonal": (lambda: torch.zeros(N * K).as_strided((N, K), (1, 1)), UnsupportedShape, r"overlap"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "nvfp4"])
@pytest.mark.parametrize("delayed", [False, True])
def test_a_wrong_buffer_is_refused_in_backward_with_shape_and_stride(wrong, recipe, delayed):
    form, error, message = wrong
    layer = fused(recipe, delay_wgrad_compute=delayed)
    if form is not None:
        layer.weight.main_grad = form()
    x, dy = batch()
    y = layer(x)  # forward has no opinion

    def backward():
        y.backward(dy)
        layer.backward_dw()

    with pytest.raises(error, match=message) as said:
        backward()
    assert isinstance(said.value, Unsupported)
    if error is UnsupportedShape:
        assert str(tuple(layer.weight.main_grad.stride())) in str(said.value)
        assert not layer.weight.main_grad.any()
    assert layer.weight.grad is None


@pytest.mark.parametrize("wrong", [w for name, w in WRONG.items() if name != "missing"], ids=list(WRONG)[1:])
def test_the_next_step_with_a_right_buffer_is_right(wrong):
    layer = fused("nvfp4", wrong[0]())
    x, dy = batch()
    with pytest.raises(Unsupported):
        layer(x).backward(dy)
    layer.weight.main_grad = torch.zeros(N, K)
    layer.bias.grad = None
    want = float32_dw(layer, "nvfp4", x, dy)
    run(layer, x, dy)
    assert_same(layer.weight.main_grad, want)


def test_a_layer_that_does_not_fuse_leaves_main_grad_alone():
    layer = make("fp8-current", K, N)
    layer.weight.main_grad = torch.ones(N, K)
    check(layer, "fp8-current", *batch())
    assert torch.equal(layer.weight.main_grad, torch.ones(N, K))


@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_a_weight_that_is_frozen_after_forward_gets_no_dw_and_dx_stays(kind):
    if kind == "linear":
        layer, rest = octavo.Linear(64, 32, recipe="fp8-current", fuse_wgrad_accumulation=True), ()
    else:
        layer = octavo.GroupedLinear(2, 64, 32, recipe="fp8-current", fuse_wgrad_accumulation=True)
        rest = ([5, 3],)
    buffer = layer.weight.main_grad = torch.zeros(layer.weight.shape, device="cpu", dtype=torch.float32)
    x = spiky(8, 64).requires_grad_()
    (want,) = torch.autograd.grad(layer(x, *rest).sum(), x)
    buffer.zero_()
    y = layer(x, *rest)
    layer.weight.requires_grad_(False)
    y.sum().backward()
    assert torch.equal(x.grad, want)
    assert not buffer.any()


def test_dw_is_added_to_the_numbers_that_main_grad_holds():
    x, dy = batch()
    empty, held = fused(main_grad=torch.zeros(N, K)), fused(main_grad=torch.full((N, K), 3.0))
    run(empty, x, dy)
    run(held, x, dy)
    assert_same(held.weight.main_grad, 3.0 + empty.weight.main_grad)
