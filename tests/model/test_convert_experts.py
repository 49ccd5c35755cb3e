"""octavo.convert on experts that transformers' registry dispatches, by stand-ins of the same attributes."""

import copy
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig
from octavo.recipes import SHIPPED
from tests.support.dispatched_experts import (
    Config,
    Gated,
    Model,
    Ungated,
    call,
    gradients,
    in_float64,
)
from tests.support.exports import attempt_export
from tests.support.recipe_traits import by_bits
from tests.support.state_tensors import named_state

BOUNDS = by_bits(unquantized=1e-5, eight=0.1, four=0.4)  # relative error of y and of each gradient
pytestmark = pytest.mark.usefixtures("expert_registry")


def gated(seed=0, config=None, **settings):
    torch.manual_seed(seed)
    return Gated(config or Config(), **settings)


def model(seed=0):
    torch.manual_seed(seed)
    return Model()


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", SHIPPED)
def test_results_are_near_the_modules_own_in_float64(recipe):
    experts = gated()
    arguments, dy = call()
    exact = in_float64(experts, arguments, dy)
    octavo.convert(experts, recipe)
    found = gradients(experts, experts.parameters(), arguments, dy)
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]
    assert max(errors) < BOUNDS[recipe]
    assert recipe == "bf16" or min(errors) > 1e-3


@pytest.mark.parametrize("recipe", SHIPPED)
def test_results_are_those_of_octavos_experts_bit_for_bit(recipe):
    dtype = torch.bfloat16
    experts = gated(dtype=dtype)
    twin = octavo.moe.Experts(4, 64, 96, dtype=dtype)
    with torch.no_grad():
        twin.fc1.weight.copy_(experts.gate_up_proj)
        twin.fc2.weight.copy_(experts.down_proj)
    for one in (experts, twin):
        octavo.convert(one, recipe)
    for mine, other in zip(experts.octavo.modules(), twin.modules(), strict=True):
        if "rounding_seed" in dict(named_state(mine)):
            other._hidden.rounding_seed.copy_(mine._hidden.rounding_seed)
    for step in range(2):
        arguments, dy = call(step, dtype=dtype)
        mine = gradients(experts, experts.parameters(), arguments, dy)
        others = gradients(twin, twin.parameters(), arguments, dy)
        assert all(map(torch.equal, mine, others))
        for one in (experts, twin):
            octavo.step(one)


def test_the_operations_run_as_one():
    experts = gated()
    octavo.convert(experts, "fp8-block")
    arguments, _ = call()
    assert experts.octavo.explain(*arguments).fired == ("experts",)


def test_slots_of_other_experts_add_nothing():
    experts = gated()
    octavo.convert(experts, "fp8-block")
    (x, index, weights), _ = call()
    index[:, 1] = 4
    alone = experts(x, index[:, :1], weights[:, :1])
    assert torch.equal(experts(x, index, weights), alone)


@pytest.mark.parametrize("autocast", [False, True])
def test_y_has_the_dtype_of_x(autocast):
    experts = gated()
    octavo.convert(experts, "fp8-block")
    (x, index, weights), _ = call()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert experts(x, index, weights.bfloat16()).dtype == torch.float32
        assert experts(x.bfloat16(), index, weights).dtype == torch.bfloat16


# -- the model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", SHIPPED)
def test_parameters_and_keys_stay(recipe):
    converted, plain = model(), model()
    before = dict(converted.named_parameters())
    octavo.convert(converted, recipe)
    assert list(converted.state_dict()) == list(plain.state_dict())
    assert {name: id(p) for name, p in converted.named_parameters(remove_duplicate=False)} == {
        name: id(p) for name, p in before.items()
    }


def test_the_report_has_a_row_for_experts():
    report = octavo.convert(model(), "fp8-delayed")
    rows = {row.path: row for row in report}
    assert rows["blocks.0.experts"].recipe == "fp8-delayed"
    assert rows["blocks.0.experts"].weights == 4 * 64 * 96 * 3
    assert rows["blocks.0.gate"].reason == "router"
    assert set(rows) == {"out", *[f"blocks.{i}.{name}" for i in (0, 1) for name in ("gate", "experts")]}
    assert report.summary().startswith("Converted 3 layers (99.")


