"""octavo.convert on models of others: subclasses of nn.Linear, heads, adapters, experts, shortcuts, and its report."""

import copy
import io
import json
import pickle
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import octavo
from octavo.errors import UnsupportedConfig
from octavo.model.convert import SETTINGS
from octavo.recipes import SHIPPED
from tests.support.convertible_models import skipped
from tests.support.linear_oracle import assert_same, check, spiky
from tests.support.state_tensors import state_tensors


class Titan(nn.Linear):
    """A subclass as frameworks have them: nn.Linear's forward, methods and attributes of its own."""

    def __init__(self, *args, gain=2.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = gain

    def init_weights(self):
        nn.init.constant_(self.weight, self.gain)
        return self

    def reset_parameters(self):
        super().reset_parameters()
        self.was_reset = True

    def extra_repr(self):
        return f"gain={getattr(self, 'gain', None)}, {super().extra_repr()}"


class Doubling(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


class Conv1D(nn.Module):
    """GPT-2's: the weight is [in, out]."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


class Experts(nn.Module):
    """Stacked experts, as Mixtral's: two 3-D parameters and no layer."""

    def __init__(self, e=4, c=32):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(e, 2 * c, c))
        self.down_proj = nn.Parameter(torch.randn(e, c, c))

    def forward(self, x):
        gate, up = torch.einsum("tc,enc->etn", x, self.gate_up_proj).chunk(2, -1)
        return torch.einsum("etc,enc->tn", F.silu(gate) * up, self.down_proj)


class Language(nn.Module):
    """A model of tokens; `tied` as most small ones are."""

    def __init__(self, vocabulary=60, width=32, tied=False):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.body = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.after = nn.Linear(width, 7)  # defined after the head, and no head
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.body:
            x = x + torch.tanh(layer(x))
        return self.lm_head(x), self.after(x)


class Asked(Language):
    """A model that says which layer its head is: not the one with the vocabulary's size."""

    def get_output_embeddings(self):
        return self.after


class Headless(Language):
    def get_output_embeddings(self):
        raise NotImplementedError("no head here")


# -- the report names everything that holds a matrix -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "reason", "said"),
    [
        (Experts(), "stacked matrices", r"gate_up_proj \[4, 64, 32\], down_proj \[4, 32, 32\].*octavo\.GroupedLinear"),
        (Conv1D(48, 32), "other matrices", r"weight \[32, 48\]"),
        (nn.Embedding(9, 32), "embedding", "looked up"),
        (nn.Conv2d(3, 8, 3), "convolution", "convolution"),
        (nn.LSTM(32, 32), "recurrent", "nn.Linear"),
        (nn.Bilinear(4, 5, 6), "bilinear", "two inputs"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_holds_a_matrix_and_stays_is_a_row(module, reason, said):
    model = nn.ModuleDict({"plain": nn.Linear(32, 32), "theirs": module})
    report = octavo.convert(model, "fp8-current")
    row = next(row for row in report if row.path == "theirs")
    assert (row.recipe, row.route, row.reason) == ("", "skipped", reason)
    assert re.search(said, row.why)
    assert row.kind.endswith(type(module).__qualname__)
    own = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)
    assert row.weights == own
    assert f"{reason}: 1 layer" in report.summary()


def test_vectors_and_norms_are_no_matrices():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm([4, 8]), nn.RMSNorm([4, 8]), nn.BatchNorm1d(8))
    model.register_parameter("token", nn.Parameter(torch.zeros(1, 1, 8)))
    assert [row.path for row in octavo.convert(model, "fp8-current")] == ["0"]


def test_the_share_of_weights_counts_experts():
    """The Linear has 2,048 of 5,120 weights: the report must show the rest."""
    model = nn.ModuleDict({"attention": nn.Linear(32, 64), "experts": Experts(4, 16)})
    elements = {"attention": 32 * 64, "experts": 4 * (32 * 16 + 16 * 16)}
    report = octavo.convert(model, "fp8-delayed")
    share = elements["attention"] / sum(elements.values())
    assert report.shares()["converted"].share == pytest.approx(share)
    assert report.summary() == (
        f"Converted 1 layer ({share:.1%} of the weights); stacked matrices: 1 layer ({1 - share:.1%} of the weights)."
    )
    assert str(report).endswith(report.summary())


def test_as_dict_is_plain_data_and_complete():
    report = octavo.convert(Language(), "fp8-block")
    data = json.loads(json.dumps(report.as_dict()))
    assert [row["path"] for row in data["rows"]] == [row.path for row in report]
    assert set(data["rows"][0]) == {"path", "kind", "recipe", "route", "why", "reason", "weights", "rule"}
    assert data["shares"]["converted"]["layers"] == 4
    assert sum(share["share"] for share in data["shares"].values()) == pytest.approx(1)


def test_rows_that_differ_in_a_number_are_one_line():
    table = str(octavo.convert(nn.ModuleList(nn.Linear(8, 8) for _ in range(30)), "fp8-current"))
    assert re.search(r"^\* +30 +torch\.nn\.Linear +fp8-current +reference", table, re.M)
    assert len(table.splitlines()) == 3


def test_a_report_is_narrow_and_gives_each_reason_once():
    blocks = nn.ModuleList(
        nn.ModuleDict(
            {name: nn.Linear(32, 32) for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate", "up", "down")}
        )
        for _ in range(3)
    )
    images = nn.ModuleList(nn.Conv2d(3, 8, 3) for _ in range(3))
    table = str(octavo.convert(nn.ModuleDict({"layers": blocks, "images": images}), "fp8-current"))
    lines = table.splitlines()
    assert max(len(line) for line in lines[:-1]) < 200
    assert sum(line.startswith("layers.*.") for line in lines) == 7
    assert table.count("recipes are for matrix products") == 1


def test_a_tied_weight_counts_once():
    report = octavo.convert(Language(60, 32, tied=True), "fp8-current", high_precision=())
    assert sum(share.weights for share in report.shares().values()) == 60 * 32 + 3 * 32 * 32 + 32 * 7


def test_a_layer_with_two_paths_counts_once():
    shared = nn.Linear(8, 8)
    report = octavo.convert(nn.ModuleList([shared, nn.ReLU(), shared]), "fp8-current")
    assert len(report) == 2 and report.shares()["converted"].layers == 1
    assert report.shares()["converted"].weights == 64


@pytest.mark.parametrize("model", [nn.Sequential(nn.LayerNorm(8)), Experts(), nn.Conv2d(3, 8, 3)], ids=type)
def test_a_model_with_nothing_to_convert_warns(model):
    with pytest.warns(UserWarning, match=f"found nothing to convert in this {type(model).__name__}") as said:
        octavo.convert(model, "fp8-current")
    assert said[0].filename == __file__


def test_a_model_of_which_something_is_converted_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = octavo.convert(nn.ModuleList([Experts(), nn.Linear(8, 8)]), "fp8-current")
    assert report.shares()["converted"].layers == 1


# -- layers of ours --------------------------------------------------------------------------------------------------


def test_an_own_recipe_stays_unless_it_is_to_be_overwritten():
    model = nn.Sequential(octavo.Linear(32, 32, recipe="mxfp8"), octavo.Linear(32, 32), nn.Linear(32, 32))
    rows = list(octavo.convert(model, "fp8-current"))
    assert [str(layer.recipe) for layer in model] == ["mxfp8", "fp8-current", "fp8-current"]
    assert [row.reason for row in rows] == ["kept", "converted", "converted"]
    assert rows[0].recipe == "mxfp8" and "overwrite=True" in rows[0].why
    octavo.convert(model, "fp8-block", overwrite=True)
    assert {str(layer.recipe) for layer in model} == {"fp8-block"}


def test_a_head_with_a_recipe_of_its_own_is_not_said_to_be_in_high_precision():
    model = Language()
    model.lm_head = octavo.Linear(32, 60, recipe="mxfp8")
    for overwrite in (False, True):
        row = next(row for row in octavo.convert(model, "fp8-current", overwrite=overwrite) if row.path == "lm_head")
        assert (row.recipe, row.reason) == ("mxfp8", "kept") and "this output head has a recipe of its own" in row.why
        assert str(model.lm_head.recipe) == "mxfp8"


@pytest.mark.parametrize(
    "argument", [{"exclude": "0"}, {"policy": lambda path, module: path != "0"}], ids=["exclude", "policy"]
)
def test_a_layer_that_is_left_alone_shows_the_recipe_that_it_has(argument):
    model = nn.Sequential(octavo.Linear(32, 32, recipe="mxfp8"), nn.Linear(32, 32))
    row = octavo.convert(model, "fp8-current", **argument).rows[0]
    assert (row.recipe, row.route) == ("mxfp8", "reference") and row.reason in ("excluded", "policy")


def test_a_policy_that_names_a_recipe_asks_for_it():
    model = nn.Sequential(octavo.Linear(32, 32, recipe="mxfp8"))
    octavo.convert(model, "bf16", policy=lambda path, module: "fp8-current")
    assert str(model[0].recipe) == "fp8-current"


def test_converting_again_warns_if_it_changes_nothing():
    model = nn.Sequential(nn.Linear(32, 32))
    octavo.convert(model, "fp8-current")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        octavo.convert(model, "fp8-current")  # it is what it should be
    with pytest.warns(UserWarning, match="overwrite=True"):
        octavo.convert(model, "fp8-block")
    assert str(model[0].recipe) == "fp8-current"


def test_a_grouped_linear_without_a_recipe_gets_the_one_of_convert():
    model = nn.ModuleDict(
        {"a": octavo.GroupedLinear(3, 32, 16), "b": octavo.GroupedLinear(3, 32, 16, recipe="fp8-block")}
    )
    rows = {row.path: row for row in octavo.convert(model, "fp8-current")}
    assert str(model["a"].recipe) == "fp8-current" and str(model["b"].recipe) == "fp8-block"
    assert rows["a"].reason == "converted" and rows["b"].reason == "kept"
    assert rows["a"].weights == 3 * 32 * 16
    assert set(rows) == {"a", "b"}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_layers_go_through(name):
    for value in (True, False):
        model = nn.Sequential(nn.Linear(32, 32), Titan(32, 32), octavo.Linear(32, 32))
        octavo.convert(model, "fp8-current", **{name: value})
        assert all(getattr(layer, name) is value for layer in model)
        octavo.revert(model)
        assert not any(name in vars(layer) for layer in model)
    with pytest.raises(UnsupportedConfig, match=f"{name} must be one of True, False, got 'no'"):
        octavo.convert(model, "fp8-current", **{name: "no"})


def test_a_setting_reaches_grouped_layers():
    model = nn.ModuleList([octavo.GroupedLinear(3, 32, 16)])
    octavo.convert(model, "fp8-current", keep_weight_codes=False)
    assert model[0].keep_weight_codes is False


def test_a_delayed_weight_gradient_by_convert():
    model = nn.Sequential(nn.Linear(32, 32))
    octavo.convert(model, "fp8-current", delay_wgrad_compute=True)
    model(spiky(4, 32)).sum().backward()
    assert model[0].weight.grad is None
    model[0].backward_dw()
    assert model[0].weight.grad is not None


# -- subclasses of nn.Linear -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_plain_subclass_is_converted_and_stays_one(recipe):
    layer = Titan(48, 40, gain=3.0)
    weight = layer.weight
    model = nn.Sequential(layer)
    (row,) = octavo.convert(model, recipe)
    assert row.kind.endswith("test_convert_other_models.Titan") and row.reason == "converted"
    assert isinstance(layer, Titan) and isinstance(layer, octavo.Linear) and layer.weight is weight
    assert layer.gain == 3.0 and layer.was_reset
    check(layer, recipe, spiky(21, 48), spiky(21, 40, seed=2), model=model, path="0")
    assert layer.init_weights() is layer and (layer.weight == 3).all()
    assert "gain=3.0" in repr(layer) and f"recipe={recipe}" in repr(layer)
    octavo.revert(layer)
    assert type(layer) is Titan and layer.gain == 3.0
    assert_same(layer(spiky(3, 48)), F.linear(spiky(3, 48), layer.weight, layer.bias))


def test_instances_of_one_subclass_share_a_class():
    model = nn.Sequential(Titan(8, 8), Titan(8, 8))
    octavo.convert(model, "fp8-current")
    assert type(model[0]) is type(model[1])


def test_a_converted_subclass_is_copied_pickled_and_saved():
    layer = Titan(48, 40)
    octavo.convert(layer, "fp8-delayed")
    x = spiky(8, 48)
    layer(x).sum().backward()
    octavo.step(layer)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)):
        assert type(twin) is type(layer) and twin.gain == layer.gain
        assert_same(twin(x), layer(x))
        assert list(octavo.state_dict(twin)) == list(octavo.state_dict(layer))


