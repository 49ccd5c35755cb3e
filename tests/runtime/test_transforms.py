"""torch.func, forward-mode AD and batches of gradients: refused in a sentence; functional_call just works."""

import copy

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

from octavo.errors import UnsupportedConfig
from tests.support.module_kinds import KINDS, RECIPES, ROWS, Holder, K, build

pytestmark = pytest.mark.usefixtures("forgetful_compiler")

UNDER = r"Octavo's layers are differentiated by backward, once, and run here under "
WAY_OUT = r"Use loss\.backward\(\) or torch\.autograd\.grad, with torch\.func\.functional_call for other parameters"
CALLS = {
    r"torch\.func \(grad\)": lambda call, x: grad(lambda x: call(x).sum())(x),
    r"torch\.func \(vmap\)\. .* Leading dims of x are rows": lambda call, x: vmap(call)(x.expand(2, *x.shape)),
    r"torch\.func \(jvp\)": lambda call, x: jvp(call, (x,), (x,)),
    r"torch\.func \(grad\)\. ": lambda call, x: vjp(call, x),
    r"torch\.func \(grad\)\. U": lambda call, x: jacrev(call)(x),
    r"torch\.func \(vmap, grad\)": lambda call, x: vmap(grad(lambda x: call(x).sum()))(x.expand(2, *x.shape)),
}


@pytest.mark.parametrize("transform", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_transforms_are_refused(kind, transform):
    module, extra_inputs = build(kind, "fp8-block")
    with pytest.raises(UnsupportedConfig, match=UNDER + transform) as error:
        CALLS[transform](lambda x: module(x, *extra_inputs), torch.randn(ROWS, K))
    assert error.match(WAY_OUT)


@pytest.mark.parametrize("graded", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_tangent_is_lost_without_a_word(kind, recipe, graded):
    module, extra_inputs = build(kind, recipe)
    forward_mode = UNDER + r"forward-mode AD \(torch\.autograd\.forward_ad, torch\.func\.jvp\)"
    with forward_ad.dual_level(), torch.set_grad_enabled(graded):
        dual = forward_ad.make_dual(torch.randn(ROWS, K), torch.ones(ROWS, K))
        with pytest.raises(UnsupportedConfig, match=forward_mode):
            module(dual, *extra_inputs)
        assert module(torch.randn(ROWS, K), *extra_inputs).shape == (ROWS, K)  # without one there is nothing to lose


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_are_not_lost_where_autograd_is_off(kind):
    module, extra_inputs = build(kind, "fp8-delayed")

    def loss(x):
        with torch.no_grad():
            return module(x, *extra_inputs).sum()

    with pytest.raises(UnsupportedConfig, match=UNDER + r"torch\.func \(grad\)"):
        grad(loss)(torch.randn(ROWS, K))


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-block"])
def test_vmap_of_a_quantized_layer_is_refused_without_gradients_too(recipe):
    module, _ = build("linear", recipe)
    with torch.no_grad(), pytest.raises(UnsupportedConfig, match=r"torch\.func \(vmap\).*Leading dims of x are rows"):
        vmap(module)(torch.randn(2, ROWS, K))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_several_gradients_at_once_are_refused(kind, recipe):
    module, extra_inputs = build(kind, recipe)
    x = torch.randn(ROWS, K, requires_grad=True)
    y = module(x, *extra_inputs)
    with pytest.raises(UnsupportedConfig, match=UNDER + r"vmap over gradients \(is_grads_batched=True"):
        torch.autograd.grad(y, x, torch.randn(3, ROWS, K), is_grads_batched=True, retain_graph=True)
    assert torch.autograd.grad(y, x, torch.ones(ROWS, K))[0].shape == x.shape


def test_a_graph_says_the_same():
    module, _ = build("linear", "fp8-block")
    call = torch.compile(grad(lambda x: module(x).sum()), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"run here under torch\.func \(grad\)"):
        call(torch.randn(ROWS, K))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_functional_call_is_a_call_with_these_parameters(kind, recipe):
    model = Holder(*build(kind, recipe))
    twin, x, dy = copy.deepcopy(model), torch.randn(ROWS, K), torch.randn(ROWS, K)
    given = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    y, want = functional_call(model, given, (x,)), twin(x)
    assert torch.equal(y, want)
    found = torch.autograd.grad(y, list(given.values()), dy)
    wanted = torch.autograd.grad(want, list(twin.parameters()), dy)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert all(p.grad is None for p in model.parameters())
