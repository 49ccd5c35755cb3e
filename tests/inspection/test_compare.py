"""octavo.compare: gradients of two recipes at the same weights, beside those without quantization."""

import copy
import math

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig
from octavo.recipes import SHIPPED
from tests.support.recipe_traits import is_stochastic


def mlp():
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 32))


def frozen():
    return mlp().requires_grad_(False)


def batches(number=2):
    return [torch.randn(32, 64) for _ in range(number)]


def with_loss(loss):
    return octavo.compare(mlp(), batches(), "mxfp8", "nvfp4", loss=loss)


def by_name(found):
    return {row.parameter: row for row in found.rows}


@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_recipe_agrees_with_itself(recipe):
    recipe = f"{recipe}(stochastic=False)" if is_stochastic(recipe) else recipe
    for row in octavo.compare(mlp(), batches(), recipe, recipe).rows:
        assert row.mutual == pytest.approx(1) and row.first == row.second and row.first_error == row.second_error


def test_the_numbers_are_those_of_gradients_by_hand():
    model, x = mlp().eval(), batches(1)
    found = by_name(octavo.compare(model, x, "mxfp8", "fp8-block", loss=lambda y: y.square().mean()))
    grads = {}
    for recipe in ("bf16", "mxfp8", "fp8-block"):
        twin = copy.deepcopy(model)
        octavo.convert(twin, recipe)
        twin(x[0]).square().mean().backward()
        grads[recipe] = {name: p.grad.double() for name, p in twin.named_parameters()}
    assert list(found) == ["(all)", *grads["bf16"]]
    for name, exact in grads["bf16"].items():
        row, made = found[name], [grads[r][name] for r in ("mxfp8", "fp8-block")]
        assert row.size == pytest.approx(exact.norm().item())
        assert row.first == pytest.approx(torch.cosine_similarity(made[0].flatten(), exact.flatten(), 0).item())
        assert row.second_error == pytest.approx(((made[1] - exact).norm() / exact.norm()).item(), abs=1e-7)
        assert row.mutual == pytest.approx(torch.cosine_similarity(made[0].flatten(), made[1].flatten(), 0).item())