def test_a_converted_subclass_compiles_to_one_node_each_way():
    layer = Titan(48, 40)
    octavo.convert(layer, "fp8-current")
    report = octavo.explain(layer, spiky(8, 48).requires_grad_())
    assert not report.breaks and report.graphs == 1
    assert [sum(n for _, n in graph.nodes) for graph in report.captured] == [1, 1]


def test_a_subclass_with_a_forward_of_its_own_is_named_and_can_be_forced():
    model = nn.ModuleDict({"a": Doubling(32, 32)})
    with pytest.raises(
        UnsupportedConfig, match=r"test_convert_other_models\.Doubling, whose own forward would be lost"
    ):
        octavo.convert(model, "fp8-current")
    with pytest.warns(UserWarning, match="nothing to convert"):
        assert skipped(octavo.convert(model, "fp8-current", strict=False)) == {"a": "cannot be converted"}
    with pytest.raises(UnsupportedConfig, match="whose own forward"):
        octavo.convert(model, "fp8-current", policy=lambda path, module: True)  # a filter forces nothing
    octavo.convert(model, "fp8-current", policy=lambda path, module: "fp8-block")
    assert isinstance(model["a"], Doubling) and str(model["a"].recipe) == "fp8-block"
    check(model["a"], "fp8-block", spiky(21, 32), spiky(21, 32, seed=2))