def test_revert_restores_the_experts():
    plain = model()
    converted = copy.deepcopy(plain)
    kind, attributes = type(converted.blocks[0].experts), set(vars(converted.blocks[0].experts))
    octavo.convert(converted, "fp8-delayed")
    assert isinstance(converted.blocks[0].experts, kind)
    octavo.revert(converted)
    assert type(converted.blocks[0].experts) is kind
    assert set(vars(converted.blocks[0].experts)) == attributes
    assert [name for name, _ in converted.named_modules()] == [name for name, _ in plain.named_modules()]
    x = torch.randn(10, 64)
    assert torch.equal(converted(x), plain(x))


def test_a_change_of_the_implementation_after_the_conversion_raises():
    experts = gated()
    octavo.convert(experts, "fp8-block")
    arguments, _ = call()
    experts(*arguments)
    experts.config._experts_implementation = "grouped_mm"
    with pytest.raises(UnsupportedConfig, match=r"set_experts_implementation\('grouped_mm'\) came after"):
        experts(*arguments)
    octavo.revert(experts)
    octavo.convert(experts, "fp8-block")
    experts(*arguments)
    experts.config._experts_implementation = "batched_mm"  # as transformers does while it generates on a GPU
    with torch.no_grad():
        experts(*arguments)
    with pytest.raises(UnsupportedConfig, match="batched_mm"):
        experts(*arguments)


def test_training_moves_every_weight_and_the_state():
    trained = model()
    octavo.convert(trained, "fp8-delayed")
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    octavo.attach(trained, optimizer)
    before = {name: p.detach().clone() for name, p in trained.named_parameters()}
    x, losses = torch.randn(16, 64), []
    for _ in range(4):
        loss = trained(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not any(torch.equal(p, before[name]) for name, p in trained.named_parameters())
    history = octavo.state_dict(trained)["blocks.1.experts.octavo.fc1.scaling.forward.history"]
    assert history.count_nonzero()


def test_a_loaded_model_goes_on_bit_for_bit():
    first, second = model(0), model(1)
    for one in (first, second):
        octavo.convert(one, "fp8-delayed")
    first(torch.randn(64, 64)).sum().backward()
    octavo.step(first)
    second.load_state_dict(first.state_dict())
    octavo.load_state_dict(second, octavo.state_dict(first))
    x = torch.randn(64, 64)
    assert torch.equal(first(x), second(x))


def test_weights_that_are_assigned_are_used():
    experts, other = gated(0), gated(1)
    octavo.convert(experts, "fp8-block")
    experts.load_state_dict(other.state_dict(), assign=True)
    octavo.convert(other, "fp8-block")
    arguments, _ = call()
    assert torch.equal(experts(*arguments), other(*arguments))


def test_experts_convert_on_the_meta_device():
    with torch.device("meta"):
        experts = Gated(Config())
    octavo.convert(experts, "fp8-delayed")
    assert experts.octavo.fc1.weight.is_meta
    experts.to_empty(device="cpu").load_state_dict(gated().state_dict())
    other = gated()
    octavo.convert(other, "fp8-delayed")
    arguments, _ = call()
    assert torch.equal(experts(*arguments), other(*arguments))


def test_a_copy_has_weights_and_state_of_its_own():
    converted = model()
    octavo.convert(converted, "fp8-delayed")
    x = torch.randn(64, 64)
    before = converted(x)
    copied = copy.deepcopy(converted)
    assert copied.blocks[0].experts.octavo.fc1.weight is copied.blocks[0].experts.gate_up_proj
    with torch.no_grad():
        converted.blocks[0].experts.gate_up_proj.mul_(2)
    octavo.step(converted)
    assert torch.equal(copied(x), before)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "fp8-block"])
def test_an_export_leaves_the_model_as_it_was(recipe):
    """torch.export puts tables of parameters without data into the modules that it traces, and takes them away."""
    experts = gated()
    octavo.convert(experts, recipe)
    other = copy.deepcopy(experts)
    arguments, dy = call()
    for converted in (experts, other):
        gradients(converted, converted.parameters(), arguments, dy)
        octavo.step(converted)
    attempt_export(experts, arguments)
    assert experts.octavo.fc1.weight is experts.gate_up_proj
    want = gradients(other, other.parameters(), arguments, dy)
    for _ in range(2):
        found = gradients(experts, experts.parameters(), arguments, dy)
        assert all(map(torch.equal, found, want))


