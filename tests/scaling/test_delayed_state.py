"""Delayed scaling: traces of amaxes against a small oracle in plain Python, and the steps that must leave no mark."""

import math
from collections import deque

import ml_dtypes
import numpy as np
import pytest
import torch

import octavo.quant as Q
from octavo.errors import Unsupported, UnsupportedConfig
from octavo.formats import E2M1, E4M3, E5M2
from octavo.scaling.delayed_state import update_all

INF, NAN = math.inf, math.nan
F = np.float32
FLT_MAX = float(np.finfo(F).max)
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
HYBRID = (E4M3, E4M3, E5M2)  # x, w, dy


class Slot:
    """One quantizer's memory, as the specification words it."""

    def __init__(self, length: int, fmt, algorithm: str = "max", margin: int = 0):
        self.window: deque[float] = deque(maxlen=length)
        self.largest, self.algorithm, self.margin = LARGEST[fmt], algorithm, margin
        self.inverse_scale, self.current, self.nonfinite = 1.0, 0.0, 0

    def observe(self, amax: float) -> None:
        if math.isnan(amax) or math.isnan(self.current):
            self.current = NAN
        else:
            self.current = max(self.current, amax)

    def update(self) -> None:
        amax, self.current = self.current, 0.0
        if not math.isfinite(amax):
            self.nonfinite += 1
        elif amax > 0:
            self.window.append(amax)
            a = max(self.window) if self.algorithm == "max" else amax
            with np.errstate(over="ignore"):
                inverse_scale = F(self.largest) / F(a) * F(2.0**-self.margin)
            self.inverse_scale = FLT_MAX if np.isinf(inverse_scale) else float(inverse_scale)


def amax_trace(steps: int, seed: int) -> list[list[float]]:
    """Per step, zero to three amaxes: mostly ordinary, sometimes 0, Inf, NaN or so small that 448 / a overflows. An
    early spike makes "max" remember, then forget, when the window has gone round."""
    rng = np.random.default_rng(seed)
    trace = []
    for step in range(steps):
        count = int(rng.choice([0, 1, 1, 1, 2, 3]))
        amaxes = [float(F(2.0 ** rng.uniform(-20, 10))) for _ in range(count)]
        odd = rng.random()
        if amaxes and odd < 0.2:
            amaxes[-1] = [0.0, INF, NAN, float(F(1e-45)), float(F(2e-38))][int(odd * 25)]
        trace.append([1e6] if step == 1 else amaxes)
    return trace


def assert_matches(state, slot: int, expected: Slot, step: int) -> None:
    assert state.inverse_scale[slot].item() == expected.inverse_scale, step
    assert state.running_amax[slot].item() == 0.0, step
    assert state.nonfinite[slot].item() == expected.nonfinite, step


def assert_window(state, slot: int, expected: Slot) -> None:
    """The ring holds the newest amaxes, and zeros where none has come yet; where it starts is its own business."""
    length = expected.window.maxlen
    held = sorted(state.history[slot].tolist())
    assert held == sorted([0.0] * (length - len(expected.window)) + list(expected.window))


def step_once(state, amaxes: dict[int, float], **settings) -> None:
    for slot, amax in amaxes.items():
        state.observe(slot, torch.full((1, 1), amax))
    state.update(**settings)


def snapshot(state) -> list[torch.Tensor]:
    return [t.clone() for t in (state.history, state.head, state.inverse_scale, state.running_amax, state.nonfinite)]


def assert_unchanged(state, before: list[torch.Tensor]) -> None:
    for now, then in zip(snapshot(state), before, strict=True):
        assert torch.equal(now, then)


# ---------------------------------------------------------------------------------------------------------- traces


def test_a_fresh_state_multiplies_by_one():
    state = Q.DelayedState.create(HYBRID, 16)
    assert state.inverse_scale.tolist() == [1.0] * 3
    assert not state.history.any() and not state.running_amax.any() and not state.nonfinite.any()
    assert state.history.shape == (3, 16)


