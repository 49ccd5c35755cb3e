"""octavo.Sequential as a container: a list of modules, runs of operations between ordinary ones, extra inputs and
outputs by position, and parameters and modes that may change between calls."""

import copy

import pytest
import torch
from torch import nn

import octavo
from octavo import ops
from tests.support.linear_oracle import assert_same
from tests.support.sequentials import (
    FFN,
    H,
    M,
    assert_unfused,
    batch,
    every,
    fill,
    mlp,
    quantized,
    recipes,
    unfused,
    whole,
)
from tests.support.steps import assert_equal, step


def scales(*factors):
    return [ops.ConstantScale(f) for f in factors]


def factors(model):
    return [op.scale for op in model]


# -- a list ------------------------------------------------------------------------------------------------------------


def test_a_sequential_is_built_from_modules_in_order():
    made = scales(2.0, 3.0, 5.0)
    model = octavo.Sequential(*made)
    assert isinstance(model, nn.Module)
    assert len(model) == 3
    assert all(a is b for a, b in zip(model, made, strict=True))
    assert torch.equal(model(torch.ones(2, 4)), torch.full((2, 4), 30.0))


def test_a_sequential_is_built_from_names():
    model = octavo.Sequential({"up": ops.ConstantScale(2.0), "bias": ops.Bias(4)})
    assert [name for name, _ in model.named_children()] == ["up", "bias"]
    assert list(model.state_dict()) == ["bias.bias"]
    assert torch.equal(model(torch.ones(4)), torch.full((4,), 2.0))


@pytest.mark.parametrize("edit", ["insert", "append", "delete", "pop", "set"])
def test_one_that_was_built_from_names_can_be_edited(edit):
    model, x = octavo.Sequential({"up": ops.ConstantScale(2.0), "down": ops.ConstantScale(3.0)}), torch.ones(4)
    five = ops.ConstantScale(5.0)
    edits = {
        "insert": (lambda: model.insert(1, five), [2.0, 5.0, 3.0]),
        "append": (lambda: model.append(five), [2.0, 3.0, 5.0]),
        "delete": (lambda: model.__delitem__(0), [3.0]),
        "pop": (lambda: model.pop(1), [2.0]),
        "set": (lambda: model.__setitem__(-1, five), [2.0, 5.0]),
    }
    edits[edit][0]()
    assert factors(model) == edits[edit][1]
    assert torch.equal(model(x), torch.tensor(edits[edit][1]).prod() * x)


def test_a_sequential_of_nothing_is_the_identity():
    x = torch.randn(3, 4)
    assert len(octavo.Sequential()) == 0
    assert torch.equal(octavo.Sequential()(x), x)


@pytest.mark.parametrize("index", [0, 1, 2, -1, -3])
def test_an_index_finds_a_module(index):
    made = scales(2.0, 3.0, 5.0)
    assert octavo.Sequential(*made)[index] is made[index]


@pytest.mark.parametrize("part", [slice(1, None), slice(None, -1), slice(0, 3, 2), slice(1, 1)], ids=str)
def test_a_slice_is_a_sequential_of_the_same_modules(part):
    made = scales(2.0, 3.0, 5.0)
    found = octavo.Sequential(*made)[part]
    assert type(found) is octavo.Sequential
    assert all(a is b for a, b in zip(found, made[part], strict=True))


@pytest.mark.parametrize("index", [3, -4])
@pytest.mark.parametrize("how", ["get", "set", "delete", "pop"])
def test_an_index_out_of_range_is_an_index_error(index, how):
    model = octavo.Sequential(*scales(2.0, 3.0, 5.0))
    calls = {
        "get": lambda: model[index],
        "set": lambda: model.__setitem__(index, ops.Identity()),
        "delete": lambda: model.__delitem__(index),
        "pop": lambda: model.pop(index),
    }
    with pytest.raises(IndexError):
        calls[how]()
    assert factors(model) == [2.0, 3.0, 5.0]