def test_a_forward_replaced_on_the_instance_is_refused():
    """As hooks of other libraries do it: the layer's class would not be asked."""
    layer = nn.Linear(32, 32)
    layer.forward = lambda x, old=layer.forward: old(x)
    with pytest.raises(UnsupportedConfig, match=r"its forward was replaced by .*<lambda> on the instance"):
        octavo.convert(nn.Sequential(layer), "fp8-current", policy=lambda path, module: "fp8-block")


def test_a_name_that_both_use_is_refused():
    class Cook(nn.Linear):
        recipe = "pancakes"

    for layer in (Cook(8, 8), nn.Linear(8, 8)):
        layer.strict = True
        name = "recipe, strict" if type(layer) is Cook else "strict"
        with pytest.raises(UnsupportedConfig, match=f"has {name} of its own"):
            octavo.convert(layer, "fp8-current")


@pytest.mark.parametrize("name", ["split", "where", "route", "follow", "refusal", "weight_names"])
def test_a_class_keeps_its_own_methods_with_words_that_octavo_does_not_show_users(name):
    kind = type("Named", (nn.Linear,), {name: lambda self: "theirs"})
    model = nn.Sequential(kind(32, 32), nn.Linear(32, 32))
    assert all(row.recipe == "fp8-current" for row in octavo.convert(model, "fp8-current"))
    assert getattr(model[0], name)() == "theirs"
    assert model(torch.randn(4, 32)).shape == (4, 32)