@pytest.mark.parametrize("margin", [0, 1, -1])
@pytest.mark.parametrize("length", [1, 2, 16, 1024])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_a_trace_follows_the_oracle(algorithm, length, margin):
    steps = max(60, length + length // 2)  # every step that is not empty moves the ring: enough to go round
    state = Q.DelayedState.create(HYBRID, length)
    slots = [Slot(length, fmt, algorithm, margin) for fmt in HYBRID]
    traces = [amax_trace(steps, seed) for seed in range(3)]
    for step in range(steps):
        for i, slot in enumerate(slots):
            for amax in traces[i][step]:
                slot.observe(amax)
                state.observe(i, torch.tensor([[amax]]))
            slot.update()
        state.update(algorithm=algorithm, margin=margin)
        for i, slot in enumerate(slots):
            assert_matches(state, i, slot, step)
    for i, slot in enumerate(slots):
        assert_window(state, i, slot)
        assert len(slot.window) == length  # the trace did fill the window
        assert slot.nonfinite > 0


@pytest.mark.parametrize("length", [1, 2, 16])
def test_the_maximum_is_forgotten_exactly_when_the_window_has_passed_it(length):
    state = Q.DelayedState.create((E4M3,), length)
    step_once(state, {0: 100.0})
    for _ in range(length - 1):
        step_once(state, {0: 1.0})
        assert state.inverse_scale.item() == float(F(4.48))
    step_once(state, {0: 1.0})
    assert state.inverse_scale.item() == 448.0


def test_most_recent_looks_at_nothing_but_the_newest():
    state = Q.DelayedState.create((E4M3,), 4)
    for amax in (100.0, 1.0, 7.0, 0.5):
        step_once(state, {0: amax}, algorithm="most_recent")
        assert state.inverse_scale.item() == float(F(448) / F(amax))


@pytest.mark.parametrize(
    ("fmt", "amax", "margin", "inverse_scale"),
    [
        (E4M3, 448.0, 0, 1.0),
        (E4M3, 7.0, 0, 64.0),
        (E4M3, 7.0, 1, 32.0),
        (E4M3, 7.0, -1, 128.0),
        (E4M3, 7.0, 3, 8.0),
        (E5M2, 7.0, 0, 8192.0),
        (E4M3, 3.0, 0, float(F(448) / F(3))),  # not a power of two: nothing is rounded but the quotient
        (E4M3, FLT_MAX, 0, float(F(448) / F(FLT_MAX))),
        (E4M3, 2.0**-126, 0, FLT_MAX),
        (E4M3, 2.0**-149, 0, FLT_MAX),
        (E4M3, 2.0**-149, 1, FLT_MAX),  # Inf before the margin is still Inf after it
        (E4M3, 1.75 * 2.0**-119, 0, 2.0**127),
        (E4M3, 1.75 * 2.0**-119, -1, FLT_MAX),  # overflows by the margin alone
    ],
)
def test_the_multiplier_is_the_range_over_the_amax_over_the_margin(fmt, amax, margin, inverse_scale):
    state = Q.DelayedState.create((fmt,), 4)
    step_once(state, {0: amax}, margin=margin)
    assert state.inverse_scale.tolist() == [inverse_scale]


def test_observations_of_one_step_accumulate_by_maximum():
    """A module called twice in a step, in either order, counts once, with its larger amax."""
    for amaxes in ((2.0, 7.0, 3.5), (7.0, 2.0, 3.5), (3.5, 2.0, 7.0)):
        state = Q.DelayedState.create((E4M3,), 4)
        for amax in amaxes:
            state.observe(0, torch.tensor([[amax]]))
        assert state.running_amax.item() == 7.0
        assert state.inverse_scale.item() == 1.0  # not before the step ends
        state.update()
        assert state.inverse_scale.item() == 64.0
        assert sorted(state.history[0].tolist()) == [0.0, 0.0, 0.0, 7.0]


def test_slots_do_not_touch_each_other():
    state = Q.DelayedState.create(HYBRID, 4)
    step_once(state, {1: 7.0})
    assert state.inverse_scale.tolist() == [1.0, 64.0, 1.0]
    assert not state.history[0].any() and not state.history[2].any()
    step_once(state, {2: 7.0})
    assert state.inverse_scale.tolist() == [1.0, 64.0, 8192.0]


def test_the_tensors_stay_where_they_are():
    """A captured graph holds their addresses."""
    state = Q.DelayedState.create(HYBRID, 4)
    tensors = (state.history, state.head, state.inverse_scale, state.running_amax, state.nonfinite)
    addresses = [t.data_ptr() for t in tensors]
    for amax in (1.0, 0.0, INF, 2.0, 3.0, 4.0, 5.0):
        step_once(state, {0: amax, 2: amax})
    assert [t.data_ptr() for t in tensors] == addresses
    after = (state.history, state.head, state.inverse_scale, state.running_amax, state.nonfinite)
    assert all(a is b for a, b in zip(tensors, after, strict=True))


# -------------------------------------------------------------------------------------------------- zero is a no-op


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("running_amax", [True, False], ids=["zero-seen", "nothing-seen"])
def test_a_zero_amax_neither_rolls_the_window_nor_moves_the_multiplier(running_amax, algorithm):
    state = Q.DelayedState.create((E4M3,), 2)
    step_once(state, {0: 100.0}, algorithm=algorithm)
    step_once(state, {0: 7.0}, algorithm=algorithm)
    before = snapshot(state)
    for _ in range(5):  # more than the window is long: a roll would push 100 and 7 out
        step_once(state, {0: 0.0} if running_amax else {}, algorithm=algorithm)
        assert_unchanged(state, before)
    step_once(state, {0: 1.0}, algorithm=algorithm)
    assert sorted(state.history[0].tolist()) == [1.0, 7.0]  # 100, the oldest, was the one replaced


def test_a_zero_does_not_apply_a_new_margin_either():
    state = Q.DelayedState.create((E4M3,), 2)
    step_once(state, {0: 7.0})
    step_once(state, {}, margin=3)
    assert state.inverse_scale.item() == 64.0


def test_a_cached_weight_gives_every_microbatch_the_same_bytes():
    """The weight is cast and observed in microbatch 0 only; the updates between must not change what it is cast to."""
    w = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    spec = Q.Tensorwise()
    state = Q.DelayedState.create(HYBRID, 4)
    step_once(state, {1: 3.0})
    first = spec.quantize(w, inverse_scale=state.inverse_scale_for(1, spec, w))
    for microbatch in range(6):
        step_once(state, {0: 1.0 + microbatch, 2: 0.1})
        again = spec.quantize(w, inverse_scale=state.inverse_scale_for(1, spec, w))
        assert torch.equal(again.codes.view(torch.uint8), first.codes.view(torch.uint8))
        assert torch.equal(again.scale, first.scale)


# ----------------------------------------------------------------------------------------------- non-finite steps


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_non_finite_step_is_counted_and_leaves_no_other_mark(bad, algorithm):
    state = Q.DelayedState.create((E4M3,), 4)
    step_once(state, {0: 7.0}, algorithm=algorithm)
    history, head, inverse_scale, _, _ = snapshot(state)
    step_once(state, {0: bad}, algorithm=algorithm)
    assert torch.equal(state.history, history) and torch.equal(state.head, head)
    assert torch.equal(state.inverse_scale, inverse_scale)
    assert state.nonfinite.tolist() == [1]
    assert state.running_amax.item() == 0.0
    # recovery is immediate: upstream keeps Inf for a whole window
    step_once(state, {0: 14.0}, algorithm=algorithm)
    assert state.inverse_scale.item() == 32.0
    assert state.nonfinite.tolist() == [1]


@pytest.mark.parametrize("amaxes", [(NAN, 5.0), (5.0, NAN), (INF, 5.0), (5.0, INF), (NAN, INF), (INF, NAN), (NAN, 0.0)])
def test_one_bad_observation_spoils_its_step(amaxes):
    state = Q.DelayedState.create((E4M3, E4M3), 4)
    step_once(state, {0: 7.0, 1: 7.0})
    for amax in amaxes:
        state.observe(0, torch.tensor([[amax]]))
    state.observe(1, torch.tensor([[14.0]]))
    state.update()
    assert state.nonfinite.tolist() == [1, 0]
    assert state.inverse_scale.tolist() == [64.0, 32.0]
    assert 5.0 not in state.history[0].tolist()


def test_every_bad_step_counts():
    state = Q.DelayedState.create((E4M3,), 2)
    for bad in (INF, NAN, INF):
        step_once(state, {0: bad})
    assert state.nonfinite.tolist() == [3]
    assert state.inverse_scale.tolist() == [1.0]
    assert not state.history.any()


# ------------------------------------------------------------------------------------------------------ cold start


def test_a_cold_slot_multiplies_by_one_by_default():
    state = Q.DelayedState.create((E4M3,), 4)
    x = torch.full((2, 2), 7.0)
    for cold_start in ({}, {"cold_start": "one"}):
        inverse_scale = state.inverse_scale_for(0, Q.Tensorwise(), x, **cold_start)
        assert inverse_scale.tolist() == [1.0]


def test_a_cold_slot_may_take_its_multiplier_from_the_tensor_at_hand():
    state = Q.DelayedState.create(HYBRID, 4)
    before = snapshot(state)
    for spec, amax, expected in (
        (Q.Tensorwise(), 7.0, 64.0),
        (Q.Tensorwise(), 3.0, float(F(448) / F(3))),
        (Q.Tensorwise(fmt=E5M2), 7.0, 8192.0),
        (Q.Tensorwise(pow2=True), 3.0, 128.0),
        (Q.Tensorwise(eps=14.0), 3.0, 32.0),
        (Q.Tensorwise(), 0.0, 1.0),
        (Q.Tensorwise(), 2.0**-126, FLT_MAX),
    ):
        x = torch.zeros(4, 4)
        x[2, 1] = -amax
        assert state.inverse_scale_for(2, spec, x, cold_start="current").tolist() == [expected], amax
    for bad in (INF, -INF, NAN):  # no multiplier fits: all of x becomes NaN
        x[2, 1] = bad
        assert state.inverse_scale_for(2, Q.Tensorwise(), x, cold_start="current").isnan().all()
    assert_unchanged(state, before)  # asking is not observing


def test_a_warm_slot_ignores_the_tensor_at_hand():
    state = Q.DelayedState.create((E4M3, E4M3), 4)
    step_once(state, {0: 7.0})
    x = torch.full((2, 2), 1.0)
    for cold_start in ("one", "current"):
        assert state.inverse_scale_for(0, Q.Tensorwise(), x, cold_start=cold_start).tolist() == [64.0]
    assert state.inverse_scale_for(1, Q.Tensorwise(), x, cold_start="current").tolist() == [448.0]  # still cold


def test_a_slot_stays_cold_until_an_amax_has_entered_its_window():
    state = Q.DelayedState.create((E4M3,), 2)
    x = torch.full((2, 2), 7.0)
    for nothing in (0.0, INF, NAN):
        step_once(state, {0: nothing})
        assert state.inverse_scale_for(0, Q.Tensorwise(), x, cold_start="current").tolist() == [64.0], nothing
    step_once(state, {0: 14.0})
    assert state.inverse_scale_for(0, Q.Tensorwise(), x, cold_start="current").tolist() == [32.0]


def test_a_slot_stays_warm_however_often_its_ring_goes_round():
    """A head that wraps to 0 looks like a fresh one."""
    state = Q.DelayedState.create((E4M3,), 2)
    x = torch.full((2, 2), 1.0)
    for _ in range(9):
        step_once(state, {0: 7.0})
        assert state.inverse_scale_for(0, Q.Tensorwise(), x, cold_start="current").tolist() == [64.0]


def test_cold_start_current_keeps_gradients_that_one_would_flush():
    dy = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 1e-7
    state, spec = Q.DelayedState.create((E5M2,), 4), Q.Tensorwise(fmt=E5M2)
    cast = {
        c: spec.quantize(dy, inverse_scale=state.inverse_scale_for(0, spec, dy, cold_start=c))
        for c in ("one", "current")
    }
    assert not (cast["one"].codes.view(torch.uint8) & 0x7F).any()
    error = cast["current"].dequantize(torch.float32) - dy
    assert (error.norm() / dy.norm()).item() < 0.07


# ------------------------------------------------------------------------------------------------------ end to end


def test_steps_of_casting_with_the_last_steps_scale():
    """Every step casts with what the steps before have led to, and reports its amax for the next."""
    spec, state, slot = Q.Tensorwise(), Q.DelayedState.create((E4M3,), 2), Slot(2, E4M3)
    for step in range(6):
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(step)) * 10.0 ** (step % 3)
        row, _, amax = spec.observe(x, state.inverse_scale_for(0, spec, x))
        v = np.clip(x.numpy() * F(slot.inverse_scale), F(-448), F(448))
        expected = v.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert np.array_equal(row.codes.view(torch.uint8).numpy(), expected), step
        assert row.scale.item() == float(F(1) / F(slot.inverse_scale)), step
        state.observe(0, amax)
        state.update()
        slot.observe(x.abs().max().item())
        slot.update()
        assert_matches(state, 0, slot, step)


