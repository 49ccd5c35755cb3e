"""op_kwargs: keywords for single operations of a Sequential, and the caller's buffers through them."""

import copy

import pytest
import torch
from torch import nn

import octavo
from octavo import ops
from tests.support.custom_operations import Powered
from tests.support.linear_oracle import assert_same, spiky
from tests.support.sequentials import H, fill, mlp, recipes
from tests.support.steps import assert_equal, compiled, step

G, K, N, ROWS = 3, 32, 40, 40
SPLITS = torch.tensor([20, 0, 13])
USED = 33
SENTINEL = 7.0
OUT, DGRAD = ops.OUTPUT_BUFFER_KEY, ops.GRAD_INPUT_BUFFER_KEY


def powered(seed=1):
    return fill(octavo.Sequential(ops.Identity(), Powered(H), ops.ConstantScale(2.0)), seed)


def experts(recipe="bf16", **settings):
    """Two grouped layers, one after the other."""
    layers = [octavo.GroupedLinear(G, *sizes, recipe=recipe, **settings) for sizes in ((K, N), (N, K))]
    return fill(octavo.Sequential(*layers))


def tokens(seed=0, width=K):
    x = spiky(ROWS, width, seed=seed, size=8.0)
    x[USED:] = float("nan")
    return x


def buffers(width=K, room=8):
    """A buffer inside a larger allocation of sentinels, and that allocation."""
    whole = torch.full((ROWS + 2 * room, width), SENTINEL)
    return whole[room : room + ROWS], whole


def assert_sentinels(whole, room=8):
    around = torch.cat((whole[:room], whole[room + USED :]))
    assert (around == SENTINEL).all()


# -- who is meant ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["module", 1, -2], ids=str)
def test_a_keyword_reaches_an_operation_by_module_or_index(key):
    model, x = powered(), spiky(4, H)
    factor = torch.tensor(3.0)
    key = model[1] if key == "module" else key
    want = 2 * model[1].formula(x, model[1].gain, factor)
    torch.testing.assert_close(model(x, op_kwargs={key: {"factor": factor}}), want)
    torch.testing.assert_close(model(x), want / 3)


def test_a_keyword_reaches_the_only_operation_of_a_composite_that_takes_it():
    inner = powered()
    model, x, factor = octavo.Sequential(ops.ConstantScale(0.5), inner), spiky(4, H), torch.tensor(3.0)
    found = model(x, op_kwargs={inner: {"factor": factor}})
    assert_same(found.detach(), model(x, op_kwargs={inner[1]: {"factor": factor}}).detach())
    torch.testing.assert_close(found, model(x) * 3)


def test_a_composite_is_found_by_its_index_too():
    model, x, factor = octavo.Sequential(ops.ConstantScale(0.5), powered()), spiky(4, H), torch.tensor(3.0)
    assert_same(
        model(x, op_kwargs={-1: {"factor": factor}}).detach(), model(x, op_kwargs={1: {"factor": factor}}).detach()
    )
    torch.testing.assert_close(model(x, op_kwargs={1: {"factor": factor}}), model(x) * 3)


def test_a_composite_with_two_that_take_the_keyword_is_refused():
    inner = octavo.Sequential(Powered(H), Powered(H))
    with pytest.raises((ValueError, TypeError), match="factor"):
        octavo.Sequential(inner)(spiky(4, H), op_kwargs={inner: {"factor": torch.tensor(3.0)}})


def test_several_operations_in_several_groups():
    model = octavo.Sequential(Powered(H), nn.Identity(), Powered(H, 3), ops.Identity())
    x = spiky(4, H) * 0.1
    given = {0: {"factor": torch.tensor(3.0)}, model[2]: {"factor": torch.tensor(5.0)}}
    torch.testing.assert_close(model(x, op_kwargs=given), 5 * (3 * x**2) ** 3)


def test_a_keyword_has_a_gradient():
    model, (x, dy) = powered(), (spiky(4, H), spiky(4, H, seed=3))
    factor = torch.tensor(3.0)
    gain = model[1].gain.detach()
    found = step(
        model, (x, factor), dy, call=lambda x, factor: model(x, op_kwargs={1: {"factor": factor}})
    )  # y, dx, dfactor, dgain
    torch.testing.assert_close(found[1], 2 * dy * 3 * gain * 2 * x)
    torch.testing.assert_close(found[2], (2 * dy * gain * x**2).sum())
    torch.testing.assert_close(found[3], (2 * dy * 3 * x**2).sum(0))