def test_a_functional_call_uses_the_parameters_that_it_is_given():
    experts = gated()
    octavo.convert(experts, "fp8-current")
    arguments, _ = call()
    doubled = {name: 2 * p.detach() for name, p in experts.named_parameters()}
    found = torch.func.functional_call(experts, doubled, arguments)
    before = experts(*arguments)
    with torch.no_grad():
        for p in experts.parameters():
            p.mul_(2)
    assert torch.equal(found, experts(*arguments)) and not torch.equal(found, before)


def test_a_pickle_has_the_same_experts():
    experts = gated()
    octavo.convert(experts, "fp8-block")
    data = pickle.dumps(experts)
    loaded = pickle.loads(data)
    assert loaded.octavo.fc1.weight is loaded.gate_up_proj
    arguments, _ = call()
    assert torch.equal(loaded(*arguments), loaded.octavo(*arguments))


def test_a_deleted_model_leaves_memory_at_once():
    experts = gated()
    octavo.convert(experts, "fp8-block")
    arguments, dy = call()
    experts(*arguments).backward(dy)
    weight, module = weakref.ref(experts.down_proj), weakref.ref(experts)
    del experts
    assert module() is None and weight() is None


def test_settings_reach_both_layers():
    experts = gated()
    octavo.convert(experts, "fp8-block", fuse_wgrad_accumulation=True, keep_weight_codes=False)
    for p in experts.parameters():
        p.main_grad = torch.zeros_like(p)
    arguments, dy = call()
    experts(*arguments).backward(dy)
    assert all(p.main_grad.count_nonzero() for p in experts.parameters())
    assert not experts.octavo.fc2.keep_weight_codes


def test_microbatches_use_cached_codes():
    experts = gated()
    octavo.convert(experts, "fp8-block")
    arguments, _ = call()
    expected = experts(*arguments)
    for first in (True, False):
        with octavo.microbatch(first=first):
            assert torch.equal(experts(*arguments), expected)
    assert experts.octavo.fc1._codes.recipe is not None


# -- choices -----------------------------------------------------------------------------------------------------------


def test_excluded_experts_stay():
    converted, plain = model(), model()
    with pytest.warns(UserWarning, match="found nothing"):
        report = octavo.convert(converted, "fp8-block", exclude=["blocks.0.experts", "out", "blocks.1.*"])
    assert {row.path: row.reason for row in report}["blocks.0.experts"] == "excluded"
    x = torch.randn(8, 64)
    assert torch.equal(converted(x), plain(x))


def test_a_policy_chooses_a_recipe_for_experts():
    converted = model()
    octavo.convert(converted, "fp8-block", lambda path, m: "mxfp8" if path == "blocks.1.experts" else None)
    recipes = [str(block.experts.octavo.fc2.recipe) for block in converted.blocks]
    assert recipes == ["fp8-block", "mxfp8"]


def test_a_second_conversion_keeps_or_overwrites():
    converted = model()
    octavo.convert(converted, "fp8-block")
    layers = converted.blocks[0].experts.octavo
    with pytest.warns(UserWarning, match="changed nothing"):
        kept = octavo.convert(converted, "mxfp8")
    assert {row.path: (row.recipe, row.reason) for row in kept}["blocks.0.experts"] == ("fp8-block", "kept")
    octavo.convert(converted, "mxfp8", overwrite=True)
    assert str(layers.fc1.recipe) == "mxfp8" and converted.blocks[0].experts.octavo is layers


# -- activations -------------------------------------------------------------------------------------------------------


def with_gate(function, **attributes):
    experts = gated()
    experts.__dict__.update(attributes)
    experts._apply_gate = lambda h: function(*h.chunk(2, dim=-1))
    return experts