def test_a_saved_cast_is_not_changed_by_a_later_update():
    """The backward pass decodes with the scale of its own forward."""
    spec, state = Q.Tensorwise(), Q.DelayedState.create((E4M3,), 2)
    x = torch.full((4, 4), 3.0)
    step_once(state, {0: 7.0})
    q = spec.quantize(x, inverse_scale=state.inverse_scale_for(0, spec, x))
    inverse_scale, before = state.inverse_scale_for(0, spec, x), q.dequantize(torch.float32)
    step_once(state, {0: 1000.0})
    assert inverse_scale.item() == 64.0  # a value, not a window on the state
    assert torch.equal(q.dequantize(torch.float32), before)
    assert q.scale.item() == 1 / 64


# -------------------------------------------------------------------------------------------------------- refusals


def test_unknown_settings_are_refused():
    state = Q.DelayedState.create((E4M3,), 2)
    with pytest.raises(UnsupportedConfig):
        state.update(algorithm="mean")
    with pytest.raises(UnsupportedConfig):
        state.inverse_scale_for(0, Q.Tensorwise(), torch.ones(1, 1), cold_start="zero")
    with pytest.raises(Unsupported):
        Q.DelayedState.create((), 2)  # no slot


@pytest.mark.parametrize("margin", [65, -65, 0.5, True], ids=str)
def test_a_margin_without_meaning_is_refused(margin):
    with pytest.raises(UnsupportedConfig, match="margin is an int from -64 to 64"):
        Q.DelayedState.create((E4M3,), 2).update(margin=margin)