def test_lazy_and_parametrized_layers_are_refused_with_a_way_out():
    with pytest.raises(UnsupportedConfig, match=r"LazyLinear without a size yet\. Call the model once first"):
        octavo.convert(nn.LazyLinear(8), "fp8-current")
    with pytest.raises(UnsupportedConfig, match=r"it is parametrized\. Convert it first"):
        octavo.convert(weight_norm(nn.Linear(8, 8)), "fp8-current")


def test_a_class_that_refuses_subclasses_is_refused():
    class Final(nn.Linear):
        def __init_subclass__(cls, **arguments):
            raise TypeError("final")

    with pytest.raises(UnsupportedConfig, match=r"Final cannot be subclassed \(TypeError: final\)"):
        octavo.convert(Final(8, 8), "fp8-current")


# -- exclude and policy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exclude", "gone"),
    [
        ("body.1", {"body.1"}),
        (["body.0", "after"], {"body.0", "after"}),
        ("body", {"body.0", "body.1", "body.2"}),
        ("body.*", {"body.0", "body.1", "body.2"}),
        ("*.[12]", {"body.1", "body.2"}),
        (nn.ModuleList, {"body.0", "body.1", "body.2"}),
        (("body.0", nn.Embedding), {"body.0"}),
    ],
    ids=["name", "names", "parent", "glob", "glob-of-digits", "class", "both"],
)
def test_exclude_takes_names_globs_and_classes(exclude, gone):
    model = Language()
    report = octavo.convert(model, "fp8-current", exclude=exclude)
    assert {path for path, reason in skipped(report).items() if reason == "excluded"} == gone
    assert all(type(dict(model.named_modules())[path]) is nn.Linear for path in gone)


