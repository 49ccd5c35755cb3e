"""octavo.Policy: what its rules say, which layers they take, what it refuses, and layers that change at a step."""

import copy
import pickle
import tomllib
import warnings

import pytest
import torch
from torch import nn

import octavo
from octavo.demo.gpt import GPT, Shape
from octavo.errors import UnknownSetting, Unsupported, UnsupportedConfig
from octavo.model.policy import blocks_of
from tests.support.convertible_models import Net, Special

SHAPE = Shape(width=32, layers=4, heads=2, context=16)
FILE = """\
# first and last block
[[rules]]
blocks = ["first 1", "last 1"]
recipe = "bf16"

[[rules]]
layers = "*.attention"
recipe = "fp8-block"
wgrad = "bf16"

[[rules]]
recipe = "fp8-current"
"""


def gpt():
    return GPT(SHAPE, seed=0)


def recipes_of(report):
    return {row.path: row.recipe for row in report if row.recipe}


def rules_of(report):
    return {row.path: row.rule for row in report}


# -- a policy is a value -----------------------------------------------------------------------------------------------


def test_three_ways_make_the_same_policy(tmp_path):
    (tmp_path / "policy.toml").write_text(FILE)
    loaded = octavo.Policy.load(tmp_path / "policy.toml")
    by_hand = octavo.Policy(
        [
            {"blocks": ("first 1", "last 1"), "recipe": octavo.recipes.BF16()},
            ("*.attention", "fp8-block(wgrad='bf16')"),
            ("*", "fp8-current"),
        ]
    )
    assert loaded == by_hand == octavo.Policy.from_dict(by_hand.to_dict()) and hash(loaded) == hash(by_hand)
    assert octavo.Policy.load(str(tmp_path / "policy.toml")) == by_hand != octavo.Policy([("*", "bf16")])


@pytest.mark.parametrize("pattern", ["*", 'a"b\\c', "tab\t", "ünï\x7f", "blocks.[0-3].*"])
def test_the_string_of_a_policy_is_a_file_and_the_repr_is_code(pattern):
    spec = {"layers": [pattern, "head"], "blocks": "last 2", "recipe": "mxfp8(rounding='floor')", "from_step": 7}
    policy = octavo.Policy([spec, (pattern, None)])
    assert octavo.Policy.from_dict(tomllib.loads(str(policy))) == policy
    assert eval(repr(policy)) == policy
    assert policy.to_dict()["rules"][1] == {"layers": pattern, "recipe": "none"}


def test_a_policy_is_copied_pickled_and_never_changed():
    policy = octavo.Policy([("*", "fp8-delayed(margin=1)")])
    assert copy.deepcopy(policy) == pickle.loads(pickle.dumps(policy)) == policy
    with pytest.raises(AttributeError):
        policy.rules = ()


@pytest.mark.parametrize(
    ("rule", "error", "sentence"),
    [
        ({"layer": "*", "recipe": "bf16"}, UnknownSetting, "A rule has no key 'layer'. Did you mean 'layers'?"),
        ({"layers": "*"}, UnsupportedConfig, "A rule needs a recipe."),
        (("*", "fp8-curent"), UnsupportedConfig, "Did you mean 'fp8-current'?"),
        (("*", False), UnsupportedConfig, "got False. Use 'none' for none."),
        (("*", 8), UnsupportedConfig, "A recipe is a name, a canonical string or a Recipe, got int."),
        ({"recipe": "bf16", "wgrad": "bf16"}, UnknownSetting, "bf16 has no setting 'wgrad'."),
        ({"recipe": "none", "wgrad": "bf16"}, UnsupportedConfig, "leaves layers alone and has no wgrad. Remove it."),
        ({"recipe": "mxfp8", "wgrad": "fp8"}, UnsupportedConfig, "MXFP8.wgrad must be one of 'quantized', 'bf16'"),
        (([], "bf16"), UnsupportedConfig, "layers is a path, a glob of paths or a list of these, got []."),
        ((3, "bf16"), UnsupportedConfig, "got 3. '*' takes every layer."),
        ({"recipe": "bf16", "blocks": "frist 1"}, UnsupportedConfig, "got 'frist 1'. Did you mean 'first 1'?"),
        (
            {"recipe": "bf16", "blocks": 1},
            UnsupportedConfig,
            "blocks is 'first N', 'last N' or a list of these, got 1.",
        ),
        ({"recipe": "bf16", "blocks": "first 0"}, UnsupportedConfig, "got 'first 0'."),
        ({"recipe": "bf16", "from_step": -1}, UnsupportedConfig, "from_step is a number of steps from 0 up, got -1."),
        ({"recipe": "bf16", "from_step": True}, UnsupportedConfig, "got True."),
        ("*", UnsupportedConfig, "A rule is a pair (layers, recipe) or a dict with keys out of layers, blocks, recipe"),
    ],
    ids=str,
)
def test_a_rule_without_a_meaning_is_refused(rule, error, sentence):
    with pytest.raises(error) as caught:
        octavo.Policy([("head", "bf16"), rule])
    assert str(caught.value).startswith("rule 2: ") and sentence in str(caught.value)


