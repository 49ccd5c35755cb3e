"""Dispatchers of octavo.MoE: the contract, buffers that are handed over, experts of other processes, overflow."""

import copy
import warnings

import pytest
import torch
from torch import nn

import octavo
from octavo import moe
from octavo.errors import UnsupportedConfig, UnsupportedDtype, UnsupportedShape
from tests.support.linear_oracle import assert_same
from tests.support.mixtures import D, E, K, T, batch, mixture, step
from tests.support.recipe_traits import fused_error
from tests.support.steps import assert_equal, compiled, relative_error

WARNING = "dropped up to 12 assignments of tokens in one forward"


class Handed:
    """A dispatcher with memory of its own for y and for dx, which records what combine got."""

    def __init__(self, dgrad=True):
        self.out = torch.full((T * K, D), float("nan"))
        self.dgrad_out = torch.full((T * K, D), float("nan")) if dgrad else None
        self.combined = None

    def dispatch(self, x, index, weights, num_experts):
        rows, permutation = moe.permute(x, index, num_experts)
        state = (permutation, weights)
        return moe.Dispatched(rows, permutation.sizes, state, out=self.out, dgrad_out=self.dgrad_out)

    def combine(self, rows, dispatched):
        self.combined = rows
        return moe.unpermute(rows, *dispatched.state)


class Part:
    """A dispatcher of the experts from `first` on: assignments of other experts are another process's."""

    def __init__(self, first, number):
        self.first, self.number = first, number

    def dispatch(self, x, index, weights, num_experts):
        rows, permutation = moe.permute(x, torch.where(index >= 0, index - self.first, -1), self.number)
        return moe.Dispatched(rows, permutation.sizes, (permutation, weights))

    def combine(self, rows, dispatched):
        return moe.unpermute(rows, *dispatched.state)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "fp8-block", "nvfp4"])
def test_a_dispatcher_gives_what_the_experts_alone_give(recipe):
    """y to the bit; gradients differ as those of operations one by one do."""
    model, twin = mixture(recipe, dispatcher=moe.LocalDispatch(), aux_loss_coef=0.1), mixture(recipe, aux_loss_coef=0.1)
    assert model.state_dict().keys() == twin.state_dict().keys()
    found, want = step(model, *batch()), step(twin, *batch())
    assert_equal(found[:3], want[:3])
    for a, b in zip(found[3:], want[3:], strict=True):
        assert relative_error(a, b) < fused_error(recipe)
    assert model.overflow() == 0


def test_buffers_are_handed_over():
    dispatcher = Handed()
    model, twin = mixture(dispatcher=dispatcher), mixture(dispatcher=moe.LocalDispatch())
    found, want = step(model, *batch()), step(twin, *batch())
    assert_equal(found, want)
    assert dispatcher.combined.data_ptr() == dispatcher.out.data_ptr()
    assert dispatcher.dgrad_out.isfinite().all()


@pytest.mark.usefixtures("fresh_compiler")
def test_buffers_are_handed_over_in_a_graph():
    """The gradient of this step goes from dgrad_out to the tokens, and not the NaN that was there."""
    model, twin = mixture(dispatcher=Handed()), mixture(dispatcher=moe.LocalDispatch())
    call = compiled(lambda x: (model(x), model.aux_loss))
    for seed in range(2):
        assert_equal(step(model, *batch(seed), call=call), step(twin, *batch(seed)))
    assert model.dispatcher.dgrad_out.isfinite().all()


def test_two_processes_make_a_whole():
    """Each has half of the experts, and sums of halves are y and the gradients of x and the router."""
    whole, (x, dy) = mixture("bf16", dispatcher=moe.LocalDispatch()), batch()
    want, half, parts = step(whole, x, dy), E // 2, []
    for first in (0, half):
        part = mixture("bf16", dispatcher=Part(first, half), num_local_experts=half)
        state = whole.state_dict()
        for name in ("experts.fc1.weight", "experts.fc2.weight"):
            state[name] = state[name][first : first + half]
        part.load_state_dict(state)
        parts.append(step(part, x, dy))
        assert torch.equal(parts[-1][2], want[2])  # the load is of all experts
    for i in (0, 3, 4):
        torch.testing.assert_close(parts[0][i] + parts[1][i], want[i], rtol=1e-5, atol=1e-4)
    for i in (5, 6):
        assert_same(torch.cat([part[i] for part in parts]), want[i])


def test_slots_without_a_row_are_dropped_and_counted():
    model = mixture("bf16", dispatcher=moe.LocalDispatch(T * K - 12))
    whole, (x, dy) = mixture("bf16"), batch()
    found = step(model, x, dy)
    weights, index = moe.route(whole.router(x), K)
    kept = moe.sort(index, E, capacity=T * K - 12).positions >= 0
    assert (~kept).sum() == 12 and torch.equal(found[2], moe.counts(index, E))
    assert relative_error(found[0], whole.experts(x, torch.where(kept, index, -1), weights)) < 1e-6
    model(x[:10])
    assert model.overflow() == 12  # the most of one forward
    assert model.overflow() == 0


class PerExpert(moe.LocalDispatch):
    """A dispatcher with at most `capacity` rows for each expert, as a user would write it."""

    def dispatch(self, x, index, weights, num_experts):
        chosen = index.flatten()[:, None] == torch.arange(num_experts)
        rank = (chosen.cumsum(0) * chosen).sum(-1).view_as(index)
        kept = torch.where(rank <= self.capacity, index, -1)
        rows, permutation = moe.permute(x, kept, num_experts, capacity=self.capacity * num_experts)
        dropped = (index >= 0).sum() - permutation.sizes.sum()
        return moe.Dispatched(rows, permutation.sizes, (permutation, weights), dropped)


