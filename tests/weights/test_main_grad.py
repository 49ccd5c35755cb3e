"""fuse_wgrad_accumulation: dw goes into weight.main_grad, added or written, or backward says why it cannot."""

import pytest
import torch

import octavo
from octavo.errors import Unsupported, UnsupportedConfig, UnsupportedDtype, UnsupportedShape
from tests.support.linear_oracle import assert_same, expected, make, run, seed_of, spiky
from tests.support.state_tensors import made_in_inference_mode
from tests.support.steps import batch

N, K = 40, 48


def fused(recipe="fp8-current", main_grad=None, **settings):
    layer = make(recipe, K, N, fuse_wgrad_accumulation=True, **settings)
    if main_grad is not None:
        layer.weight.main_grad = main_grad
    return layer


def float32_dw(layer, recipe, x, dy):
    """dw before any rounding to the weight's dtype."""
    return expected(recipe, x, layer.weight.detach().float(), layer.bias, dy, seed=seed_of(layer)).dw


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