@pytest.mark.parametrize(
    ("exclude", "said"),
    [
        ("lm_haed", "Did you mean 'lm_head'"),
        ("2", r"Did you mean '\*\.2'"),
        (nn.Conv2d, "Conv2d is no class of a module in this model"),
        (3, "paths, globs or classes of modules, got 3"),
        ((int,), "got <class 'int'>"),
    ],
    ids=["typo", "leaf", "class", "number", "other-class"],
)
def test_an_exclude_without_effect_is_refused(exclude, said):
    with pytest.raises(UnsupportedConfig, match=said):
        octavo.convert(Language(), "fp8-current", exclude=[exclude] if exclude == 3 else exclude)


@pytest.mark.parametrize(
    "policy",
    [
        lambda module, path: True,
        lambda m, fqn: True,
        lambda a, b: "head" not in b,  # a module is no container
        lambda a, b: isinstance(a, nn.Linear),  # never true of a path
        lambda a, b: a.weight.dim() == 2,
    ],
)
def test_a_policy_with_swapped_arguments_is_noticed(policy):
    model = Language()
    with pytest.raises(UnsupportedConfig, match=r"policy.*\(path, module\)"):
        octavo.convert(model, "fp8-current", policy=policy)
    assert all(type(m) is nn.Linear for m in model.modules() if isinstance(m, nn.Linear))


def test_a_policy_that_takes_nothing_is_no_swapped_one():
    with pytest.warns(UserWarning, match="policy: 4 layers"):
        octavo.convert(Language(), "fp8-current", policy=lambda path, module: path == "lm_haed", exclude="lm_head")


@pytest.mark.parametrize("policy", [{"lm_head": False}, "fp8-block", 7])
def test_a_policy_that_is_no_function_is_refused(policy):
    with pytest.raises(UnsupportedConfig, match="policy is a function of"):
        octavo.convert(Language(), "fp8-current", policy=policy)


def test_swapped_arguments_of_convert_are_noticed():
    with pytest.raises(UnsupportedConfig, match=r"convert takes a model .* first, got the string 'fp8-current'\. Swap"):
        octavo.convert("fp8-current", Language())


# -- the head, and adapters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "head", "said"),
    [
        (Language(), "lm_head", "out_features 60 is the vocabulary of embed"),
        (Language(tied=True), "lm_head", "its weight is embed's"),
        (Language(32, 32, tied=True), "lm_head", "its weight is embed's"),
        (Asked(), "after", r"get_output_embeddings\(\) returns it"),
        (Headless(), "lm_head", "vocabulary of embed"),
        (nn.Sequential(Asked()), "0.after", "get_output_embeddings"),
    ],
)
def test_the_head_stays_in_high_precision(model, head, said):
    rows = {row.path: row for row in octavo.convert(copy.deepcopy(model), "fp8-current")}
    assert {path for path, row in rows.items() if row.reason == "output head"} == {head}
    assert re.search(said, rows[head].why) and "stays in high precision" in rows[head].why
    for argument in ({"high_precision": ()}, {"policy": lambda path, module: "fp8-current" if path == head else None}):
        twin = copy.deepcopy(model)
        octavo.convert(twin, "fp8-current", **argument)
        assert isinstance(twin.get_submodule(head), octavo.Linear)


def test_the_last_linear_is_no_head_by_being_last():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 10))
    octavo.convert(model, "fp8-current")
    assert isinstance(model[1], octavo.Linear)


@pytest.mark.parametrize("name", ["pos", "wpe", "position_embeddings", "token_type_embeddings"])
def test_layers_as_wide_as_there_are_positions_are_no_heads(name):
    """1024 positions, and 1024 channels of keys and values."""
    blocks = nn.ModuleList(nn.ModuleDict({"kv": nn.Linear(32, 64), "o": nn.Linear(32, 32)}) for _ in range(2))
    model = nn.ModuleDict({name: nn.Embedding(64, 32), "blocks": blocks, "input": nn.Linear(8, 64)})
    assert skipped(octavo.convert(model, "fp8-current")) == {name: "embedding"}