class Branches(nn.Module):
    """Takes its second branch for batches of 32 rows alone."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, x):
        return self.always(x) + self.sometimes(x) if len(x) == 32 else self.always(x)


def test_a_mean_is_over_the_batches_that_have_a_gradient():
    model, (x,) = Branches(), batches(1)
    once, both = (by_name(octavo.compare(model, b, "mxfp8", "fp8-block")) for b in ([x], [x, x[:8]]))
    assert both["sometimes.weight"] == once["sometimes.weight"]
    assert both["always.weight"].first == pytest.approx(1, abs=0.01)


def test_fewer_bits_have_larger_errors():
    found = octavo.compare(mlp(), batches(), "mxfp8", "nvfp4")
    assert by_name(found)["(all)"].first_error < 0.2 < by_name(found)["(all)"].second_error < 0.6


def test_the_model_and_the_generators_stay_as_they_are():
    model, x = mlp(), batches()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    octavo.compare(model, x, "mxfp8", "nvfp4")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert type(model[0]) is nn.Linear and model[0].weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_without_quantization_stay_so_and_others_change_their_recipe():
    model = nn.Sequential(octavo.Linear(64, 64, recipe="bf16"), octavo.Linear(64, 64, recipe="fp8-delayed"))
    octavo.quantize_weights(model[1])
    first = octavo.compare(model, [torch.randn(32, 64)], "mxfp8", "nvfp4")
    model[0].recipe = "fp8-block"
    second = octavo.compare(model, [torch.randn(32, 64)], "mxfp8", "nvfp4")
    assert by_name(second)["0.weight"].first_error > by_name(first)["0.weight"].first_error > 0


def test_layers_that_change_at_a_step_do_not_change_here():
    layers = octavo.Linear(64, 64, recipe="bf16"), octavo.Linear(64, 32, recipe="fp8-block")
    model, x = nn.Sequential(*layers), batches(3)
    twin = copy.deepcopy(model)
    policy = octavo.Policy([{"layers": "0", "recipe": "mxfp8", "from_step": 1}, ("0", "bf16"), ("1", "fp8-block")])
    octavo.convert(model, policy, overwrite=True, high_precision=())
    found, plain = (octavo.compare(one, x, "mxfp8", "nvfp4") for one in (model, twin))
    assert found == plain and found.rows[0].second_error > 0
    octavo.step(model)
    assert model[0].recipe.key == "mxfp8"


def test_experts_and_accumulated_gradients():
    model = octavo.MoE(64, 64, 4, 2, recipe="fp8-block")
    for layer in (model.experts.fc1, model.experts.fc2):
        layer.fuse_wgrad_accumulation = True
    found = octavo.compare(model, [torch.randn(32, 64)], "fp8-block", "mxfp8")
    assert {"experts.fc1.weight", "experts.fc2.weight"} < set(by_name(found))


def test_the_result_is_text_a_flat_dict_and_a_page(tmp_path):
    found = octavo.compare(mlp(), batches(), "mxfp8", "mxfp8")
    numbers = found.to_dict()
    assert numbers["0.weight/mxfp8/cosine"] == numbers["0.weight/mxfp8 (2)/cosine"] > 0.9
    assert all(math.isfinite(value) for value in numbers.values())
    lines = str(found).splitlines()
    assert lines[0] == "Gradients over 2 batches" and lines[3].startswith("B  mxfp8 (2)    mean loss ")
    assert lines[6].startswith("(all)") and len(lines) == 6 + len(found.rows)
    found.save_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text.count('<th scope="row">') == len(found.rows) and "http" not in text
    assert "<h1>Gradients of mxfp8 and mxfp8 (2) are about as near to unquantized ones" in text


def test_a_model_that_is_inspected_is_compared_without_pictures():
    model = mlp()
    octavo.convert(model, "mxfp8")
    with octavo.inspect(model) as report:
        found = octavo.compare(model, batches(1), "mxfp8", "nvfp4")
    assert found.worst == ((), ()) and found.rows[0].first_error < found.rows[0].second_error
    assert {row.calls for row in report.rows()} == {0}
    assert [len(worst) for worst in octavo.compare(model, batches(1), "mxfp8", "nvfp4").worst] == [2, 2]


def test_layers_in_bf16_stay_so_and_a_model_of_them_is_refused():
    model = mlp()
    octavo.convert(model, "bf16")
    with pytest.raises(UnsupportedConfig, match=r"are in bf16, .*: none would run in mxfp8. Call octavo.revert"):
        octavo.compare(model, batches(), "mxfp8", "nvfp4")
    assert octavo.compare(model, batches(), "bf16", "bf16").rows[0].first_error == 0
    octavo.revert(model)
    octavo.convert(model, octavo.Policy([("0", "bf16"), ("*", "fp8-block")]))
    assert octavo.compare(model, batches(), "bf16", "mxfp8").rows[0].second_error > 0


def test_the_page_has_the_order_of_the_text_and_answers():
    found = octavo.compare(mlp(), batches(), "mxfp8", "nvfp4")
    text, whole = found.html("octavo compare mine:model mxfp8 nvfp4"), found.rows[0]
    listed = [line.split()[0].replace("(all)", "the whole model") for line in str(found).splitlines()[6:]]
    assert sorted(listed, key=lambda name: text.index(f'<th scope="row">{name.replace(".", ".<wbr>")}</th>')) == listed
    said = f"error {100 * whole.first_error:.1f} %, against {100 * whole.second_error:.1f} % in nvfp4"
    assert f"<h1>Gradients of mxfp8 are nearer to unquantized ones: {said}</h1>" in text
    assert "octavo inspect mine:model --recipe &quot;mxfp8&quot;" in text


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: octavo.compare(mlp(), [], "mxfp8", "nvfp4"), "There are no batches"),
        (lambda: octavo.compare(mlp(), torch.ones(2, 64), "mxfp8", "nvfp4"), r"got a tensor of shape \(2, 64\)"),
        (lambda: octavo.compare("model", batches(), "mxfp8", "nvfp4"), "takes a model"),
        (lambda: octavo.compare(mlp(), {"x": torch.ones(2, 64)}, "mxfp8", "nvfp4"), "got a dict"),
        (lambda: octavo.compare(nn.LayerNorm(64), batches(), "mxfp8", "nvfp4"), "No layer of this LayerNorm can run"),
        (
            lambda: with_loss(lambda y: y),
            r"loss= returns one number with a gradient, got a tensor of shape \(32, 32\)\.",
        ),
        (lambda: with_loss(lambda y: y.detach().sum()), r"got a tensor of shape \(\) without a gradient\."),
        (lambda: with_loss(lambda y: y.sum().item()), "got float"),
        (lambda: octavo.compare(frozen(), batches(), "mxfp8", "nvfp4"), "No output of the model takes a gradient"),
    ],
)
def test_compare_refuses_in_a_sentence(call, says):
    with pytest.raises(UnsupportedConfig, match=says):
        call()
