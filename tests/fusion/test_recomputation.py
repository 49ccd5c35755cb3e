"""LayerNormMLP(activation_recompute=True): the forward that backward runs again reads what the first one has read."""

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import ModifiedInPlace, UnsupportedConfig
from octavo.recipes import SHIPPED

H = 32
both = pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])


def block(recompute=True, recipe="fp8-block", **settings):
    torch.manual_seed(1)
    return octavo.LayerNormMLP(H, 2 * H, recipe=recipe, activation_recompute=recompute, **settings)


def batch(rows=8):
    return torch.randn(rows, H, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("recipe", SHIPPED)
def test_gradients_are_those_of_the_parameters_that_functional_call_lends(recipe):
    found = []
    for recompute in (False, True):
        mlp = block(recompute, recipe)
        torch.manual_seed(2)
        lent = {name: torch.randn_like(p).requires_grad_() for name, p in mlp.named_parameters()}
        torch.func.functional_call(mlp, lent, (batch(),)).square().sum().backward()
        assert all(p.grad is None for p in mlp.parameters())
        found.append({name: p.grad for name, p in lent.items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_lent_parameters_are_gone_after_backward():
    mlp = block()
    own = dict(mlp.named_parameters())
    lent = {name: torch.randn_like(p).requires_grad_() for name, p in own.items()}
    y = torch.func.functional_call(mlp, lent, (batch(),))
    y.sum().backward()
    assert all(p is own[name] for name, p in mlp.named_parameters())


@both
def test_a_parameter_that_was_replaced_after_forward_gets_its_gradient(recompute):
    mlp, twin = block(recompute), block(recompute)
    old, y = mlp.fc1.weight, mlp(batch())
    mlp.fc1.weight = nn.Parameter(torch.zeros_like(old))
    y.square().sum().backward()
    twin(batch()).square().sum().backward()
    assert torch.equal(old.grad, twin.fc1.weight.grad) and mlp.fc1.weight.grad is None


@both
@pytest.mark.parametrize("name", ["norm.weight", "fc1.weight", "fc2.weight"])
def test_a_parameter_that_was_written_to_after_forward_is_refused(recompute, name):
    mlp = block(recompute)
    y = mlp(batch().requires_grad_())  # dx needs all of them
    with torch.no_grad():
        mlp.get_parameter(name).mul_(2)
    with pytest.raises(ModifiedInPlace, match=r"Its version was \d then, and is \d now"):
        y.sum().backward()


@both
def test_an_input_that_was_written_to_after_forward_is_refused(recompute):
    mlp, x = block(recompute), batch()
    y = mlp(x)
    x.mul_(2)
    with pytest.raises(ModifiedInPlace, match="backward as it was in forward"):
        y.sum().backward()


@both
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_step_between_forward_and_backward_is_refused(recompute, kind):
    mlp = block(recompute)
    optimizer = kind(mlp.parameters(), 0.05)
    first, second = mlp(batch()), mlp(batch(4))
    first.sum().backward()
    optimizer.step()
    with pytest.raises(ModifiedInPlace, match=r"optimizer\.step"):
        second.sum().backward()


@both
def test_a_step_of_delayed_scaling_between_forward_and_backward_is_refused(recompute):
    mlp = block(recompute, "fp8-delayed")
    mlp(batch()).sum().backward()
    octavo.step(mlp)
    y = mlp(batch())
    octavo.step(mlp)
    with pytest.raises(ModifiedInPlace, match=r"a scale of fp8-delayed.*octavo\.step"):
        y.sum().backward()


@pytest.mark.parametrize("recipe", SHIPPED)
def test_microbatches_in_flight_together_are_not_refused(recipe):
    mlp, twin = block(True, recipe), block(False, recipe)
    for _ in range(3):
        for one in (mlp, twin):
            outputs = [one(batch(rows)) for rows in (4, 8, 12)]
            for y in reversed(outputs):
                y.square().sum().backward()
            octavo.step(one)
    if "nvfp4" not in recipe:  # where each forward draws
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(mlp.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(
    "change", [lambda m: setattr(m.norm, "eps", 1.0), lambda m: setattr(m, "recipe", "mxfp8")], ids=["eps", "recipe"]
)
def test_a_setting_that_was_changed_after_forward_is_refused(change):
    mlp = block()
    y = mlp(batch())
    change(mlp)
    with pytest.raises(UnsupportedConfig, match=r"a setting was changed in between.*Set it before forward"):
        y.sum().backward()