@pytest.mark.parametrize("rules", ["*", {"rules": []}, None, 3], ids=str)
def test_rules_are_a_list(rules):
    with pytest.raises(UnsupportedConfig, match="A policy takes a list of rules, got"):
        octavo.Policy(rules)


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ("last 1", "in the last block"),
        ("last 11", "in the last 11 blocks"),
        (["first 1", "last 2"], "in the first block and last 2 blocks"),
    ],
)
def test_a_rule_says_which_blocks(blocks, said):
    (rule,) = octavo.Policy([{"blocks": blocks, "recipe": "bf16"}]).rules
    assert str(rule) == f"'*' {said}: bf16"


def test_two_rules_with_the_same_conditions_are_refused():
    with pytest.raises(UnsupportedConfig, match=r"rule 3: it has the same conditions as rule 1 .* Remove one"):
        octavo.Policy([("*.up", "bf16"), ("*", "mxfp8"), ("*.up", "fp8-block")])
    octavo.Policy([("*", "bf16"), {"recipe": "mxfp8", "blocks": "first 1"}, {"recipe": "mxfp8", "from_step": 1}])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[[rules]]\nrecipe = bf16\n", "policy.toml is no TOML: Invalid value (at line 2, column 10). Correct it."),
        (
            "[[rules]]\nrecipe = 'bf16'\n\n[[rules]]\nrecipe = 'fp9'\n",
            "policy.toml, line 4, rule 2: There is no",
        ),
        (
            "rules = [{recipe = 'bf16', step = 1}]\n",
            "policy.toml, rule 1: A rule has no key 'step'. Did you",
        ),
        ("[[rule]]\nrecipe = 'bf16'\n", "policy.toml: A policy has no key 'rule'. Did you mean 'rules'?"),
        ("rules = 'bf16'\n", "policy.toml: 'rules' is a list, in TOML a table [[rules]] for each, got 'bf16'."),
        ("[rules]\nrecipe = 'bf16'\n", "in TOML a table [[rules]] for each, got {'recipe': 'bf16'}."),
    ],
)
def test_a_file_without_a_meaning_is_refused_with_its_line(text, sentence, tmp_path):
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(UnsupportedConfig) as caught:
        octavo.Policy.load(tmp_path / "policy.toml")
    assert sentence in str(caught.value)


def test_a_file_that_is_no_text_or_not_there_is_refused(tmp_path):
    with pytest.raises(UnsupportedConfig, match=r"nothing.toml cannot be read: No such file"):
        octavo.Policy.load(tmp_path / "nothing.toml")
    (tmp_path / "codes").write_bytes(b"\xff\xfe")
    with pytest.raises(UnsupportedConfig, match="is no TOML"):
        octavo.Policy.load(tmp_path / "codes")


# -- which layers a rule takes -----------------------------------------------------------------------------------------