def test_a_slot_in_four_bits_is_refused():
    with pytest.raises(UnsupportedConfig, match="a slot's format must be one of E4M3, E5M2, got E2M1"):
        Q.DelayedState.create((E2M1,), 2)


def test_a_multiplier_never_underflows_to_zero():
    """Zero would decode to NaN; the least multiplier is float32's smallest normal."""
    state = Q.DelayedState.create((E4M3,), 2)
    state.observe(0, torch.tensor(3e38))
    state.update(margin=64)
    assert state.inverse_scale.item() == torch.finfo(torch.float32).tiny


def test_a_cold_start_keeps_the_margin():
    x, state = torch.full((4, 4), 2.0), Q.DelayedState.create((E4M3,), 2)
    plain = state.inverse_scale_for(0, Q.Tensorwise(), x, cold_start="current")
    assert torch.equal(state.inverse_scale_for(0, Q.Tensorwise(), x, cold_start="current", margin=2), plain / 4)


def test_a_cold_start_stays_in_range_and_checks_its_margin():
    tiny, huge = torch.full((2, 2), 1e-38), torch.full((2, 2), 3e38)
    state, spec = Q.DelayedState.create((E4M3,), 2), Q.Tensorwise()
    assert state.inverse_scale_for(0, spec, tiny, cold_start="current", margin=-64).isfinite()
    assert state.inverse_scale_for(0, spec, huge, cold_start="current", margin=64).item() > 0
    with pytest.raises(UnsupportedConfig, match="margin is an int from -64 to 64"):
        state.inverse_scale_for(0, spec, tiny, margin=100)