def test_the_seed_of_a_dropout():
    model, x = octavo.Sequential(ops.ConstantScale(1.0), ops.Dropout(0.5)), torch.ones(16, H)
    seed = torch.tensor([11, 3])
    found = model(x, op_kwargs={1: {"seed": seed}})
    assert torch.equal(found, ops.Dropout(0.5)(x, seed))
    assert torch.equal(found, model(x, op_kwargs={1: {"seed": seed}}))


@recipes(["fp8-current", "fp8-delayed", "nvfp4"])
def test_the_weight_cache_of_every_linear(recipe):
    model, twin = mlp(recipe), mlp(recipe)
    for i, first in enumerate((True, False, False)):
        x, dy = spiky(24, H, seed=i), spiky(24, H, seed=i + 9)
        given = {j: {"is_first_microbatch": first} for j in (1, 3)}
        assert_equal(step(model, x, dy, op_kwargs=given), step(twin, x, dy), f"microbatch {i}")
    octavo.step(model), octavo.step(twin)
    with torch.no_grad():
        model[1].weight.add_(0.5)
    with pytest.raises(ValueError, match="weight"):  # the cache is older than the weight
        model(x, op_kwargs={1: {"is_first_microbatch": False}})


def test_none_and_empty_are_no_keywords():
    model, x = powered(), spiky(4, H)
    want = model(x).detach()
    for given in (None, {}, {1: {}}, {0: {}}):
        assert_same(model(x, op_kwargs=given).detach(), want)


# -- who is not --------------------------------------------------------------------------------------------------------


def test_a_module_that_is_no_operation_is_a_value_error_that_names_it():
    plain = nn.Linear(H, H)
    model = octavo.Sequential(ops.Identity(), plain)
    for key in (plain, 1, -1):
        with pytest.raises(ValueError, match="Linear"):
            model(spiky(4, H), op_kwargs={key: {"factor": torch.tensor(1.0)}})


def test_a_module_of_another_container_is_a_value_error_that_names_it():
    with pytest.raises(ValueError, match="Powered"):
        powered()(spiky(4, H), op_kwargs={Powered(H): {"factor": torch.tensor(1.0)}})


@pytest.mark.parametrize("index", [3, -4, 100])
def test_an_index_out_of_range_is_an_index_error(index):
    with pytest.raises(IndexError):
        powered()(spiky(4, H), op_kwargs={index: {"factor": torch.tensor(1.0)}})


@pytest.mark.parametrize(
    ("index", "keyword", "says"),
    [
        (1, "faktor", r"(?s)Powered.*factor|factor.*Powered"),
        (0, "factor", "Identity"),
        (2, OUT, "ConstantScale"),
        (1, "x", "Powered"),
        (1, "gain", "Powered"),
    ],
)
def test_a_keyword_that_the_operation_does_not_take_is_a_type_error_that_names_both(index, keyword, says):
    with pytest.raises(TypeError, match=says) as refused:
        powered()(spiky(4, H), op_kwargs={index: {keyword: torch.tensor(1.0)}})
    assert keyword in str(refused.value)


@pytest.mark.parametrize("keyword", [OUT, DGRAD, "scales", "m_splits"])
def test_a_linear_does_not_take_what_a_grouped_one_takes(keyword):
    model = octavo.Sequential(octavo.Linear(K, N))
    with pytest.raises(TypeError, match="is_first_microbatch"):
        model(spiky(4, K), op_kwargs={0: {keyword: torch.empty(4, N)}})


@pytest.mark.parametrize("given", [[("factor", 1)], "factor", 3, {1: 3}, {1: [("factor", 1)]}, {1.0: {}}, {"1": {}}])
def test_what_is_no_mapping_of_mappings_is_refused(given):
    with pytest.raises((TypeError, ValueError)):
        powered()(spiky(4, H), op_kwargs=given)