def test_the_first_rule_that_matches_decides():
    report = octavo.convert(
        gpt(),
        octavo.Policy([("blocks.2", "none"), ("*.up", "mxfp8"), ("*.mlp.*", "fp8-block"), ("blocks.[01].*", "bf16")]),
    )
    found, rules = recipes_of(report), rules_of(report)
    assert {path for path in found if path.startswith("blocks.2.")} == set()
    assert found["blocks.1.mlp.up"] == "mxfp8" and found["blocks.1.mlp.down"] == "fp8-block"
    assert found["blocks.0.attention.qkv"] == "bf16" and "blocks.3.attention.qkv" not in found
    assert [rules[f"blocks.{path}"] for path in ("2.mlp.up", "1.mlp.up", "1.mlp.down", "0.attention.qkv")] == [
        1,
        2,
        3,
        4,
    ]
    rows = {row.path: row for row in report}
    assert rows["blocks.2.mlp.up"].why == "left alone by rule 1 of the policy"
    assert rows["blocks.3.attention.qkv"].why == "no rule of the policy matches it" and report.unused == ()
    assert rows["blocks.3.attention.qkv"].rule is None and rows["blocks.1.mlp.up"].as_dict()["rule"] == 2
    assert "rule" in str(report).splitlines()[0].split()


def test_a_policy_gives_the_recipes_that_a_function_gives():
    policy = octavo.Policy([("*.up", "mxfp8"), ("*.attention", "fp8-block")])
    one, other = gpt(), gpt()
    octavo.convert(one, "fp8-current", policy)
    function = lambda path, _: "mxfp8" if path.endswith("up") else "fp8-block" if "attention" in path else None  # noqa: E731
    octavo.convert(other, "fp8-current", function)
    tokens = torch.randint(256, (2, 16))
    assert torch.equal(one(tokens), other(tokens))
    assert [m.recipe for m in one.modules() if isinstance(m, octavo.Linear)] == [
        m.recipe for m in other.modules() if isinstance(m, octavo.Linear)
    ]


def test_layers_without_a_rule_get_the_recipe_beside_the_policy():
    report = octavo.convert(gpt(), "fp8-current", policy=octavo.Policy([("*.up", "none")]))
    assert set(recipes_of(report).values()) == {"fp8-current"} and rules_of(report)["blocks.0.mlp.up"] == 1
    assert "head" not in recipes_of(report)


def test_rules_that_decide_nothing_are_reported():
    policy = octavo.Policy(
        [
            ("*.atention", "mxfp8"),
            ("up", "mxfp8"),
            ("*.mlp", "bf16"),
            ("*.down", "mxfp8"),
            ("bytes", "mxfp8"),
            ("*", "bf16"),
        ]
    )
    with pytest.warns(UserWarning, match=r"Rule 1 \('\*.atention': mxfp8\) decides for no layer: it matches none. Did"):
        report = octavo.convert(gpt(), policy)
    assert report.unused == tuple(policy.rules[index] for index in (0, 1, 3, 4))
    text = str(report)
    assert "Did you mean '*.attention'?" in text and "Did you mean '*.up'?" in text
    assert "Rule 4 ('*.down': mxfp8) decides for no layer: rules before it take every layer that it matches." in text
    assert [rule["layers"] for rule in report.as_dict()["unused"]] == ["*.atention", "up", "*.down", "bytes"]


def test_a_rule_of_a_module_that_is_elsewhere_is_reported_with_its_path():
    model = nn.ModuleDict({"wrapper": gpt()})
    with pytest.warns(UserWarning, match=r"it matches none. Did you mean '\*.blocks.0'"):
        octavo.convert(model, octavo.Policy([("blocks.0", "bf16"), ("*", "mxfp8")]))


@pytest.mark.filterwarnings("error")
def test_a_policy_whose_rules_all_decide_warns_of_nothing():
    model, policy = gpt(), octavo.Policy([("*.up", "mxfp8"), ("*", "fp8-current")])
    assert octavo.convert(model, policy).unused == ()
    assert octavo.convert(model, policy).unused == ()  # again: every layer has the recipe that it is to have


@pytest.mark.parametrize(
    ("pattern", "taken"), [("*", False), ("head", True), ("*head", True), ("he*", True), ("h*", True)]
)
def test_a_head_stays_in_high_precision_unless_a_rule_names_it(pattern, taken):
    with warnings.catch_warnings(action="ignore"):
        report = octavo.convert(gpt(), octavo.Policy([(pattern, "mxfp8"), ("blocks", "bf16")]))
    row = next(row for row in report if row.path == "head")
    assert (row.recipe, row.rule, row.reason) == (("mxfp8", 1, "converted") if taken else ("", None, "output head"))
    assert recipes_of(octavo.convert(gpt(), octavo.Policy([("*", "mxfp8")]), high_precision=()))["head"] == "mxfp8"


