"""Checkpoints: weights stay nn.Linear's, state is plain tensors beside them, a resumed run is bitwise the same."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import Unsupported
from octavo.recipes import SHIPPED
from tests.modules.oracle import Memory, assert_result, assert_same, check, make, run, spiky

every = pytest.mark.parametrize("recipe", SHIPPED)
STATEFUL = ("fp8-delayed", "nvfp4")
REFUSALS = (Unsupported, RuntimeError, KeyError, ValueError, TypeError)


def batch(i=0):
    return spiky(21, 48, seed=10 + i), spiky(21, 40, seed=20 + i)


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
    if recipe == "nvfp4":
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
        check(fresh, recipe, x, dy, encode=memory.encode)


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
    assert all(t.is_meta for t in (*layer.parameters(), *layer.buffers()))
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
