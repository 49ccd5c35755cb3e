"""Findings of octavo.inspect: each planted fault is found, by a sentence that names its layer and its tensor."""

import math

import pytest
import torch
from torch import nn

import octavo
from octavo.inspection.tensor_rows import percent
from octavo.recipes import SHIPPED
from octavo.scaling.delayed_scaling import BUFFER_NAMES
from tests.support.inspected import only


def model_of(recipe="fp8-current", depth=3):
    return nn.Sequential(*[octavo.Linear(64, 64, recipe=recipe) for _ in range(depth)])


def found_in(model, step):
    with octavo.inspect(model) as report:
        step(model)
    return report.findings()


def train(model, x=None):
    model(torch.randn(32, 64) if x is None else x).square().mean().backward()


@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_healthy_model_has_no_findings(recipe):
    model = model_of(recipe)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    octavo.attach(model, optimizer)

    def steps(model):
        for _ in range(3):
            train(model)
            optimizer.step()
            optimizer.zero_grad()

    assert found_in(model, steps) == []


def test_nothing_is_found_where_nothing_ran():
    with octavo.inspect(model_of()) as report:
        pass
    assert report.findings() == []
    for text in (str(report), report.html()):
        assert "Nothing was measured: no layer ran in the block." in text and "Nothing stands out" not in text


def test_gradients_that_are_zero():
    found = found_in(model_of(), lambda model: (model(torch.randn(32, 64)) * 0).sum().backward())
    assert [text.split(",")[0] for text in found] == [f"{i}: dy is zero in 1 of 1 calls" for i in range(3)]


def test_a_gradient_that_underflows():
    """One large value in a gradient of small ones, and one scale for all."""

    def step(model):
        y = model(torch.randn(32, 64))
        dy = torch.full_like(y, 1e-9)
        dy[0, 0] = 1e3
        y.backward(dy)

    text = only(found_in(model_of("fp8-current", 1), step))
    assert text.startswith("0: dy underflows: 99.95 % of its values become zero (amax 1e+03).")
    assert "report.try_recipes(batches) tries other recipes, and measures which one helps." in text


def test_a_cast_that_saturates_hides_no_underflow():
    """Whoever cured the saturation alone would meet the underflow after it."""
    model = model_of("fp8-delayed", 1)
    train(model)
    octavo.step(model)
    x = torch.full((32, 64), 1e-9)
    x[:, ::4] = 1e4
    found = [text[:13] for text in found_in(model, lambda model: train(model, x)) if text.startswith("0: x")]
    assert found == ["0: x saturate", "0: x underflo"]


def test_multipliers_of_two_tensors_that_are_swapped():
    model = model_of("fp8-delayed")
    train(model)
    octavo.step(model)
    inverse_scale = getattr(model[1]._hidden, BUFFER_NAMES["forward"]["inverse_scale"])
    inverse_scale.copy_(inverse_scale.flip(0))  # those of x and w
    model[1].weight.data.mul_(1 / 64)
    found = found_in(model, train)
    assert any(text.startswith("1: x saturates: ") or text.startswith("1: w underflows") for text in found), found
    assert not any(text.startswith("0: x") for text in found)


def test_cached_codes_with_the_scales_of_another_weight():
    model = model_of("fp8-block")
    with octavo.microbatch(first=True):
        model(torch.randn(32, 64))
    model[1]._codes.parts(model[1], "row")[1].mul_(8)

    def step(model):
        with octavo.microbatch(first=False):
            model(torch.randn(32, 64))

    found = found_in(model, step)
    assert found[0].startswith("1: w has a signal-to-noise ratio of -16.9 dB, below 15: its codes and scales do not")


def test_amaxes_that_are_never_updated():
    model = model_of("fp8-delayed", 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model)
    octavo.step(model)

    def steps(model):
        for scale in (1, 8, 64):
            model.zero_grad()
            train(model, scale * torch.randn(32, 64))
            optimizer.step()

    with pytest.warns(UserWarning, match="octavo.step"):
        found = found_in(model, steps)
    assert found[0].startswith("0: its weight was updated ") and "octavo.step(model) after each" in found[0]
    assert any(text.startswith("0: x saturates: ") and "Its scale is delayed" in text for text in found)


def test_a_layer_that_overflows():
    model = model_of("mxfp8").half()
    model[1].weight.data.mul_(60000)
    found = found_in(model, lambda model: model(8 * torch.randn(32, 64, dtype=torch.float16)))
    assert any(text.startswith("1: y has Inf or NaN in ") for text in found), found
    assert any(text.startswith("2: x has Inf or NaN in ") for text in found), found
    assert not any(text.startswith("0:") for text in found), found


class Bypassing(nn.Module):
    def __init__(self, uses):
        super().__init__()
        self.first, self.second, self.uses = *model_of(depth=2), uses

    def forward(self, x):
        y = self.first(x)
        return self.uses(self, y)


def test_a_layer_that_is_not_called():
    text = only(found_in(Bypassing(lambda model, y: y @ model.second.weight.T), train))
    assert text.startswith("second: it was never called in the block.")


def test_a_layer_whose_output_is_not_used():
    text = only(found_in(Bypassing(lambda model, y: (model.second(y), y)[1]), train))
    assert text.startswith("second: no gradient reached it in 1 calls, while other layers had one")


def test_a_result_is_not_blamed_for_an_operand_that_is_not_finite():
    x = torch.randn(32, 64)
    x[3, 4] = math.nan
    found = found_in(model_of("mxfp8", 1), lambda model: model(x).nansum().backward())
    assert only(found) == (
        "0: x has Inf or NaN in 0.05 % of its values. Look at the model's input, and at the layers before this one."
    )


def test_a_small_share_is_a_percentage():
    assert [percent(share) for share in (None, 0.0, 3e-5, 5e-5, 0.25)] == ["-", "0.00%", "0.003%", "0.01%", "25.00%"]


def test_values_that_are_not_finite_are_reported_even_if_all_are():
    found = found_in(model_of(depth=1), lambda model: model(torch.full((8, 64), math.nan)))
    assert found[0].startswith("0: x has Inf or NaN in 100.00 % of its values.")