@pytest.mark.parametrize("value", ["3", [1.0], object()], ids=["str", "list", "object"])
def test_a_value_that_neither_plan_nor_operation_takes_is_a_type_error(value):
    with pytest.raises(TypeError, match="Powered"):
        powered()(spiky(4, H), op_kwargs={1: {"factor": value}})


def test_a_refused_call_leaves_the_next_one_alone():
    model, x = powered(), spiky(4, H)
    want = model(x).detach()
    with pytest.raises(TypeError):
        model(x, op_kwargs={1: {"faktor": torch.tensor(1.0)}})
    assert_same(model(x).detach(), want)


# -- buffers -----------------------------------------------------------------------------------------------------------


def test_the_keys_are_what_grouped_linear_calls_them():
    assert (OUT, DGRAD) == ("out", "dgrad_out")


@recipes(["bf16", "fp8-current", "fp8-delayed", "nvfp4"])
@pytest.mark.parametrize("given", [(OUT,), (DGRAD,), (OUT, DGRAD)], ids=" and ".join)
def test_buffers_of_a_chain_are_written_in_place_step_after_step(recipe, given):
    model, twin = experts(recipe), experts(recipe)
    (out, out_room), (dgrad, dgrad_room) = buffers(), buffers()
    kwargs = ({-1: {OUT: out}} if OUT in given else {}) | ({model[0]: {DGRAD: dgrad}} if DGRAD in given else {})
    for seed in range(3):
        x, dy = tokens(seed), tokens(seed + 20)
        want = step(twin, (x, SPLITS, SPLITS), dy)
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        y = model(leaf, SPLITS, SPLITS, op_kwargs=kwargs)
        assert (y.data_ptr() == out.data_ptr()) == (OUT in given)
        assert_same(y.detach()[:USED], want[0][:USED], "y")
        y.backward(dy)
        assert_same(leaf.grad[:USED], want[1][:USED], "dx")
        assert_equal([p.grad for p in model.parameters()], want[4:], f"step {seed}")
        if OUT in given:
            assert_same(out[:USED], want[0][:USED], "out")
            assert_sentinels(out_room)
        if DGRAD in given:
            assert_same(dgrad[:USED], want[1][:USED], "dgrad_out")
            assert_sentinels(dgrad_room)
        octavo.step(model), octavo.step(twin)


def test_a_buffer_without_gradients():
    model, x = experts("fp8-current"), tokens()
    want = model(x, SPLITS, SPLITS).detach()
    out, room = buffers()
    with torch.no_grad():
        y = model(x, SPLITS, SPLITS, op_kwargs={1: {OUT: out}})
    assert y.data_ptr() == out.data_ptr()
    assert_same(out[:USED], want[:USED])
    assert_sentinels(room)


def test_a_buffer_of_an_operation_in_the_middle_of_a_run():
    layer = octavo.GroupedLinear(G, K, 2 * N)
    model = fill(octavo.Sequential(layer, ops.SwiGLU(), octavo.GroupedLinear(G, N, K)))
    x = tokens()
    want = model(x, SPLITS, SPLITS).detach()
    out, room = buffers(2 * N)
    y = model(x, SPLITS, SPLITS, op_kwargs={layer: {OUT: out}})
    assert_same(y.detach()[:USED], want[:USED])
    assert_same(out[:USED], layer(x, SPLITS).detach()[:USED])
    assert_sentinels(room)


# -- buffers that do not fit -------------------------------------------------------------------------------------------


WRONG = {
    "rows": lambda: torch.empty(ROWS + 1, K),
    "columns": lambda: torch.empty(ROWS, K + 1),
    "dtype": lambda: torch.empty(ROWS, K, dtype=torch.bfloat16),
    "device": lambda: torch.empty(ROWS, K, device="meta"),
    "strides": lambda: torch.empty(K, ROWS).T,
    "requires_grad": lambda: torch.empty(ROWS, K, requires_grad=True),
}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize(("key", "index"), [(OUT, -1), (DGRAD, 0)], ids=[OUT, DGRAD])
def test_a_buffer_that_does_not_fit_is_a_value_error(make, key, index):
    model = experts("fp8-current")
    with pytest.raises(ValueError, match=key):
        model(tokens().requires_grad_(), SPLITS, SPLITS, op_kwargs={index: {key: make()}})


