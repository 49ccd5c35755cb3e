"""The harness runs every module of the package, and it finds layers that follow the state of torch."""

import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import octavo
from octavo import moe, ops
from tests.strange.environments import ENVIRONMENTS, Environment
from tests.strange.harness import PLAIN, differences, plain_record, record_of, traces
from tests.strange.layers import BY_NAME, LAYERS, RECIPES, UNQUANTIZED, Draw, K, Layer, Place, Shift, rows
from tests.strange.sample import sample
from tests.strange.states import DEFAULTS, WITHOUT_GRADIENTS


def environment(name: str) -> Environment:
    return next(each for each in ENVIRONMENTS if each.name == name)


# -- what it runs ------------------------------------------------------------------------------------------------------


def test_every_module_of_the_package_is_in_a_layer():
    public = [getattr(module, name) for module in (octavo, ops, moe) for name in module.__all__]
    modules = {each for each in public if isinstance(each, type) and issubclass(each, nn.Module)}
    bases = {ops.Activation, ops.BasicOperation, ops.FusibleOperation}
    place = Place(device="cpu", dtype=torch.bfloat16)
    built = {type(m) for layer in LAYERS for m in layer.build(layer.recipes[0], place).modules()}
    assert modules - bases - built == set()


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_every_layer_computes_something(layer):
    record = plain_record(layer, layer.recipes[0])
    for step in range(3):
        y = record[f"step {step}, output 0"].float()
        assert y.isfinite().all() and y.abs().sum() > 0


def test_names_are_unique():
    for names in ([layer.name for layer in LAYERS], [each.name for each in ENVIRONMENTS]):
        assert len(set(names)) == len(names)


def test_a_record_has_outputs_gradients_weights_state_and_versions():
    record = record_of(BY_NAME["Linear"], "fp8-delayed", PLAIN)
    assert {
        "step 0, output 0", "step 2, input 0 gradient", "step 1, weight gradient", "step 1, bias gradient",
        "held weight", "version of weight", "held scaling_forward_history", "version of scaling_forward_history",
        "state dict weight", "recipe state scaling.forward.history",
    } <= record.keys()  # fmt: skip


def test_the_sample_has_every_environment_layer_and_recipe():
    for device, least in (("cpu", 11), ("cuda", 4)):
        cases = list(sample(device))
        for environment in ENVIRONMENTS:
            met = [(layer, recipe) for layer, recipe, each in cases if each is environment]
            assert len({layer.name for layer, _ in met}) >= 5, environment
            assert len({recipe for _, recipe in met}) >= 2, environment
        for layer in LAYERS:
            met = [(recipe, environment) for each, recipe, environment in cases if each is layer]
            assert len({environment.name for _, environment in met}) >= least, layer
    assert {recipe for _, recipe, _ in sample("cpu")} == set(RECIPES)


# -- what it finds -----------------------------------------------------------------------------------------------------


class Careless(nn.Module):
    """A layer that makes a tensor by torch's defaults."""

    def forward(self, x):
        return x.float() * torch.full((K,), 0.1)