def test_a_head_outside_of_a_module_that_names_its_own():
    model = nn.ModuleDict({"encoder": Asked(), "tokens": nn.Embedding(90, 32), "lm_head": nn.Linear(32, 90)})
    reasons = skipped(octavo.convert(model, "fp8-current"))
    assert {path for path, reason in reasons.items() if reason == "output head"} == {"encoder.after", "lm_head"}


def test_positions_are_no_vocabulary():
    """As many positions as channels: every projection would be a head."""
    model = nn.ModuleDict(
        {
            "tokens": nn.Embedding(65, 32),
            "positions": nn.Embedding(32, 32),
            "body": nn.ModuleList(nn.Linear(32, 32) for _ in range(2)),
            "head": nn.Linear(32, 65),
        }
    )
    assert skipped(octavo.convert(model, "fp8-current")) == {
        "tokens": "embedding", "positions": "embedding", "head": "output head",
    }  # fmt: skip


def test_factors_of_adapters_stay_in_high_precision():
    layer = nn.ModuleDict(
        {
            "base_layer": nn.Linear(32, 32),
            "lora_A": nn.ModuleDict({"default": nn.Linear(32, 4, bias=False)}),
            "lora_B": nn.ModuleDict({"default": nn.Linear(4, 32, bias=False)}),
        }
    )
    for argument, gone in (({}, {"lora_A.default", "lora_B.default"}), ({"high_precision": "head"}, set())):
        report = octavo.convert(copy.deepcopy(layer), "fp8-current", **argument)
        assert {path for path, reason in skipped(report).items() if reason == "adapter"} == gone


class TopKRouter(nn.Module):
    """As Hugging Face's: a matrix of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32))


def test_routers_stay_in_high_precision():
    model = nn.ModuleDict(
        {
            "moe": nn.ModuleDict({"router": nn.ModuleDict({"gate": nn.Linear(32, 4)}), "up": nn.Linear(32, 32)}),
            "mlp": nn.ModuleDict(
                {"gate": nn.Linear(32, 4), "shared_expert_gate": nn.Linear(32, 1), "experts": Experts()}
            ),
            "dense": nn.ModuleDict({"gate": nn.Linear(32, 64)}),
            "theirs": TopKRouter(),
        }
    )
    report = octavo.convert(copy.deepcopy(model), "fp8-current")
    routers = {"moe.router.gate", "mlp.gate", "mlp.shared_expert_gate", "theirs"}
    assert {path for path, reason in skipped(report).items() if reason == "router"} == routers
    report = octavo.convert(model, "fp8-current", high_precision=("head", "adapters"))
    assert {path for path, reason in skipped(report).items() if reason == "router"} == {"theirs"}


def test_a_head_is_found_where_its_size_is_also_a_width():
    """As in torchtitan's small models: 2048 words, and 2048 channels in attention."""
    block = {"wq": nn.Linear(32, 64), "wo": nn.Linear(64, 32)}
    model = nn.ModuleDict(
        {"embed": nn.Embedding(64, 32), "layers": nn.ModuleList([nn.ModuleDict(block)]), "lm_head": nn.Linear(32, 64)}
    )
    assert skipped(octavo.convert(model, "fp8-current")) == {"embed": "embedding", "lm_head": "output head"}


def test_tables_and_parametrizations_are_no_experts():
    model = nn.ModuleDict({"plain": nn.Linear(8, 8), "conv": weight_norm(nn.Conv1d(8, 8, 3))})
    model.register_parameter("position_embeddings", nn.Parameter(torch.zeros(1, 5, 8)))
    rows = {row.path: row.reason for row in octavo.convert(model, "fp8-current")}
    assert rows[""] == "embedding" and rows["conv.parametrizations.weight"] == "parametrized"