ACTIVATIONS = {
    "swiglu": lambda g, u: F.silu(g) * u,
    "geglu": lambda g, u: F.gelu(g, approximate="tanh") * u,
    "reglu": lambda g, u: F.relu(g) * u,
    "sreglu": lambda g, u: F.relu(g).square() * u,
    "qgeglu": lambda g, u: g * torch.sigmoid(1.702 * g) * u,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_activations_are_recognised(name):
    experts = with_gate(ACTIVATIONS[name])
    octavo.convert(experts, "bf16")
    assert name == experts.octavo.activation.NAME


@pytest.mark.parametrize(
    "gate",
    [
        lambda g, u: F.silu(g.clamp(max=10)) * u.clamp(-10, 10),
        lambda g, u: (u.clamp(-10, 10) + 1) * g.clamp(max=10) * torch.sigmoid(1.5 * g.clamp(max=10)),
    ],
)
def test_clamped_activations_are_recognised(gate):
    experts = with_gate(gate, swiglu_limit=10.0, alpha=1.5)
    octavo.convert(experts, "bf16")
    x = 8 * torch.randn(32, 192)
    torch.testing.assert_close(experts.octavo.activation(x), gate(*x.chunk(2, dim=-1)))


def test_experts_without_a_gate_are_converted():
    experts = Ungated(Config())
    experts.act_fn = lambda h: F.relu(h).square()
    arguments, dy = call()
    expected = gradients(experts, experts.parameters(), arguments, dy)
    octavo.convert(experts, "bf16")
    assert experts.octavo.activation.NAME == "srelu"
    found = gradients(experts, experts.parameters(), arguments, dy)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


# -- refusals ----------------------------------------------------------------------------------------------------------


def patched(experts, **attributes):
    experts.__dict__.update(attributes)
    return experts


class OwnForward(Gated):
    def forward(self, x, index, weights):
        return x


REFUSED = {
    "normalizes": lambda: patched(gated(), has_post_expert_norm=True),
    "distributed": lambda: patched(gated(), _is_expert_parallel=True),
    "class is OwnForward, with a forward of its own": lambda: OwnForward(Config()),
    "its forward was replaced by .*lambda.* on the instance": lambda: patched(gated(), forward=lambda *_: None),
    "attribute 'octavo'": lambda: patched(gated(), octavo=1),
    "torch.float64": lambda: gated(dtype=torch.float64),
    "3 · hidden|2 · ffn": lambda: patched_shape(gated()),
}


def patched_shape(experts):
    experts.down_proj = nn.Parameter(torch.zeros(4, 64, 95))
    return experts


@pytest.mark.parametrize("why", REFUSED)
def test_experts_that_cannot_be_converted_are_named_and_left(why):
    experts = REFUSED[why]()
    before = set(vars(experts))
    model = nn.Sequential(nn.Linear(4, 4), experts)
    with pytest.warns(UserWarning, match=f"left 1 as it was: .*({why})"):
        report = octavo.convert(model, "fp8-block")
    assert set(vars(experts)) == before and len(experts._modules) == 0
    assert [row.reason for row in report] == ["converted", "cannot be converted"]
    octavo.revert(model)
    with pytest.raises(UnsupportedConfig, match=why):
        octavo.convert(model, octavo.Policy([("1", "fp8-block")]))


def test_parametrized_experts_raise():
    experts = gated()
    torch.nn.utils.parametrize.register_parametrization(experts, "down_proj", nn.Identity())
    with pytest.warns(UserWarning, match="it is parametrized"):
        octavo.convert(experts, "fp8-block")


def test_experts_that_are_parametrized_later_multiply_what_that_makes():
    experts, plain = gated(), gated()
    for one in (experts, plain):
        octavo.convert(one, "fp8-block")
    torch.nn.utils.parametrize.register_parametrization(experts, "down_proj", Doubled())
    with torch.no_grad():
        plain.down_proj.mul_(2)
    arguments, dy = call()
    assert torch.equal(experts(*arguments), plain(*arguments))
    experts(*arguments).backward(dy)
    assert experts.parametrizations.down_proj.original.grad.count_nonzero()
    torch.nn.utils.parametrize.remove_parametrizations(experts, "down_proj", leave_parametrized=False)
    assert torch.equal(2 * experts(*arguments), plain(*arguments))
    experts.down_proj = None
    with pytest.raises(UnsupportedConfig, match="down_proj is no longer a parameter"):
        experts(*arguments)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_weights_of_experts_are_not_held_as_codes():
    experts = gated()
    octavo.convert(experts, "fp8-block")
    with pytest.raises(UnsupportedConfig, match="does not take gate_up_proj"):
        octavo.quantize_weights(experts)