class Counting(nn.Module):
    """A layer that counts its calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), device="cpu", dtype=torch.int64))

    def forward(self, x):
        self.count += 1
        return x * self.count


def layer_of(kind):
    return Layer(kind.__name__, lambda recipe, place: kind(), rows, UNQUANTIZED)


@pytest.mark.parametrize("when", ["whole run", "one step"])
def test_the_harness_finds_a_layer_that_follows_the_default_dtype(when):
    found = traces(layer_of(Careless), "bf16", environment(f"default dtype float16, {when}"))
    assert "step 1, output 0" in found
    assert ("step 2, output 0" in found) == (when == "whole run")


def test_the_harness_finds_a_layer_that_follows_the_default_device():
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        traces(layer_of(Careless), "bf16", environment("default device meta, one step"))


@pytest.mark.parametrize("name", [
    *[f"{name}, one call" for name in WITHOUT_GRADIENTS], "evaluation", "functional_call", "torch.func",
    "a call in a thread", "requires_grad off and on", "failure in forward", "failure after backward",
])  # fmt: skip
def test_the_harness_finds_a_layer_that_counts_calls(name):
    found = traces(layer_of(Counting), "bf16", environment(name))
    assert {"step 2, output 0", "held count", "version of count", "state dict count"} <= set(found)
    assert "step 1, output 0" not in found


def test_the_harness_finds_a_layer_that_keeps_weak_references():
    class Watching(nn.Linear):
        def __init__(self):
            super().__init__(K, 8, device="cpu", dtype=torch.bfloat16)
            self.known = weakref.ref(self.weight)

    with pytest.raises(RuntimeError, match="swap"):
        traces(layer_of(Watching), "bf16", environment("swap_tensors"))


def test_the_harness_finds_a_layer_that_registers_buffers_late():
    class Late(Shift):
        def forward(self, x):
            if "late" not in self._buffers:
                self.register_buffer("late", torch.zeros(2, device="cpu", dtype=torch.float32))
            return super().forward(x)

    late = Layer("late", lambda recipe, place: nn.Sequential(Late(place), Shift(place)), rows, UNQUANTIZED)
    with pytest.raises(RuntimeError, match="size"):
        traces(late, "bf16", environment("AveragedModel, made at first"))


def test_the_harness_finds_a_layer_in_a_sequence():
    layer, names = layer_of(Counting), ("deepcopy", "evaluation", "pickle")
    sequence = [environment(name) for name in names]
    assert "step 6, output 0" in plain_record(layer, "bf16", environments=3)
    found = traces(layer, "bf16", *sequence)
    assert "step 5, output 0" in found and "step 2, output 0" not in found


def test_values_that_may_differ_are_left_out():
    want = {"a": torch.zeros(2), "version of b": 1}
    found = {"a": torch.zeros(2), "version of b": 2}
    assert differences(found, want) == ["version of b"]
    assert differences(found, want, ("version of *",)) == []


@pytest.mark.parametrize("other", [
    torch.zeros(2, dtype=torch.float64), torch.tensor([0.0, -0.0]), torch.zeros(3), torch.zeros(4)[::2], 0.0, None,
], ids=str)  # fmt: skip
def test_values_differ_by_dtype_bits_shape_layout_and_kind(other):
    assert differences({"a": other}, {"a": torch.zeros(2)}) == ["a"]


def test_equal_bits_are_equal_even_nan():
    nan = torch.tensor([float("nan")])
    assert differences({"a": nan, "b": None}, {"a": nan.clone(), "b": None}) == []
    assert differences({"a": nan}, {}) == ["a"]


def test_inputs_are_the_same_in_every_state():
    place = Place(device="cpu", dtype=torch.bfloat16)
    want = [layer.inputs(Draw(place, 5)) for layer in LAYERS]
    for enter in DEFAULTS.values():
        with enter():
            found = [layer.inputs(Draw(place, 5)) for layer in LAYERS]
        for a, b in zip(found, want, strict=True):
            assert differences(dict(enumerate(map(str, a))), dict(enumerate(map(str, b)))) == []
            assert all(x.device.type == "cpu" for x in a if isinstance(x, torch.Tensor))


# -- imports -----------------------------------------------------------------------------------------------------------

IMPORT = """
import torch
torch.set_default_device("meta")
torch.set_default_dtype(torch.float64)
with torch.inference_mode():
    import octavo
torch.set_default_device(None)
torch.set_default_dtype(torch.float32)
layer = octavo.Linear(32, 16, recipe="fp8-delayed", device="cpu", dtype=torch.float32)
layer(torch.ones(4, 32)).sum().backward()  # x takes no gradient
print(layer.weight.grad.shape)
"""


def test_octavo_may_be_imported_in_any_state():
    found = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True)
    assert (found.stdout.strip(), found.returncode) == ("torch.Size([16, 32])", 0), found.stderr