def test_a_rule_of_everything_leaves_routers_adapters_and_their_own_forwards():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.lora_A, self.plain = nn.Linear(32, 4), nn.Linear(32, 4), nn.Linear(32, 32)

    assert set(recipes_of(octavo.convert(Mixed(), octavo.Policy([("*", "mxfp8")])))) == {"plain"}
    named = octavo.Policy([("*router", "bf16"), ("lora_*", "bf16"), ("*", "mxfp8")])
    assert recipes_of(octavo.convert(Mixed(), named)) == {"router": "bf16", "lora_A": "bf16", "plain": "mxfp8"}
    model = nn.Sequential(Special(32, 32), nn.Linear(32, 32))
    with pytest.raises(UnsupportedConfig, match="whose own forward would be lost"):
        octavo.convert(model, octavo.Policy([("*", "mxfp8")]))
    assert octavo.convert(model, octavo.Policy([("0", "mxfp8"), ("*", "bf16")])).rows[0].recipe == "mxfp8"


def test_a_router_of_a_mixture_computes_in_float32_whatever_a_rule_says():
    model = nn.Sequential(octavo.MoE(32, 64, 4, 2))
    rules = [("0.router", "bf16"), ("*", "fp8-block")]
    with pytest.warns(UserWarning, match="left alone for reasons of their own"):
        report = octavo.convert(model, octavo.Policy(rules))
    assert set(recipes_of(report).values()) == {"fp8-block"} and len(report.unused) == 1


def test_layers_with_a_recipe_of_their_own_keep_it():
    model = nn.Sequential(octavo.Linear(32, 32, recipe="mxfp8"), nn.Linear(32, 32))
    report = octavo.convert(model, octavo.Policy([("*", "fp8-block")]))
    assert list(recipes_of(report).values()) == ["mxfp8", "fp8-block"] and rules_of(report) == {"0": None, "1": 1}
    octavo.convert(model, octavo.Policy([("*", "bf16")]), overwrite=True)
    assert {layer.recipe.key for layer in model} == {"bf16"}


def test_exclude_beats_a_rule():
    with warnings.catch_warnings(action="ignore"):
        report = octavo.convert(gpt(), octavo.Policy([("*.up", "mxfp8"), ("*", "bf16")]), exclude="*.up")
    assert set(recipes_of(report).values()) == {"bf16"} and len(report.unused) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((octavo.Policy([("*", "bf16")]), lambda path, module: None), "convert takes one policy"),
        (("policy.toml",), r"Use octavo.Policy.load\('policy.toml'\)"),
        (([("*", "bf16")],), "got a list. octavo.Policy makes a policy of a list"),
        (("bf16", {"*": "bf16"}), r"policy is a function of \(path, module\) or an octavo.Policy"),
    ],
)
def test_convert_refuses_what_is_no_policy(arguments, sentence):
    with pytest.raises(UnsupportedConfig, match=sentence):
        octavo.convert(gpt(), *arguments)


def test_a_shared_layer_takes_one_rule():
    layer = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": layer, "b": layer})
    with pytest.raises(UnsupportedConfig, match="the same layer as a, for which mxfp8 was chosen"):
        octavo.convert(model, octavo.Policy([("a", "mxfp8"), ("b", "bf16")]))


def test_revert_undoes_a_policy_and_its_schedule():
    model = gpt()
    octavo.convert(model, octavo.Policy([("*.up", "mxfp8"), {"recipe": "bf16", "from_step": 2}, ("*", "fp8-delayed")]))
    octavo.revert(model)
    kinds = {type(m) for m in model.modules() if isinstance(m, nn.Linear)}
    assert kinds == {nn.Linear} and not any("_schedule" in m.__dict__ for m in model.modules())


# -- blocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "indices"),
    [("first 1", {0}), ("last 2", {2, 3}), (["first 1", "last 1"], {0, 3}), ("first 9", {0, 1, 2, 3})],
    ids=str,
)
def test_the_first_and_the_last_blocks(blocks, indices):
    with warnings.catch_warnings(action="ignore"):
        report = octavo.convert(gpt(), octavo.Policy([{"blocks": blocks, "recipe": "bf16"}, ("*", "fp8-current")]))
    assert {int(path.split(".")[1]) for path, recipe in recipes_of(report).items() if recipe == "bf16"} == indices