EDITS = {  # name -> (what is done to [2, 3, 5], what is there afterwards)
    "set": (lambda m: m.__setitem__(1, ops.ConstantScale(7.0)), [2.0, 7.0, 5.0]),
    "set from the end": (lambda m: m.__setitem__(-1, ops.ConstantScale(7.0)), [2.0, 3.0, 7.0]),
    "delete": (lambda m: m.__delitem__(0), [3.0, 5.0]),
    "delete from the end": (lambda m: m.__delitem__(-2), [2.0, 5.0]),
    "delete a slice": (lambda m: m.__delitem__(slice(0, 2)), [5.0]),
    "append": (lambda m: m.append(ops.ConstantScale(7.0)), [2.0, 3.0, 5.0, 7.0]),
    "extend": (lambda m: m.extend(scales(7.0, 11.0)), [2.0, 3.0, 5.0, 7.0, 11.0]),
    "extend by one": (lambda m: m.extend(octavo.Sequential(*scales(7.0))), [2.0, 3.0, 5.0, 7.0]),
    "insert": (lambda m: m.insert(1, ops.ConstantScale(7.0)), [2.0, 7.0, 3.0, 5.0]),
    "insert before the end": (lambda m: m.insert(-1, ops.ConstantScale(7.0)), [2.0, 3.0, 7.0, 5.0]),
    "insert at the end": (lambda m: m.insert(3, ops.ConstantScale(7.0)), [2.0, 3.0, 5.0, 7.0]),
    "pop": (lambda m: m.pop(-1), [2.0, 3.0]),
    "pop the first": (lambda m: m.pop(0), [3.0, 5.0]),
    "add in place": (lambda m: m.__iadd__(octavo.Sequential(*scales(7.0))), [2.0, 3.0, 5.0, 7.0]),
}


@pytest.mark.parametrize(("edit", "want"), EDITS.values(), ids=EDITS)
def test_an_edit_changes_the_list_and_what_it_computes(edit, want):
    model = octavo.Sequential(*scales(2.0, 3.0, 5.0))
    x = torch.ones(2, 4)
    assert torch.equal(model(x), 30 * x)
    edit(model)
    assert factors(model) == want
    assert [name for name, _ in model.named_children()] == [str(i) for i in range(len(want))]
    assert torch.equal(model(x), torch.tensor(want).prod() * x)


def test_a_module_that_is_popped_comes_back():
    made = scales(2.0, 3.0)
    assert octavo.Sequential(*made).pop(0) is made[0]


def test_a_sum_is_a_new_sequential():
    a, b = octavo.Sequential(*scales(2.0)), octavo.Sequential(*scales(3.0))
    both = a + b
    assert type(both) is octavo.Sequential
    assert factors(both) == [2.0, 3.0]
    assert factors(a) == [2.0] and factors(b) == [3.0]


@pytest.mark.parametrize("wrong", [3, "linear", torch.ones(2), lambda x: x], ids=["int", "str", "tensor", "function"])
def test_what_is_no_module_is_a_type_error(wrong):
    with pytest.raises(TypeError):
        octavo.Sequential(wrong)
    with pytest.raises(TypeError):
        octavo.Sequential().append(wrong)


# -- groups ------------------------------------------------------------------------------------------------------------


def kinds(model):
    """How many operations each group has; 0 for an ordinary module."""
    return [len(g.ops) if isinstance(g, ops.OperationFuser) else 0 for g in model.groups]


def test_operations_between_ordinary_modules_form_groups():
    plain = [nn.Identity(), nn.Identity(), nn.Identity()]
    ours = [ops.Identity() for _ in range(6)]
    model = octavo.Sequential(*ours[:2], *plain[:2], ours[2], plain[2], *ours[3:])
    assert kinds(model) == [2, 0, 0, 1, 0, 3]
    assert model.groups[1] is plain[0] and model.groups[4] is plain[2]
    assert list(model.groups[5].ops) == ours[3:]


def test_groups_follow_edits():
    model = octavo.Sequential(ops.Identity(), nn.Identity(), ops.Identity())
    assert kinds(model) == [1, 0, 1]
    del model[1]
    assert kinds(model) == [2]
    model.append(nn.ReLU())
    assert kinds(model) == [2, 0]
    model[0] = nn.Identity()
    assert kinds(model) == [0, 1, 0]


def test_linear_and_grouped_linear_are_operations():
    model = octavo.Sequential(octavo.Linear(4, 4), octavo.GroupedLinear(2, 4, 4), ops.SwiGLU(), nn.Linear(2, 2))
    assert kinds(model) == [3, 0]


def test_nested_sequentials_are_flattened_into_groups():
    inner = octavo.Sequential(ops.RMSNorm(H), octavo.Sequential(octavo.Linear(H, 2 * FFN)))
    model = octavo.Sequential(inner, ops.SwiGLU(), octavo.Sequential(octavo.Linear(FFN, H)))
    assert kinds(model) == [4]
    assert len(model) == 3 and model[0] is inner