# ------------------------------------------------------------------------------------------------ many, kept, restored


def states_after(steps: int, seed: int, length: int = 4):
    """Three states of one to three slots with a past, and amaxes waiting."""
    generator = torch.Generator().manual_seed(seed)
    states = [Q.DelayedState.create(HYBRID[: n + 1], length) for n in range(3)]
    for state in states:
        for _ in range(steps):
            step_once(state, {0: float(torch.rand((), generator=generator) * 9)})
        state.running_amax.copy_(torch.rand(state.running_amax.shape, generator=generator))
    return states


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_many_states_update_as_each_alone(algorithm):
    together, alone = states_after(6, 1), states_after(6, 1)
    addresses = [t.data_ptr() for state in together for t in state.tensors().values()]
    update_all(together, algorithm=algorithm, margin=1)
    for one, other in zip(together, alone, strict=True):
        other.update(algorithm=algorithm, margin=1)
        for name, tensor in one.tensors().items():
            assert torch.equal(tensor, other.tensors()[name]), name
    assert addresses == [t.data_ptr() for state in together for t in state.tensors().values()]


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 5, 11])
def test_a_restored_state_goes_on_as_the_one_it_came_from(steps):
    for original in states_after(steps, steps):
        copy = Q.DelayedState.create(HYBRID[: original.running_amax.numel()], 4)
        copy.restore(original.export())
        for amax in (3.0, 0.5, 0.0, 7.0, 0.25, 1.0, 2.0):
            for state in (original, copy):
                step_once(state, {0: amax})
            assert torch.equal(original.inverse_scale, copy.inverse_scale)
            assert sorted(original.history[0].tolist()) == sorted(copy.history[0].tolist())
        assert torch.equal(original.head > 0, copy.head > 0)