def test_many_layers_of_one_class_are_excluded_by_it():
    model = nn.ModuleList(Doubling(8, 8) for _ in range(3))
    with pytest.raises(UnsupportedConfig, match=r"exclude='0' \(3 layers are of this class: exclude=.*\.Doubling\)"):
        octavo.convert(model, "fp8-current")
    plain = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))
    with pytest.raises(UnsupportedConfig, match=r"exclude='0', or pass"):  # the class is every other layer's too
        octavo.convert(plain, "fp8-current")


def test_no_exclude_and_no_kinds():
    octavo.convert(Language(), "fp8-current", exclude=None)
    for argument in ({"exclude": 5}, {"high_precision": None}, {"high_precision": False}):
        with pytest.raises(UnsupportedConfig, match=f"{next(iter(argument))} takes"):
            octavo.convert(Language(), "fp8-current", **argument)


def test_a_model_on_meta_that_is_converted_twice_does_not_warn():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        octavo.convert(model, "fp8-current")
        assert octavo.convert(model, "fp8-current").rows[0].reason == "kept"


def test_weights_that_are_no_plain_memory_are_refused():
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(torch.eye(8).to_sparse(), requires_grad=False)
    with pytest.raises(UnsupportedConfig, match=r"its weight is one of layout torch\.sparse_coo\. Make it dense first"):
        octavo.convert(nn.Sequential(layer), "fp8-current")


def test_an_unknown_kind_is_refused():
    with pytest.raises(UnsupportedConfig, match=r"high_precision takes kinds out of \('head', .*\), got 'lm_"):
        octavo.convert(Language(), "fp8-current", high_precision="lm_head")


# -- modules that go around forward ----------------------------------------------------------------------------------


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_fast_path_of_an_encoder_is_taken_away(mode, monkeypatch):
    called, forward = [], octavo.Linear.forward
    monkeypatch.setattr(octavo.Linear, "forward", lambda self, x: (called.append(self), forward(self, x))[1])
    model, x = encoder(), spiky(2, 5, 32)
    report = octavo.convert(model, "fp8-current")
    model.eval()
    with mode():
        model(x)
    outside = [layer for block in model.layers for layer in (block.linear1, block.linear2)]
    assert [layer for layer in called if layer in outside] == outside and len(called) == 2 * (2 + 4)
    assert any("layers.*" in note and "fast path" in note for note in report.notes)
    assert "fast path" in str(report)


def test_revert_gives_the_fast_path_back():
    model, plain = encoder().eval(), encoder().eval()
    octavo.convert(model, "fp8-current")
    octavo.convert(model, "fp8-block", overwrite=True)  # twice: what it was is not forgotten
    octavo.revert(model)
    assert [vars(layer).keys() for layer in model.layers] == [vars(layer).keys() for layer in plain.layers]
    for layer, other in zip(model.layers, plain.layers, strict=True):
        assert layer.activation_relu_or_gelu == other.activation_relu_or_gelu != 0
    with torch.no_grad():
        assert_same(model(spiky(2, 5, 32)), plain(spiky(2, 5, 32)))