def test_a_nested_sequential_of_both_kinds_is_flattened_too():
    inner = octavo.Sequential(ops.Identity(), nn.Identity(), ops.Identity())
    assert kinds(octavo.Sequential(ops.Identity(), inner, ops.Identity())) == [2, 0, 2]


def test_an_edit_of_a_nested_sequential_is_seen_outside():
    inner = octavo.Sequential(*scales(2.0))
    model = octavo.Sequential(inner, *scales(3.0))
    x = torch.ones(2, 4)
    assert torch.equal(model(x), 6 * x)
    inner.append(ops.ConstantScale(5.0))
    assert torch.equal(model(x), 30 * x)
    assert kinds(model) == [3]


def test_a_torch_sequential_inside_stays_an_ordinary_module():
    inner = nn.Sequential(ops.Identity(), ops.Identity())
    assert kinds(octavo.Sequential(ops.Identity(), inner)) == [1, 0]


@quantized
def test_nested_is_flat_bit_for_bit_and_fuses_across_the_boundary(recipe):
    flat, (x, dy) = mlp(recipe), batch()
    parts = copy.deepcopy(list(flat))
    nested = octavo.Sequential(octavo.Sequential(parts[0]), octavo.Sequential(*parts[1:3]), parts[3])
    explained = nested.explain(x.requires_grad_()), flat.explain(x)
    assert explained[0].fired == explained[1].fired != ()
    assert_equal(step(nested, x.detach(), dy), step(flat, x.detach(), dy))


def test_an_ordinary_module_in_between_ends_a_run():
    linear = octavo.Linear(H, H, recipe="fp8-current")
    x = batch()[0].requires_grad_()
    assert "norm-linear" in octavo.Sequential(ops.RMSNorm(H), linear).explain(x).fired
    assert "norm-linear" not in octavo.Sequential(ops.RMSNorm(H), nn.Identity(), linear).explain(x).fired


@every
def test_a_sequential_is_the_modules_called_one_after_the_other(recipe):
    model, (x, dy) = mlp(recipe, bias=True), batch(2, 3, 4)
    plain = nn.Sequential(*copy.deepcopy(list(model)))
    for seed in range(2):
        assert_equal(step(model, x + seed, dy), step(plain, x + seed, dy), f"step {seed}")
        octavo.step(model), octavo.step(plain)


# -- extra inputs and outputs by position ------------------------------------------------------------------------------


def four_in_six_out():
    """Over three groups: extra inputs a, b, c, d."""
    return octavo.Sequential(
        ops.MakeExtraOutput(),  # x
        ops.ConstantScale(2.0),
        ops.MakeExtraOutput(),  # 2x
        ops.AddExtraInput(),  # 2x + a
        ops.MakeExtraOutput(),
        nn.Hardtanh(-1e6, 1e6),
        ops.AddExtraInput(),  # 2x + a + b
        ops.MakeExtraOutput(),
        nn.Identity(),
        ops.AddExtraInput(),  # 2x + a + b + c
        ops.MakeExtraOutput(),
        ops.ConstantScale(-3.0),
        ops.AddExtraInput(),  # d - 3 (2x + a + b + c)
        ops.MakeExtraOutput(),
    )


def test_extra_inputs_and_outputs_go_by_position_over_all_groups():
    model = four_in_six_out()
    x, a, b, c, d = (whole(M, H, seed=i).requires_grad_() for i in range(5))
    y, *extra = model(x, a, b, c, d)
    sums = [x, 2 * x, 2 * x + a, 2 * x + a + b, 2 * x + a + b + c]
    last = d - 3 * sums[-1]
    assert len(extra) == 6
    for found, want in zip((*extra, y), (*sums, last, last), strict=True):
        assert torch.equal(found, want)


def test_gradients_of_extra_inputs_and_outputs_over_all_groups():
    model = four_in_six_out()
    x, a, b, c, d = (whole(M, H, seed=i) for i in range(5))
    dys = [whole(M, H, seed=10 + i) for i in range(7)]
    dy, d0, d1, d2, d3, d4, d5 = dys
    last = dy + d5
    c_sum = d4 - 3 * last
    b_sum = d3 + c_sum
    a_sum = d2 + b_sum
    want = [d0 + 2 * (d1 + a_sum), a_sum, b_sum, c_sum, last]
    assert_equal(step(model, (x, a, b, c, d), dys)[7:], want)