def test_a_pattern_and_blocks_must_both_match():
    rules = [{"layers": "*.down", "blocks": "last 1", "recipe": "bf16"}, ("*", "mxfp8")]
    found = recipes_of(octavo.convert(gpt(), octavo.Policy(rules)))
    assert [path for path, recipe in found.items() if recipe == "bf16"] == ["blocks.3.mlp.down"]


def test_which_modules_are_blocks():
    def block():
        return nn.ModuleDict({"experts": nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))})

    model = nn.Module()
    model.encoder = nn.ModuleList(block() for _ in range(2))
    model.decoder = nn.ModuleDict({str(index): block() for index in range(3)})
    model.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))  # layers, not blocks of them
    model.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(2))
    model.mixed = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.GELU())
    assert blocks_of(model) == {
        "encoder.0": (0, 2), "encoder.1": (1, 2), "decoder.0": (0, 3), "decoder.1": (1, 3), "decoder.2": (2, 3),
    }  # fmt: skip
    assert blocks_of(Net()) == {"blocks.0": (0, 2), "blocks.1": (1, 2)}
    with pytest.warns(UserWarning, match="this model has no blocks, which are modules of one class"):
        octavo.convert(
            nn.Sequential(nn.Linear(4, 4)), "mxfp8", octavo.Policy([{"blocks": "first 1", "recipe": "bf16"}])
        )


# -- a real model ------------------------------------------------------------------------------------------------------


def batches(steps):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(256, (2, 17), generator=generator) for _ in range(steps)]