@pytest.mark.parametrize("value", ["buffer", 3, [torch.empty(ROWS, K)]], ids=["str", "int", "list"])
def test_a_buffer_that_is_no_tensor_is_a_type_error(value):
    with pytest.raises(TypeError, match=OUT):
        experts()(tokens(), SPLITS, SPLITS, op_kwargs={1: {OUT: value}})


def test_a_gradient_buffer_where_nothing_wants_that_gradient_is_a_value_error():
    with pytest.raises(ValueError, match=DGRAD):
        experts()(tokens(), SPLITS, SPLITS, op_kwargs={0: {DGRAD: torch.empty(ROWS, K)}})


# -- one operation twice -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("index", "want"), [(0, 81.0), (2, 3.0), (-1, 3.0)])
def test_an_operation_that_is_there_twice_is_found_by_its_index(index, want):
    op = Powered(H)
    model, x = octavo.Sequential(op, ops.Identity(), op), torch.ones(4, H)
    factor = torch.tensor(want if index != 0 else 9.0)
    found = model(x, op_kwargs={index: {"factor": factor}})
    assert torch.equal(found, torch.full((4, H), want))


def test_an_operation_that_is_there_twice_is_not_found_by_itself():
    op = Powered(H)
    with pytest.raises(ValueError, match="index"):
        octavo.Sequential(op, ops.Identity(), op)(torch.ones(4, H), op_kwargs={op: {"factor": torch.tensor(1.0)}})


def test_an_operation_that_is_there_twice_has_the_sum_of_both_gradients():
    op = Powered(H)
    model, x, dy = octavo.Sequential(op, op), torch.full((4, H), 2.0), torch.ones(4, H)
    # y = g (g x²)² = g³ x⁴
    _, dx, dgain = step(model, x, dy)
    assert torch.equal(dx, torch.full((4, H), 32.0))
    assert torch.equal(dgain, torch.full((H,), 4 * 3 * 16.0))


def test_an_operation_in_two_places_takes_the_keywords_of_each():
    op = Powered(H)
    model, x = octavo.Sequential(op, op), torch.ones(4, H)
    found = model(x, op_kwargs={0: {"factor": torch.tensor(2.0)}, 1: {"factor": torch.tensor(5.0)}})
    assert torch.equal(found, torch.full((4, H), 20.0))


# -- under a compiler --------------------------------------------------------------------------------------------------


def test_a_graph_takes_keywords_of_an_operation():
    model = powered()
    twin, call = copy.deepcopy(model), compiled(model)
    for seed in range(2):
        x, dy, factor = spiky(4, H, seed=seed), spiky(4, H, seed=9), torch.tensor(2.0 + seed)
        found = step(model, (x, factor), dy, call=lambda x, f: call(x, op_kwargs={1: {"factor": f}}))
        want = step(twin, (x, factor), dy, call=lambda x, f: twin(x, op_kwargs={1: {"factor": f}}))
        assert_equal(found, want)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
def test_a_graph_takes_buffers_of_an_operation(recipe):
    model, (out, room), (dgrad, _) = experts(recipe), buffers(), buffers()
    twin = copy.deepcopy(model)
    given = {-1: {OUT: out}, 0: {DGRAD: dgrad}}
    call = compiled(lambda x: model(x, SPLITS, SPLITS, op_kwargs=given))
    for seed in range(2):
        x, dy = tokens(seed), tokens(seed + 20)
        found, want = step(model, x, dy, call=call), step(twin, x, dy, call=lambda x: twin(x, SPLITS, SPLITS))
        assert_same(found[0][:USED], want[0][:USED], "y")
        assert_same(found[1][:USED], want[1][:USED], "dx")
        assert_equal(found[2:], want[2:])
        assert_same(out[:USED], want[0][:USED], "out")
        assert_same(dgrad[:USED], want[1][:USED], "dgrad_out")
        assert_sentinels(room)


def test_a_compiler_too_refuses_an_unknown_keyword():
    model = powered()
    with pytest.raises(Exception, match="faktor"):
        compiled(model)(spiky(4, H), op_kwargs={1: {"faktor": torch.tensor(1.0)}})