@pytest.mark.parametrize("missing", range(1, 7))
def test_an_output_without_a_gradient_has_a_gradient_of_zero(missing):
    model = four_in_six_out()
    inputs = [whole(M, H, seed=i) for i in range(5)]
    dys = [whole(M, H, seed=10 + i) for i in range(7)]
    zeroed = [torch.zeros(M, H) if i == missing else dy for i, dy in enumerate(dys)]
    left_out = [None if i == missing else dy for i, dy in enumerate(dys)]
    assert_equal(step(model, inputs, left_out), step(model, inputs, zeroed))


def test_an_addition_in_place_gives_back_the_extra_tensor():
    x, extra = whole(M, H), whole(M, H, seed=1)
    want, address = x + extra, extra.data_ptr()
    y = octavo.Sequential(ops.ConstantScale(1.0), ops.AddExtraInput(in_place=True))(x, extra)
    assert y.data_ptr() == address
    assert torch.equal(extra, want)


def test_an_extra_output_is_no_copy():
    y, extra = octavo.Sequential(ops.ConstantScale(2.0), ops.MakeExtraOutput())(whole(M, H))
    assert y.data_ptr() == extra.data_ptr()


def test_out_of_place_nothing_of_the_callers_is_written():
    x, extra = whole(M, H), whole(M, H, seed=1)
    kept = x.clone(), extra.clone()
    y, made = octavo.Sequential(ops.MakeExtraOutput(), ops.AddExtraInput(), ops.Bias(H))(x, extra)
    assert torch.equal(x, kept[0]) and torch.equal(extra, kept[1])
    assert torch.equal(made, x) and torch.equal(y, x + extra)
    assert y.data_ptr() not in (x.data_ptr(), extra.data_ptr())


@pytest.mark.parametrize("given", [0, 1, 3, 5])
def test_a_wrong_number_of_extra_inputs_is_a_value_error_with_both_numbers(given):
    model = octavo.Sequential(ops.AddExtraInput(), nn.Identity(), ops.AddExtraInput())
    x = whole(M, H)
    with pytest.raises(ValueError, match=rf"(?s)(2\D.*{given}|{given}\D.*2)"):
        model(x, *[x] * given)


def test_scaled_activations_and_grouped_layers_take_extra_inputs():
    model = fill(octavo.Sequential(octavo.GroupedLinear(2, H, 2 * FFN), ops.ScaledSwiGLU()))
    x, splits, probs = batch()[0], torch.tensor([10, 14]), torch.rand(M)
    layer, act = model
    assert_same(model(x, splits, probs).detach(), act(layer(x, splits), probs).detach())


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
def test_a_scaled_bias_takes_its_scales_after_the_sizes(recipe):
    layer = octavo.GroupedLinear(2, H, H, scale_bias=True, recipe=recipe)
    model = fill(octavo.Sequential(layer))
    (x, dy), splits, probs = batch(), torch.tensor([10, 14]), torch.rand(M)
    twin = copy.deepcopy(layer)
    want = step(twin, (x, probs), dy, call=lambda x, p: twin(x, splits, scales=p))
    found = step(model, (x, splits, probs), dy)
    assert found.pop(2) is None
    assert_equal(found, want)


# -- modes -------------------------------------------------------------------------------------------------------------


@every
def test_without_gradients_y_is_the_same_and_has_no_graph(recipe):
    model, (x, _) = mlp(recipe, bias=True), batch()
    want = model(x).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = model(x)
        assert not y.requires_grad
        assert_same(y, want)


@recipes(["bf16", "fp8-delayed", "nvfp4"])
def test_training_is_the_same_after_calls_without_gradients(recipe):
    model, (x, dy) = mlp(recipe), batch()
    twin = copy.deepcopy(model)
    for seed in range(3):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                model(x + seed)
        assert_equal(step(model, x + seed, dy), step(twin, x + seed, dy), f"step {seed}")
        octavo.step(model), octavo.step(twin)


def test_dropout_follows_train_and_eval():
    model = octavo.Sequential(ops.ConstantScale(1.0), ops.Dropout(0.5))
    x = torch.ones(32, 32)
    assert (model(x) == 0).any()
    assert torch.equal(model.eval()(x), x)
    assert (model.train()(x) == 0).any()


# -- between calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
def test_an_edit_after_a_step_is_planned_anew(recipe):
    model, (x, dy) = mlp(recipe), batch()
    step(model, x, dy)
    model[2] = ops.GEGLU()
    model.append(ops.Bias(H))
    assert_unfused(model, x, dy)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