def train(model, steps, *, call=None, before=lambda step: None, start=0):
    """Trains, and returns the losses. `before(step)` runs before each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with octavo.attach(model, optimizer):
        for step, batch in enumerate(batches(steps)[start:], start=start):
            before(step)
            logits = (model if call is None else call)(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("error")
def test_a_gpt_trains_by_a_policy_from_a_file(tmp_path):
    (tmp_path / "policy.toml").write_text(FILE)
    model, twin = gpt(), gpt()
    report = octavo.convert(model, octavo.Policy.load(tmp_path / "policy.toml"))
    assert set(recipes_of(report).values()) == {"bf16", "fp8-block(wgrad='bf16')", "fp8-current"}
    octavo.convert(twin, "fp8-current", lambda path, _: recipes_of(report).get(path, False))
    losses = train(model, 3)
    assert losses == train(twin, 3) and losses[-1] < losses[0]
    quant = model.blocks[1].attention.qkv.recipe.linear()
    assert (quant.fprop.mode, quant.wgrad.mode) == ("quantized", "high_precision")
    assert octavo.state_dict(model) == {}


# -- a change at a step ------------------------------------------------------------------------------------------------

CHANGES = [("fp8-current", "bf16"), ("fp8-delayed", "fp8-block"), ("fp8-current", "fp8-delayed"), ("nvfp4", "mxfp8")]


def scheduled(first, then, step=2):
    return octavo.Policy([{"layers": "*.down", "recipe": then, "from_step": step}, ("*", first)])


def by_hand(model, then, at=2):
    def before(step):
        if step == at:
            for block in model.blocks:
                block.mlp.down.recipe = then

    return before


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("first", "then"), CHANGES)
def test_a_change_at_a_step_equals_one_by_hand(first, then, compiled):
    models = []
    for policy in (scheduled(first, then), octavo.Policy([("*", first)])):
        torch.manual_seed(0)  # stochastic rounding follows torch's seed
        models.append(GPT(Shape(width=32, layers=2, heads=2, context=16), seed=0))
        octavo.convert(models[-1], policy)
    calls = [torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model for model in models]
    losses = train(models[0], 4, call=calls[0])
    assert losses == train(models[1], 4, call=calls[1], before=by_hand(models[1], then))
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    assert {block.mlp.down.recipe.key for block in models[0].blocks} == {then}
    assert {block.mlp.up.recipe.key for block in models[0].blocks} == {first}


@pytest.mark.usefixtures("fresh_compiler")
def test_a_change_recompiles_once():
    from torch._dynamo.testing import CompileCounterWithBackend

    model = nn.Sequential(nn.Linear(32, 32))
    octavo.convert(model, octavo.Policy([{"recipe": "bf16", "from_step": 2}, ("*", "fp8-current")]))
    counter = CompileCounterWithBackend("aot_eager")
    compiled, counts = torch.compile(model, backend=counter, fullgraph=True), []
    for _ in range(5):
        compiled(torch.ones(4, 32)).sum().backward()
        octavo.step(model)
        counts.append(counter.frame_count)
    assert counts == [1, 1, 2, 2, 2]


def test_the_layers_inside_a_fused_block_change():
    model = nn.Sequential(octavo.LayerNormMLP(32, 64), nn.Linear(32, 32))
    twin = copy.deepcopy(model)
    octavo.convert(model, octavo.Policy([{"recipe": "fp8-block", "from_step": 1}, ("*", "fp8-current")]))
    octavo.convert(twin, "fp8-block")
    x = torch.randn(8, 32)
    assert not torch.equal(model(x), twin(x))
    octavo.step(model)
    assert torch.equal(model(x), twin(x))


def test_the_report_says_when_layers_change():
    report = octavo.convert(gpt(), scheduled("fp8-current", "bf16", 1000))
    assert "blocks.*.mlp.down: fp8-current, bf16 from step 1000 on, as octavo.step or octavo.attach counts" in str(
        report
    )
    assert rules_of(report)["blocks.0.mlp.down"] == 2 and report.unused == ()


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_counts_on(way):
    model = gpt()
    octavo.convert(model, scheduled("fp8-current", "bf16"))
    octavo.step(model)
    twin = way(model)
    octavo.step(twin)
    assert twin.blocks[0].mlp.down.recipe.key == "bf16" and model.blocks[0].mlp.down.recipe.key == "fp8-current"


def test_a_recipe_set_by_hand_stays():
    model = gpt()
    octavo.convert(model, scheduled("fp8-current", "bf16"))
    model.blocks[0].mlp.down.recipe = "mxfp8"
    for _ in range(3):
        octavo.step(model)
    assert [block.mlp.down.recipe.key for block in model.blocks] == ["mxfp8", "bf16", "bf16", "bf16"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("saved", [1, 3])
@pytest.mark.parametrize(("first", "then"), CHANGES)
def test_a_run_resumes_before_and_after_the_change(first, then, saved):
    policy, model, twin = scheduled(first, then), gpt(), gpt()
    octavo.convert(model, policy)
    train(model, saved)
    weights, state = copy.deepcopy(model.state_dict()), octavo.state_dict(model)
    assert {int(value) for key, value in state.items() if key.endswith("schedule.step")} == (
        {1} if saved < 2 else set()
    )
    octavo.convert(twin, policy, step=saved)
    twin.load_state_dict(weights)
    octavo.load_state_dict(twin, state)
    assert train(twin, 5, start=saved) == train(model, 5, start=saved)
    assert twin.blocks[0].mlp.down.recipe.key == then


def test_a_state_of_another_step_is_refused():
    rules = [{"recipe": "mxfp8", "from_step": 4}, {"recipe": "bf16", "from_step": 2}, ("*", "fp8-delayed")]
    policy, model = octavo.Policy(rules), gpt()
    octavo.convert(model, policy)
    train(model, 3)
    fresh = gpt()
    octavo.convert(fresh, policy)
    with pytest.raises(
        UnsupportedConfig, match=r"runs in bf16, not in fp8-delayed.*octavo.convert\(model, policy, step=3\)"
    ):
        octavo.load_state_dict(fresh, octavo.state_dict(model))
    state = octavo.state_dict(fresh)
    for wrong in (torch.tensor(-1), torch.tensor(1.0), torch.zeros(2, dtype=torch.int64), 3):
        with pytest.raises(Unsupported, match=r"schedule.step is"):
            octavo.load_state_dict(fresh, {**state, "blocks.0.mlp.down.schedule.step": wrong})
    train(model, 1)
    with pytest.raises(UnsupportedConfig, match=r"no scales of .* pass the step of the state: convert\(..., step"):
        octavo.load_state_dict(fresh, octavo.state_dict(model))


def test_a_state_of_a_step_before_the_recipe_is_refused():
    """The layer does not know the recipes of steps before the one that it was converted for."""
    rules = [{"recipe": "mxfp8", "from_step": 6}, {"recipe": "fp8-current", "from_step": 2}, ("*", "bf16")]
    policy, models = octavo.Policy(rules), [gpt(), gpt()]
    for model, step in zip(models, (0, 4), strict=True):
        octavo.convert(model, policy, step=step)
    octavo.step(models[0])
    with pytest.raises(UnsupportedConfig, match=r"fp8-current only from step 2 on.*policy, step=1\)"):
        octavo.load_state_dict(models[1], octavo.state_dict(models[0]))
    octavo.step(models[0])
    octavo.load_state_dict(models[1], octavo.state_dict(models[0]))  # of step 2
    for _ in range(4):
        assert models[1].blocks[0].mlp.down.recipe.key == "fp8-current"
        octavo.step(models[1])
    assert models[1].blocks[0].mlp.down.recipe.key == "mxfp8"


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ([{"recipe": "mxfp8", "from_step": 5}], "it would get mxfp8 at step 5, and only a layer with a recipe before"),
        ([{"recipe": "none", "from_step": 5}, ("*", "mxfp8")], "it would lose its recipe at step 5"),
        (
            [{"recipe": "fp8-delayed", "from_step": 5}, ("*", "fp8-delayed(margin=1)")],
            r"change from fp8-delayed\(margin=1\) to fp8-delayed at step 5, and one window of amaxes cannot follow two",
        ),
    ],
)
def test_a_change_that_a_layer_cannot_make_is_refused(rules, sentence):
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(UnsupportedConfig, match=sentence):
        octavo.convert(model, octavo.Policy(rules))
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("step", [-1, True, 1.0, "3"])
def test_a_step_is_a_number(step):
    with pytest.raises(UnsupportedConfig, match="step is the number of steps that the run has made, from 0 up"):
        octavo.convert(gpt(), "bf16", step=step)


def test_held_codes_do_not_change_their_recipe():
    model = nn.Sequential(nn.Linear(32, 32))
    octavo.convert(model, octavo.Policy([{"recipe": "mxfp8", "from_step": 1}, ("*", "fp8-current")]))
    with pytest.raises(UnsupportedConfig, match="changes its recipe at step 1, and a weight stored as codes keeps"):
        octavo.quantize_weights(model)
    octavo.step(model)
    octavo.quantize_weights(model)


def test_caches_of_weights_follow_the_change():
    def trained(policy, by_hand):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32))
        octavo.convert(model, policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with octavo.attach(model, optimizer):
            for step in range(3):
                if by_hand and step == 1:
                    model[0].recipe = "fp8-block"
                for first in (True, False):
                    with octavo.microbatch(first=first):
                        model(torch.linspace(-1, 1, 128).view(4, 32)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return model[0].weight

    rules = [{"recipe": "fp8-block", "from_step": 1}, ("*", "fp8-current")]
    assert torch.equal(trained(octavo.Policy(rules), False), trained(octavo.Policy(rules[1:]), True))


def test_experts_of_a_mixture_change():
    model = nn.Sequential(octavo.MoE(32, 64, 4, 2))
    octavo.convert(
        model, octavo.Policy([{"layers": "*.experts", "recipe": "bf16", "from_step": 1}, ("*", "fp8-block")])
    )
    octavo.step(model)
    assert {layer.recipe.key for layer in model.modules() if isinstance(layer, octavo.GroupedLinear)} == {"bf16"}
    assert model(torch.randn(8, 32)).isfinite().all()


@pytest.mark.usefixtures("fresh_compiler")
def test_a_graph_cannot_count_steps():
    model = nn.Sequential(nn.Linear(32, 32))
    octavo.convert(model, octavo.Policy([{"recipe": "bf16", "from_step": 2}, ("*", "fp8-current")]))
    with pytest.raises(Exception, match="a graph cannot count steps"):
        torch.compile(octavo.step, backend="eager", fullgraph=True)(model)


@pytest.mark.parametrize("path", [5, None, 1.5, True, [], object], ids=repr)
def test_what_is_no_path_is_refused_in_a_sentence(path):
    with pytest.raises(UnsupportedConfig, match=r"Policy\.load takes the path of a TOML file, got"):
        octavo.Policy.load(path)


@pytest.mark.parametrize("path", ["a\0b", b"a\0b", b"nowhere", "", "/"], ids=repr)
def test_a_path_that_cannot_be_read_is_refused_in_a_sentence(path):
    with pytest.raises(UnsupportedConfig, match="cannot be read: "):
        octavo.Policy.load(path)