def test_an_encoder_with_a_mask_gets_no_nested_tensors():
    """torch's default: rows of several lengths, for the kernel of the fast path."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    assert model.use_nested_tensor
    octavo.convert(model, "fp8-current", exclude="layers.0")
    with torch.no_grad():
        assert model(spiky(2, 5, 32), src_key_padding_mask=mask).shape == (2, 5, 32)
    octavo.revert(model)
    assert model.use_nested_tensor


def test_an_encoder_none_of_whose_layers_is_converted_keeps_the_fast_path():
    model = nn.ModuleList([encoder(), nn.Linear(8, 8)])
    report = octavo.convert(model, "fp8-current", exclude=nn.TransformerEncoderLayer)
    assert report.notes == () and all(layer.activation_relu_or_gelu for layer in model[0].layers)


def test_an_attention_is_one_row_with_the_projection_that_it_reads():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 4), "plain": nn.Linear(8, 8)})
    report = octavo.convert(model, "fp8-current")
    assert [(row.path, row.weights) for row in report] == [("attention", 4 * 32 * 32), ("plain", 64)]
    assert not isinstance(model["attention"].out_proj, octavo.Linear)


# -- there and back ----------------------------------------------------------------------------------------------------


def test_revert_takes_the_recipe_from_layers_that_convert_gave_it_to():
    sizes, x = torch.tensor([4, 4]), spiky(8, 32)
    given, own = octavo.GroupedLinear(2, 32, 32), octavo.GroupedLinear(2, 32, 32, recipe="fp8-block")
    model, want = nn.ModuleList([given, own]), given(x, sizes)
    octavo.convert(model, "fp8-delayed")
    assert not torch.equal(given(x, sizes), want)
    octavo.revert(model)
    assert given.recipe is None and str(own.recipe) == "fp8-block"
    assert_same(given(x, sizes), want)
    assert octavo.state_dict(model) == {} and not list(state_tensors(given))


@pytest.mark.parametrize("block", [octavo.LayerNormMLP, octavo.LayerNormLinear])
def test_revert_leaves_blocks_that_run(block):
    model, x = block(32, 64), spiky(4, 32)
    want = model(x)
    octavo.convert(model, "fp8-current")
    assert not torch.equal(model(x), want)
    octavo.revert(model)
    assert_same(model(x), want)


def test_settings_reach_layers_that_have_the_recipe_already():
    model = nn.Sequential(nn.Linear(32, 32), octavo.Linear(32, 32, recipe="fp8-block"))
    octavo.convert(model, "fp8-current")
    octavo.convert(model, "fp8-current", fuse_wgrad_accumulation=True)
    assert model[0].fuse_wgrad_accumulation and not model[1].fuse_wgrad_accumulation


def test_a_parametrized_weight_and_tied_layers_are_counted_right():
    model = nn.ModuleDict({"x": weight_norm(nn.Linear(16, 16)), "y": nn.Linear(16, 16)})
    shares = octavo.convert(model, "fp8-current", exclude="x").shares()
    assert {name: share.share for name, share in shares.items()} == {"converted": 0.5, "excluded": 0.5}
    tied = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
    for layer in tied:
        layer.weight = tied[0].weight
    share = octavo.convert(tied, "fp8-current").shares()["converted"]
    assert (share.layers, share.weights) == (4, 64)


def test_both_paths_of_a_shared_layer_have_the_class_that_it_had():
    shared = nn.Linear(8, 8)
    rows = list(octavo.convert(nn.ModuleList([shared, shared]), "fp8-current"))
    assert [row.kind for row in rows] == ["torch.nn.Linear"] * 2


def test_a_shared_layer_is_excluded_by_all_its_paths():
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(8, 8)})
    with pytest.raises(UnsupportedConfig, match=r"exclude=\['a', 'b'\]"):
        octavo.convert(model, "fp8-current", exclude="b")
    octavo.convert(model, "fp8-current", exclude=["a", "b"])


def test_a_path_with_characters_of_a_glob():
    model = nn.ModuleDict({"[x]": nn.Linear(8, 8), "x": nn.Linear(8, 8)})
    assert skipped(octavo.convert(model, "fp8-current", exclude="[x]")) == {"[x]": "excluded"}


def test_a_forward_that_a_removed_hook_left_behind_is_no_obstacle():
    layer = nn.Linear(16, 16)
    layer.forward = layer.forward  # bound, as accelerate's remove_hook_from_module leaves it
    octavo.convert(layer, "fp8-current")
    check(layer, "fp8-current", spiky(5, 16), spiky(5, 16, seed=2))
    layer.forward = layer.forward
    octavo.revert(layer)
    assert type(layer) is nn.Linear and "forward" not in vars(layer)
    layer(spiky(5, 16))


def test_revert_refuses_a_forward_that_was_replaced_since():
    layer = nn.Linear(16, 16)
    octavo.convert(layer, "fp8-current")
    layer.forward = lambda x, old=layer.forward: old(x)
    with pytest.raises(UnsupportedConfig, match=r"would go on calling octavo\.Linear's"):
        octavo.revert(nn.Sequential(layer))
    layer(spiky(5, 16))


class Reduced(nn.Linear):
    def __reduce__(self):
        return Reduced, (self.in_features, self.out_features)


def test_a_class_with_a_pickle_of_its_own_is_refused():
    with pytest.raises(UnsupportedConfig, match="has __reduce__ of its own"):
        octavo.convert(Reduced(8, 8), "fp8-current")


@pytest.mark.parametrize("model", ["x", None, 3])
def test_revert_takes_a_model(model):
    with pytest.raises(UnsupportedConfig, match="revert takes a model"):
        octavo.revert(model)
