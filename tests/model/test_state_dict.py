"""Checkpoints: weights stay nn.Linear's, state is plain tensors beside them, a resumed run is bitwise the same."""

import copy
import io
import pickle
import re
import warnings

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import Unsupported
from octavo.recipes import SHIPPED
from tests.support.linear_oracle import Memory, assert_result, assert_same, check, make, run, spiky
from tests.support.recipe_traits import WITHOUT_BUFFERS, is_stochastic
from tests.support.state_tensors import state_tensors
from tests.support.steps import batch

every = pytest.mark.parametrize("recipe", SHIPPED)
STATEFUL = [name for name in SHIPPED if name not in WITHOUT_BUFFERS]
REFUSALS = (Unsupported, RuntimeError, KeyError, ValueError, TypeError)


# -- weights are nn.Linear's -----------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("bias", [True, False])
def test_strict_loads_both_ways(recipe, bias):
    layer, plain = make(recipe, bias=bias), nn.Linear(48, 40, bias=bias)
    run(layer, *batch(), is_first_microbatch=True)
    octavo.step(layer)
    assert list(layer.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(layer.state_dict(), strict=True)
    other = make(recipe, bias=bias, seed=5)
    other.load_state_dict(plain.state_dict(), strict=True)
    for a, b in zip(layer.parameters(), other.parameters(), strict=True):
        assert_same(a.detach(), b.detach())


@every
def test_the_state_dict_holds_nothing_but_two_plain_tensors(recipe):
    layer = make(recipe)
    run(layer, *batch(), is_first_microbatch=True)
    state = layer.state_dict()
    assert list(state) == ["weight", "bias"]
    assert all(type(v) is torch.Tensor for v in state.values())


# -- octavo.state_dict -----------------------------------------------------------------------------------------------


@every
def test_state_is_a_flat_dict_of_plain_tensors_by_path(recipe):
    model = nn.ModuleDict({"a": make(recipe), "b": nn.Sequential(make(recipe))})
    run(model["a"], *batch())
    state = octavo.state_dict(model)
    assert all(type(k) is str and type(v) is torch.Tensor and not v.requires_grad for k, v in state.items())
    if recipe not in STATEFUL:
        assert state == {}
        return
    assert {key.split(".")[0] for key in state} == {"a", "b"}
    if is_stochastic(recipe):
        assert set(state) == {"a.rounding.seed", "b.0.rounding.seed"}
        assert state["a.rounding.seed"].dtype == torch.int64 and state["a.rounding.seed"].shape == (2,)
    else:
        assert state["a.scaling.forward.history"].shape == (2, 1024)
        assert state["b.0.scaling.backward.history"].shape == (1, 1024)


@pytest.mark.parametrize("recipe", STATEFUL)
def test_missing_unexpected_and_misshapen_state_is_refused_by_name(recipe):
    layer = make(recipe)
    run(layer, *batch())
    octavo.step(layer)
    state = octavo.state_dict(layer)
    key = next(iter(state))
    short = {k: v for k, v in state.items() if k != key}
    with pytest.raises(REFUSALS, match=key):
        octavo.load_state_dict(make(recipe), short)
    with pytest.raises(REFUSALS, match="elsewhere"):
        octavo.load_state_dict(make(recipe), {**state, "elsewhere": torch.zeros(1)})
    fresh = make(recipe)
    octavo.load_state_dict(fresh, {**short, "elsewhere": torch.zeros(1)}, strict=False)
    for wrong in (torch.zeros(3, 3, 3), torch.zeros(7, dtype=torch.uint8), "text", None):
        with pytest.raises(REFUSALS):
            octavo.load_state_dict(make(recipe), {**state, key: wrong})


@pytest.mark.parametrize("recipe", STATEFUL)
def test_a_refused_load_changes_nothing(recipe):
    trained, layer = make(recipe), make(recipe)
    for i in range(2):
        run(trained, *batch(i))
        octavo.step(trained)
    before = {k: v.clone() for k, v in octavo.state_dict(layer).items()}
    with pytest.raises(REFUSALS):
        octavo.load_state_dict(layer, {**octavo.state_dict(trained), "elsewhere": torch.zeros(1)})
    for k, v in octavo.state_dict(layer).items():
        assert_same(v, before[k], k)


NAN, INF = float("nan"), float("inf")
WRONG = {
    "encode": (NAN, INF, -INF, 0.0, -1.0),
    "history": (NAN, INF, -1.0),
    "current": (-1.0, -INF),
    "head": (-1,),
    "nonfinite": (-1,),
}


def experts():
    return octavo.GroupedLinear(3, 48, 40, recipe="fp8-delayed")


@pytest.mark.parametrize("side", ["forward", "backward"])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
@pytest.mark.parametrize(
    "layer", [lambda: make("fp8-delayed"), experts, lambda: make(None)], ids=["dense", "grouped", "ambient"]
)
def test_values_that_no_run_has_left_are_refused_and_nothing_is_written(layer, name, value, side):
    model = nn.ModuleDict({"first": layer(), "second": layer()})
    source = nn.ModuleDict(
        {k: experts() if isinstance(v, octavo.GroupedLinear) else make("fp8-delayed") for k, v in model.items()}
    )
    state = octavo.state_dict(source)
    state = {k: v + 1 if k.endswith(("encode", "head")) else v for k, v in state.items()}
    key = f"second.scaling.{side}.{name}"
    state[key].view(-1)[-1] = value
    before = octavo.state_dict(model)
    with pytest.raises(Unsupported, match=re.escape(key)):
        octavo.load_state_dict(model, state)
    for k, v in octavo.state_dict(model).items():
        assert_same(v, before[k], k)


def test_an_amax_that_is_not_finite_yet_is_what_a_step_may_have_seen():
    layer, (x, dy) = make("fp8-delayed"), batch()
    dy[0, 0] = INF
    run(layer, x, dy)
    resumed = make("fp8-delayed")
    octavo.load_state_dict(resumed, octavo.state_dict(layer))
    octavo.step(layer), octavo.step(resumed)
    for k, v in octavo.state_dict(layer).items():
        assert_same(octavo.state_dict(resumed)[k], v, k)
    assert octavo.state_dict(resumed)["scaling.backward.nonfinite"].item() == 1


@pytest.mark.parametrize("recipe", STATEFUL)
def test_tensors_without_values_are_refused(recipe):
    layer = make(recipe)
    for key, value in octavo.state_dict(layer).items():
        with pytest.raises(Unsupported, match=f"{re.escape(key)}.*meta"):
            octavo.load_state_dict(layer, {**octavo.state_dict(layer), key: value.to("meta")})


@pytest.mark.parametrize(
    "wrong", [{1: torch.zeros(1)}, {None: torch.zeros(1)}, {("a", "b"): torch.zeros(1)}, [1], None, "text"]
)
@pytest.mark.parametrize("strict", [True, False])
def test_what_is_no_dict_of_names_is_refused(wrong, strict):
    with pytest.raises(Unsupported):
        octavo.load_state_dict(make("fp8-delayed"), wrong, strict=strict)


def test_a_negative_step_of_rounding_is_refused():
    with pytest.raises(Unsupported, match=r"rounding\.seed"):
        octavo.load_state_dict(make("nvfp4"), {"rounding.seed": torch.tensor([3, -1])})


# -- compiled wrappers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", STATEFUL)
def test_names_of_a_compiled_wrapper_are_those_of_the_model(recipe):
    def model():
        return nn.Sequential(make(recipe), nn.Sequential(make(recipe, 40, 40)))

    def wrapped(inner):
        outer = model() if inner is None else inner
        outer[1] = torch.compile(outer[1], backend="eager")
        return torch.compile(outer, backend="eager")

    trained = model()
    run(trained[0], *batch())
    octavo.step(trained)
    state = octavo.state_dict(trained)
    for source in (state, octavo.state_dict(wrapped(trained))):
        for target in (model(), wrapped(None)):
            octavo.load_state_dict(target, source)
            for found, want in zip(octavo.state_dict(target).values(), state.values(), strict=True):
                assert_same(found, want)
    with pytest.raises(Unsupported, match="twice"):
        octavo.load_state_dict(model(), {**state, **{f"_orig_mod.{k}": v for k, v in state.items()}})


# -- weights without state -------------------------------------------------------------------------------------------


def said(layer, *, training=True, compiled=False):
    """What one step says of the state."""
    call = torch.compile(layer, backend="eager") if compiled else layer
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            layer.train(training)
            y = call(batch()[0])
            if training:
                y.mean().backward()
                optimizer.step()
                octavo.step(layer)
    return [w for w in caught if "no scaling state" in str(w.message)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("settings", ["", "(cold_start='one')"])
def test_weights_that_come_without_their_state_are_said_once(settings, compiled):
    recipe = f"fp8-delayed{settings}"
    model, weights = nn.Sequential(make(recipe), make(recipe, 40, 40)), None
    assert not said(model, compiled=compiled)  # nothing was loaded
    weights, state = model.state_dict(), octavo.state_dict(model)
    fresh = nn.Sequential(make(recipe), make(recipe, 40, 40))
    fresh.load_state_dict(weights)
    assert not said(fresh, training=False)
    (one,) = said(fresh, compiled=compiled)
    assert "octavo.load_state_dict" in str(one.message)
    for order in (0, 1):
        fresh = nn.Sequential(make(recipe), make(recipe, 40, 40))
        for load in ((fresh.load_state_dict, weights), (lambda s, m=fresh: octavo.load_state_dict(m, s), state))[
            :: 1 - 2 * order
        ]:
            load[0](load[1])
        assert not said(fresh, compiled=compiled)
    other = make("fp8-current")
    other.load_state_dict(make("fp8-current").state_dict())
    assert not said(other)


# -- a layer that follows octavo.autocast ----------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", STATEFUL)
@pytest.mark.parametrize("kind", ["dense", "grouped"])
def test_state_that_waits_for_a_first_forward_is_saved(kind, recipe):
    def layer(own):
        return make(own) if kind == "dense" else octavo.GroupedLinear(3, 48, 40, recipe=own)

    source = layer(recipe)
    (source(batch()[0]) if kind == "dense" else source(batch()[0], torch.tensor([10, 5, 6]))).sum().backward()
    octavo.step(source)
    state = octavo.state_dict(source)
    waiting = layer(None)
    octavo.load_state_dict(waiting, state)
    given = next(iter(state))
    state[given].zero_()  # the caller's own
    want = octavo.state_dict(source)
    for subject in (waiting, copy.deepcopy(waiting), pickle.loads(pickle.dumps(waiting))):
        again = layer(None)
        octavo.load_state_dict(again, octavo.state_dict(subject))
        for found in (octavo.state_dict(subject), octavo.state_dict(again)):
            assert found.keys() == want.keys()
            for k, v in want.items():
                assert_same(found[k], v, k)
    octavo.load_state_dict(waiting, {})  # and is replaced as any state is
    assert octavo.state_dict(waiting) == {}


def test_history_is_stored_from_oldest_to_newest_wherever_the_ring_stands():
    recipe = "fp8-delayed(history=3)"
    layer, memory = make(recipe), Memory(recipe)
    for i in range(5):
        x, dy = batch(i)
        run(layer, x, dy)
        memory.observe(x=x, w=layer.weight, dy=dy)
        memory.step()
        octavo.step(layer)
        memory.assert_state(octavo.state_dict(layer))
        fresh = make(recipe)
        octavo.load_state_dict(fresh, octavo.state_dict(layer))
        memory.assert_state(octavo.state_dict(fresh))
        check(fresh, recipe, x, dy, inverse_scale=memory.inverse_scale)


def test_loading_leaves_no_alias():
    one, two = make("fp8-delayed(history=3)"), make("fp8-delayed(history=3)")
    octavo.load_state_dict(two, octavo.state_dict(one))
    run(one, *batch())
    octavo.step(one)
    assert not octavo.state_dict(two)["scaling.forward.history"].any()


# -- resume --------------------------------------------------------------------------------------------------------


class Run:
    """A two-layer model, its optimizer, and a stream of batches."""

    def __init__(self, recipe, seed=0):
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            octavo.Linear(48, 40, recipe=recipe), nn.GELU(), octavo.Linear(40, 16, recipe=recipe)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train(self, steps):
        losses = []
        for i in steps:
            loss = self.model(batch(i)[0]).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            octavo.step(self.model)
            losses.append(loss.item())
        return losses

    def checkpoint(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "octavo": octavo.state_dict(self.model),
        }

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        octavo.load_state_dict(self.model, state["octavo"])


@pytest.mark.parametrize("recipe", [*SHIPPED, "fp8-delayed(history=2,margin=1)", "nvfp4(rht=False)"])
def test_resuming_is_bitwise(recipe):
    straight = Run(recipe)
    straight.train(range(3))
    file = io.BytesIO()
    torch.save(straight.checkpoint(), file)
    want = straight.train(range(3, 6))
    resumed = Run(recipe, seed=99)
    file.seek(0)
    resumed.load(torch.load(file, weights_only=True))
    assert resumed.train(range(3, 6)) == want
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert_same(a.detach(), b.detach())
    for key, value in octavo.state_dict(straight.model).items():
        assert_same(octavo.state_dict(resumed.model)[key], value, key)


@pytest.mark.parametrize("recipe", STATEFUL)
def test_without_the_state_a_resumed_run_is_another_one(recipe):
    """So the test above can fail."""
    straight = Run(recipe)
    straight.train(range(3))
    checkpoint = copy.deepcopy(straight.checkpoint())
    want = straight.train(range(3, 6))
    resumed = Run(recipe, seed=99)
    checkpoint["octavo"] = octavo.state_dict(resumed.model)
    resumed.load(checkpoint)
    assert resumed.train(range(3, 6)) != want


@every
def test_safetensors_carries_both_dicts(recipe, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    straight = Run(recipe)
    straight.train(range(2))
    state = {**straight.model.state_dict(), **{f"octavo/{k}": v for k, v in octavo.state_dict(straight.model).items()}}
    safetensors.save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / "all.safetensors")
    loaded = safetensors.load_file(tmp_path / "all.safetensors")
    own = {k.removeprefix("octavo/"): v for k, v in loaded.items() if k.startswith("octavo/")}
    other = Run(recipe, seed=99)
    other.model.load_state_dict({k: v for k, v in loaded.items() if not k.startswith("octavo/")})
    octavo.load_state_dict(other.model, own)
    x, dy = batch(7)
    assert_result(run(other.model[0], x, dy), run(straight.model[0], x, dy))


# -- nothing is executed ---------------------------------------------------------------------------------------------


class Poison:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("recipe", STATEFUL)
def test_a_poisoned_file_executes_nothing(recipe, tmp_path):
    layer, canary = make(recipe), tmp_path / "canary"
    key = next(iter(octavo.state_dict(layer)))
    poison = Poison(canary)
    torch.save({**octavo.state_dict(layer), key: poison}, tmp_path / "file.pt")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "file.pt", weights_only=True)
    assert not canary.exists()
    # the same bytes inside a tensor, which every safe loader lets through
    hidden = torch.frombuffer(bytearray(pickle.dumps(poison)), dtype=torch.uint8)
    for state in ({**octavo.state_dict(layer), key: hidden}, {**octavo.state_dict(layer), "_extra_state": hidden}):
        with pytest.raises(REFUSALS):
            octavo.load_state_dict(layer, state)
    with pytest.raises(REFUSALS):
        layer.load_state_dict({**layer.state_dict(), "_extra_state": hidden})
    assert not canary.exists()
    pickle.loads(pickle.dumps(poison)).close()
    assert canary.exists()  # the poison works


# -- meta device and copies ------------------------------------------------------------------------------------------


@pytest.fixture
def _poisoned_memory():
    """torch.empty comes back as NaN, so that whatever is left uninitialized shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@every
@pytest.mark.usefixtures("_poisoned_memory")
def test_construction_on_meta_then_reset_parameters(recipe):
    torch.manual_seed(4)
    want = octavo.Linear(48, 40, recipe=recipe)
    layer = octavo.Linear(48, 40, device="meta", recipe=recipe)
    assert all(t.is_meta for t in (*layer.parameters(), *state_tensors(layer)))
    layer.to_empty(device="cpu")
    torch.manual_seed(4)
    layer.reset_parameters()
    assert_same(layer.weight.detach(), want.weight.detach())
    check(layer, recipe, *batch())
    octavo.step(layer)
    for value in octavo.state_dict(layer).values():
        assert value.isfinite().all()


@every
@pytest.mark.usefixtures("_poisoned_memory")
def test_construction_on_meta_then_weights_loaded(recipe):
    with torch.device("meta"):
        layer = octavo.Linear(48, 40, recipe=recipe)
    layer.to_empty(device="cpu")
    layer.load_state_dict(nn.Linear(48, 40).state_dict())
    check(layer, recipe, *batch())


@every
def test_a_deep_copy_has_its_own_state(recipe):
    layer = make(recipe)
    run(layer, *batch())
    octavo.step(layer)
    twin = copy.deepcopy(layer)
    before = {k: v.clone() for k, v in octavo.state_dict(layer).items()}
    assert_result(run(twin, *batch(1)), run(copy.deepcopy(layer), *batch(1)))
    octavo.step(twin)
    for key, value in octavo.state_dict(layer).items():
        assert_same(value, before[key], key)


@pytest.mark.parametrize("name", ["_orig_mod", "_checkpoint_wrapped_module", "_forward_module"])
def test_a_state_does_not_know_the_wrappers_of_a_model(name):
    """torch.compile, activation checkpointing and Fabric put names into paths, which state dicts leave out."""

    class Wrapper(nn.Module):
        def __init__(self, inside):
            super().__init__()
            self.add_module(name, inside)

    plain = make("fp8-delayed")
    wrapped = Wrapper(copy.deepcopy(plain))
    plain._hidden.scaling_forward_inverse_scale.fill_(2.0)
    octavo.load_state_dict(wrapped, octavo.state_dict(plain))
    assert_same(
        wrapped.get_submodule(name)._hidden.scaling_forward_inverse_scale, plain._hidden.scaling_forward_inverse_scale
    )
    octavo.load_state_dict(make("fp8-delayed"), octavo.state_dict(wrapped))


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_a_layer_whose_name_has_a_line_break_is_saved_and_loaded(recipe):
    model = nn.Sequential()
    model.add_module("a\nb", nn.Linear(32, 32))
    octavo.convert(model, recipe)
    model(spiky(8, 32)).sum().backward()
    octavo.step(model)
    state = octavo.state_dict(model)
    other = copy.deepcopy(model)
    model(spiky(8, 32, seed=1)).sum().backward()
    octavo.step(model)
    octavo.load_state_dict(model, state)
    for mine, theirs in zip(state_tensors(model), state_tensors(other), strict=True):
        assert torch.equal(mine, theirs)
