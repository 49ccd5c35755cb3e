"""octavo.convert and octavo.revert: which modules change class, what stays the same object, and the report."""

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig
from octavo.recipes import SHIPPED
from tests.support.convertible_models import Net, Special
from tests.support.linear_oracle import assert_same, check, run, spiky
from tests.support.state_tensors import named_state

ROUTES = {"native", "emulated", "reference", "skipped"}


LINEARS = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"]


def classes(model):
    return {path: type(m) for path, m in model.named_modules() if isinstance(m, nn.Linear)}


# -- what changes and what does not ----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", SHIPPED)
def test_every_linear_is_swapped_in_place_with_its_own_parameters(recipe):
    model = Net()
    parameters, keys = {n: p for n, p in model.named_parameters()}, list(model.state_dict())
    order = [path for path, _ in model.named_modules()]
    octavo.convert(model, recipe)
    assert classes(model) == dict.fromkeys(LINEARS, octavo.Linear)
    assert [path for path, _ in model.named_modules()] == order
    assert list(model.state_dict()) == keys
    assert all(p is parameters[n] for n, p in model.named_parameters())
    layer = model.blocks[0]["up"]
    check(layer, recipe, spiky(21, 48), spiky(21, 40, seed=2), model=model, path="blocks.0.up")


def test_an_optimizer_made_before_goes_on():
    model, x = Net(), spiky(8, 48)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(x).square().mean().backward()
    optimizer.step()
    octavo.convert(model, "fp8-current")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters() if n != "embed.weight")


def test_flags_dtype_and_attributes_of_parameters_are_kept():
    model = nn.Sequential(nn.Linear(48, 40, dtype=torch.bfloat16), nn.Linear(40, 8, bias=False)).eval()
    model[0].weight.requires_grad_(False)
    model[1].weight.main_grad = torch.zeros(8, 40)
    octavo.convert(model, "fp8-block")
    assert not model[0].training and not model[1].training
    assert not model[0].weight.requires_grad and model[0].weight.dtype == torch.bfloat16
    assert model[1].bias is None and model[1].weight.main_grad.shape == (8, 40)
    assert (model[0].in_features, model[0].out_features) == (48, 40)


def test_hooks_move_over_both_ways():
    model, fired = nn.Sequential(nn.Linear(48, 40)), []
    model[0].register_forward_pre_hook(lambda m, args: fired.append("before"))
    model[0].register_forward_hook(lambda m, args, y: fired.append("after"))
    model[0].register_full_backward_hook(lambda m, dx, dy: fired.append("backward"))
    for change in (lambda m: octavo.convert(m, "fp8-current"), octavo.revert):
        change(model)
        fired.clear()
        model(spiky(3, 48).requires_grad_()).sum().backward()
        assert fired == ["before", "after", "backward"]


def test_two_paths_to_one_module_stay_one_or_are_refused():
    shared = nn.Linear(48, 48)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    try:
        octavo.convert(model, "fp8-current")
    except UnsupportedConfig:
        assert type(model[0]) is nn.Linear and model[0] is model[2]
        return
    assert type(model[0]) is octavo.Linear and model[0] is model[2]


def test_tied_parameters_of_two_modules_stay_tied():
    model = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48))
    model[1].weight = model[0].weight
    octavo.convert(model, "fp8-current")
    assert model[0].weight is model[1].weight
    assert len(list(model.parameters())) == 3


def test_revert_makes_linears_with_a_recipe_of_their_own_plain_and_leaves_blocks():
    own = {"alone": octavo.Linear(16, 16, recipe="mxfp8"), "op": octavo.ops.Linear(16, 16, recipe="mxfp8")}
    model = nn.ModuleDict({**own, "block": octavo.LayerNormLinear(16, 16, recipe="mxfp8")})
    octavo.revert(model)
    assert type(model["alone"]) is type(model["op"]) is nn.Linear
    assert [str(layer.recipe) for layer in model.modules() if isinstance(layer, octavo.Linear)] == ["mxfp8"]


def test_revert_gives_back_plain_linears_with_the_same_parameters():
    model, x = Net(), spiky(8, 48)
    parameters, want = {n: p for n, p in model.named_parameters()}, model(x).detach()
    octavo.convert(model, "fp8-delayed")
    assert not torch.equal(model(x), want)
    octavo.revert(model)
    assert classes(model) == dict.fromkeys(LINEARS, nn.Linear)
    assert all(p is parameters[n] for n, p in model.named_parameters())
    assert not [n for n, _ in named_state(model)]
    assert_same(model(x).detach(), want)
    octavo.revert(model)  # nothing left to do
    octavo.convert(model, "fp8-delayed")
    assert classes(model) == dict.fromkeys(LINEARS, octavo.Linear)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_conversion_allocates_no_weights(device):
    with torch.device(device):
        model = nn.Sequential(nn.Linear(48, 40))
    pointer = model[0].weight.data_ptr()
    octavo.convert(model, "fp8-block")
    assert model[0].weight.data_ptr() == pointer
    assert model[0].weight.device.type == device


# -- policy --------------------------------------------------------------------------------------------------------