@pytest.mark.parametrize("tokens", [None, 10])
def test_a_dispatcher_of_a_user_counts_dropped_slots_and_no_padding(tokens):
    model, (x, _) = mixture(dispatcher=PerExpert(2)), batch()
    model(x, tokens=tokens)
    assert model.overflow() == (model.load - 2).clamp(min=0).sum() > 0


def test_a_step_warns_of_dropped_slots_once():
    model, (x, _) = nn.Sequential(mixture(dispatcher=moe.LocalDispatch(T * K - 12)), mixture()), batch()
    model(x)
    with pytest.warns(UserWarning, match=f"The MoE at '0' {WARNING}") as warned:
        octavo.step(model)
    assert (
        len(warned) == 1 and "LocalDispatch(capacity=68)" in str(warned[0].message) and warned[0].filename == __file__
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        octavo.step(model)
    assert [model[0].overflow(), model[0].overflow()] == [12, 0]  # a count of its own


def test_memory_for_dx_is_left_alone_where_x_needs_no_gradient():
    dispatcher = Handed()
    model = mixture(dispatcher=dispatcher)
    assert_same(model(batch()[0].detach()), mixture(dispatcher=moe.LocalDispatch())(batch()[0].detach()))
    assert dispatcher.dgrad_out.isnan().all()


def test_storage_in_fp8_needs_the_fused_experts():
    with pytest.raises(UnsupportedConfig, match="a dispatcher takes the place"):
        mixture(dispatcher=moe.LocalDispatch(), fc1_output_storage="fp8")


def test_an_attached_optimizer_warns_too():
    model, (x, _) = mixture(dispatcher=moe.LocalDispatch(T * K - 12)), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with octavo.attach(model, optimizer):
        model(x).sum().backward()
        with pytest.warns(UserWarning, match=f"This MoE {WARNING}"):
            optimizer.step()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_has_the_bits_of_eager():
    model, twin = (mixture(dispatcher=moe.LocalDispatch(T * K - 12), aux_loss_coef=0.1) for _ in range(2))
    call = compiled(lambda x: (model(x), model.aux_loss))
    for seed in range(2):
        assert_equal(step(model, *batch(seed), call=call), step(twin, *batch(seed)))
    assert model.overflow() == twin.overflow() == 12


def test_a_dispatcher_of_fewer_experts_than_sizes_is_refused():
    model = mixture(dispatcher=Part(0, E), num_local_experts=E // 2)
    with pytest.raises(UnsupportedShape, match=r"Part.dispatch returns sizes, .* the 4 experts .* got \(8,\)"):
        model(batch()[0])


def test_a_copy_counts_for_itself():
    model, (x, _) = mixture(dispatcher=moe.LocalDispatch(T * K - 12)), batch()
    other = copy.deepcopy(model)
    model(x)
    assert (other.overflow(), model.overflow()) == (0, 12)
    assert "dropped" not in model.state_dict()


class Wrong(moe.LocalDispatch):
    """A dispatcher that breaks the contract."""

    def __init__(self, send=lambda sent: sent, give=lambda y: y):
        super().__init__()
        self.send, self.give = send, give

    def dispatch(self, *given):
        return self.send(super().dispatch(*given))

    def combine(self, rows, dispatched):
        return self.give(super().combine(rows, dispatched))


BROKEN = {
    "a tuple": (Wrong(send=tuple), "Wrong.dispatch returns an octavo.moe.Dispatched, got tuple"),
    "dropped on the host": (Wrong(send=lambda sent: sent._replace(dropped=3)), "dropped assignments as .* got int"),
    "dropped in float": (
        Wrong(send=lambda sent: sent._replace(dropped=torch.tensor(3.0))), r"dropped assignments .* torch.float32 \(\)",
    ),
    "no y": (Wrong(give=lambda y: None), r"Wrong.combine returns y .* \(40, 48\), got NoneType"),
    "y in another dtype": (
        Wrong(give=lambda y: y.bfloat16()), r"Wrong.combine returns y .* rows, torch.float32, got torch.bfloat16",
    ),
    "rows instead of y": (Wrong(give=lambda y: y.repeat(2, 1)), r"Wrong.combine returns y .* got \(80, 48\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_contract_is_told(case):
    dispatcher, message = BROKEN[case]
    with pytest.raises((UnsupportedDtype, UnsupportedShape), match=message):
        mixture(dispatcher=dispatcher)(batch()[0])


@pytest.mark.parametrize(
    ("dispatcher", "message"),
    [
        (object(), "this object has no dispatch and no combine"),
        (moe.LocalDispatch, r"got the class LocalDispatch. Pass LocalDispatch\(...\)"),
    ],
)
def test_what_is_no_dispatcher_is_refused_at_once(dispatcher, message):
    with pytest.raises(UnsupportedConfig, match=message):
        mixture(dispatcher=dispatcher)


@pytest.mark.parametrize("capacity", [-1, 2.5, "8", True])
def test_a_capacity_that_is_no_number_of_rows_is_refused_at_once(capacity):
    with pytest.raises(UnsupportedConfig, match=f"capacity is a number of rows, from 0 up, got {capacity!r}"):
        moe.LocalDispatch(capacity)