def test_a_parameter_that_is_replaced_is_the_one_that_is_used(recipe):
    model, (x, dy) = mlp(recipe), batch()
    step(model, x, dy)
    old = [model[1].weight, model[0].weight]
    model.zero_grad()
    model[1].weight, model[0].weight = (nn.Parameter(w.detach() * 2) for w in old)
    assert_unfused(model, x, dy)
    assert all(p.grad is None for p in old)
    assert model[1].weight.grad is not None and model[0].weight.grad is not None


def test_a_parameter_frozen_after_a_step_gets_no_gradient():
    model, (x, dy) = mlp("fp8-current", bias=True), batch()
    want = step(model, x, dy)
    for frozen in ("1.weight", "0.weight", "3.bias"):
        model.get_parameter(frozen).requires_grad_(False)
    found = dict(zip(("y", "x", *(n for n, _ in model.named_parameters())), step(model, x, dy), strict=True))
    for (name, value), before in zip(found.items(), want, strict=True):
        assert_same(value, None if name in ("1.weight", "0.weight", "3.bias") else before, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_cast_after_a_step_is_followed(dtype):
    model, (x, dy) = mlp("fp8-current"), batch()
    step(model, x, dy)
    model.to(dtype)
    found = step(model, x.to(dtype), dy.to(dtype))
    assert {t.dtype for t in found} == {dtype}
    assert_equal(found, step(unfused(model), x.to(dtype), dy.to(dtype)))


def test_a_deep_copy_shares_nothing():
    model, (x, dy) = mlp("fp8-delayed"), batch()
    step(model, x, dy)
    twin = copy.deepcopy(model)
    want = step(copy.deepcopy(model), x, dy)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert_equal(step(twin, x, dy), want)


# -- state dicts -------------------------------------------------------------------------------------------------------


def nested_model(linear=octavo.Linear, norm=ops.RMSNorm, container=octavo.Sequential):
    inner = container(norm(H), linear(H, FFN))
    return container(inner, nn.GELU(), linear(FFN, H, bias=False))


def test_keys_are_the_names_of_parameters():
    model = nested_model()
    model(batch()[0]).sum().backward()
    names = [name for name, _ in model.named_parameters()]
    assert list(model.state_dict()) == names == ["0.0.weight", "0.1.weight", "0.1.bias", "2.weight"]


@recipes(["bf16", "fp8-delayed", "nvfp4"])
def test_nothing_that_a_recipe_keeps_is_in_the_state_dict(recipe):
    model, (x, dy) = mlp(recipe), batch()
    step(model, x, dy)
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]


def test_stock_checkpoints_load_and_ours_load_into_stock_models():
    stock = fill(nested_model(nn.Linear, nn.RMSNorm, nn.Sequential))
    model = nested_model()
    model.load_state_dict(stock.state_dict(), strict=True)
    x = batch()[0]
    torch.testing.assert_close(model(x), stock(x), rtol=1e-4, atol=1e-4)
    fill(model, seed=7)
    stock.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(model(x), stock(x), rtol=1e-4, atol=1e-4)


def test_a_plain_linears_checkpoint_loads_into_an_operation_of_a_sequential():
    plain, model = nn.Linear(H, FFN), octavo.Sequential(ops.RMSNorm(H), octavo.Linear(H, FFN, recipe="fp8-current"))
    model[1].load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(model.state_dict()["1.weight"], plain.weight)


def test_what_recipes_remember_is_found_by_path():
    model, (x, dy) = nested_model(), batch()
    octavo.convert(model, "fp8-delayed")
    step(model, x, dy)
    assert {key.split(".scaling")[0] for key in octavo.state_dict(model)} == {"0.1", "2"}


def test_none_is_no_module():
    model = octavo.Sequential(ops.GELU(), octavo.Linear(H, H))
    for put in (
        lambda: octavo.Sequential(ops.GELU(), None),
        lambda: octavo.Sequential({"first": None}),
        lambda: model.append(None),
        lambda: model.insert(0, None),
        lambda: setattr(model, "0", None),
        lambda: model.__setitem__(1, None),
    ):
        with pytest.raises(TypeError, match=r"is None\. Leave it out"):
            put()
    assert [type(m) for m in model] == [ops.GELU, octavo.Linear]
    assert model(torch.randn(2, H)).shape == (2, H)