def test_a_policy_chooses_each_module():
    model, seen = Net(), []
    answers = {
        "blocks.0.up": True,
        "blocks.0.down": None,
        "blocks.1.up": "mxfp8",
        "blocks.1.down": octavo.recipes.Block(scale="fp32"),
        "head": False,
    }

    def policy(path, module):
        seen.append((path, module))
        return answers[path]

    original = dict(model.named_modules())
    report = octavo.convert(model, "fp8-rowwise", policy=policy)
    assert sorted(path for path, _ in seen) == sorted(LINEARS)
    assert all(module is original[path] for path, module in seen)
    x, dy = spiky(21, 48), spiky(21, 40, seed=2)
    check(model.blocks[0]["up"], "fp8-rowwise", x, dy)
    check(model.blocks[1]["up"], "mxfp8", x, dy)
    check(model.blocks[0]["down"], "fp8-rowwise", dy, x)
    check(model.blocks[1]["down"], "fp8-block(scale='fp32')", dy, x)
    assert type(model.head) is nn.Linear
    rows = {row.path: row for row in report}
    assert {path: row.recipe for path, row in rows.items() if row.route != "skipped"} == {
        "blocks.0.up": "fp8-rowwise",
        "blocks.0.down": "fp8-rowwise",
        "blocks.1.up": "mxfp8",
        "blocks.1.down": "fp8-block(scale='fp32')",
    }
    assert rows["head"].route == "skipped" and "policy" in rows["head"].why
    assert rows["head"].reason == "policy"


@pytest.mark.parametrize("answer", [3, pytest.param(object(), id="object"), "fp9"], ids=str)
def test_a_policy_that_answers_nonsense_is_refused(answer):
    model = Net()
    with pytest.raises(UnsupportedConfig):
        octavo.convert(model, "fp8-current", policy=lambda path, module: answer)


def test_a_wrong_recipe_is_refused_before_anything_changes():
    model = Net()
    with pytest.raises(UnsupportedConfig, match="fp9"):
        octavo.convert(model, "fp9")
    assert classes(model) == dict.fromkeys(LINEARS, nn.Linear)


# -- the report ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", SHIPPED)
def test_the_report_has_a_row_for_every_linear(recipe):
    report = octavo.convert(Net(), recipe)
    rows = [row for row in report if row.path != "embed"]
    assert [row.path for row in rows] == LINEARS
    for row in rows:
        assert row.recipe == str(octavo.recipe(recipe))
        assert row.route in ROUTES - {"skipped"}
        assert isinstance(row.why, str)
    if recipe != "bf16":
        assert {row.route for row in rows} == {"reference"}  # a CPU
    table = str(report)
    for path in ("blocks.*.up", "blocks.*.down", "head"):
        assert path in table
    assert rows[0].recipe in table and rows[0].route in table


# -- strict --------------------------------------------------------------------------------------------------------


def with_subclass():
    return nn.ModuleDict(
        {"plain": nn.Linear(48, 40), "special": Special(48, 40), "attention": nn.MultiheadAttention(48, 4)}
    )


def test_a_subclass_is_refused_by_its_path_and_nothing_is_changed():
    model = with_subclass()
    with pytest.raises(UnsupportedConfig, match=r"special.*convertible_models\.Special, whose own forward") as said:
        octavo.convert(model, "fp8-current")
    assert "exclude='special'" in str(said.value) and "strict=False" in str(said.value)  # the way out
    assert type(model["plain"]) is nn.Linear


def test_not_strict_skips_and_says_why():
    model = with_subclass()
    rows = {row.path: row for row in octavo.convert(model, "fp8-current", strict=False)}
    assert rows["plain"].route == "reference" and type(model["plain"]) is octavo.Linear
    assert rows["special"].route == "skipped" and rows["special"].why
    assert type(model["special"]) is Special


def test_a_policy_that_skips_a_subclass_is_enough_for_strict():
    model = with_subclass()
    octavo.convert(model, "fp8-current", policy=lambda path, module: path == "plain")
    assert type(model["plain"]) is octavo.Linear and type(model["special"]) is Special


def test_a_converted_model_trains_and_its_weights_load_into_the_plain_one():
    model, plain, x = Net(), Net(), spiky(8, 48)
    octavo.convert(model, "nvfp4")
    for p in (model, plain):
        p.train()
    layer = model.blocks[0]["up"]
    assert run(layer, x).dw.any()
    plain.load_state_dict(model.state_dict(), strict=True)
    octavo.revert(model)
    assert_same(model(x).detach(), plain(x).detach())


# -- the output head ---------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A model of tokens whose head has the weight of the embedding, and the size of other layers."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(48, 48), nn.Linear(48, 48), nn.Linear(48, 48, bias=False)
        self.head.weight = self.embed.weight


def test_a_head_with_the_weight_of_the_embedding_stays_unquantized():
    model = Tied()
    octavo.convert(model, "fp8-current")
    assert type(model.head) is nn.Linear and type(model.up) is octavo.Linear


def test_a_layer_in_a_block_is_no_head_whatever_its_size():
    """fc1 of a swiglu block has 2 · 24 outputs, as many as the embedding has rows."""
    model = nn.ModuleDict({
        "embed": nn.Embedding(48, 16), "mlp": octavo.LayerNormMLP(16, 24, activation="swiglu"),
        "head": nn.Linear(16, 48),
    })  # fmt: skip
    octavo.convert(model, "fp8-current")
    assert model["mlp"].fc1.recipe is not None and type(model["head"]) is nn.Linear