def test_an_exported_window_reads_oldest_to_newest():
    state = Q.DelayedState.create((E4M3,), 4)
    for amax in range(1, 8):
        step_once(state, {0: float(amax)})
    assert state.export()["history"].tolist() == [[4.0, 5.0, 6.0, 7.0]]


@pytest.mark.parametrize(("length", "kept"), [(2, [6.0, 7.0]), (6, [0.0, 0.0, 4.0, 5.0, 6.0, 7.0])])
def test_a_window_of_another_length_keeps_the_newest(length, kept):
    state, other = Q.DelayedState.create((E4M3,), 4), Q.DelayedState.create((E4M3,), length)
    for amax in range(1, 8):
        step_once(state, {0: float(amax)})
    other.restore(state.export())
    assert other.export()["history"].tolist() == [kept]
    step_once(other, {0: 8.0})
    assert 8.0 in other.history[0].tolist() and 7.0 in other.history[0].tolist()


# ------------------------------------------------------------------------------------------------- the window alone


def test_an_infinite_amax_does_not_enter_the_window():
    state = Q.DelayedState.create((E4M3,), 4)
    step_once(state, {0: 7.0})
    step_once(state, {0: INF})
    assert state.history.tolist() == [[7.0, 0.0, 0.0, 0.0]]


def test_the_window_advances_by_one_entry_in_each_step():
    state = Q.DelayedState.create((E4M3,), 3)
    for amax in (7.0, 5.0, 3.0):
        step_once(state, {0: amax})
    assert state.history.tolist() == [[7.0, 5.0, 3.0]]
