"""A model in a block of octavo.inspect and after it: what it may go through there, and that it is then as it was."""

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig
from tests.support.inspected import Counted, by_tensor, pair, train
from tests.support.state_tensors import named_tensors


class Named(nn.Linear):
    """A subclass, which convert keeps."""


def test_outside_of_the_block_everything_is_as_before():
    model, x = nn.Sequential(octavo.LayerNormMLP(64, 96, recipe="fp8-block"), *pair("nvfp4")), torch.randn(32, 64)
    named = [type(m) for m in model.modules()]
    attributes = [set(m.__dict__) for m in model.modules()]
    buffers = [name for name, _ in named_tensors(model)]
    counts = []
    graphs = [octavo.explain(model, x).captured]
    for _ in range(2):
        model.zero_grad()
        with Counted() as mode:
            train(model, x)
        counts.append(mode.calls)
        with octavo.inspect(model), Counted() as inside:
            train(model, x)
    graphs.append(octavo.explain(model, x).captured)
    assert counts[0] == counts[1] != inside.calls
    assert graphs[0] == graphs[1]
    assert named == [type(m) for m in model.modules()]
    assert attributes == [set(m.__dict__) for m in model.modules()]
    assert buffers == [name for name, _ in named_tensors(model)]
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())


def test_an_error_in_the_block_leaves_the_layers_as_they_were():
    model = pair()
    with pytest.raises(ZeroDivisionError), octavo.inspect(model):
        raise ZeroDivisionError
    assert type(model[0]) is octavo.Linear
    with octavo.inspect(model):
        assert set(model.state_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_copy_that_outlives_the_block_runs_as_ever():
    block, x = octavo.LayerNormMLP(64, 96, recipe="mxfp8"), torch.randn(32, 64, requires_grad=True)
    with octavo.inspect(block) as report:
        twin = copy.deepcopy(block)
        assert twin.explain(x).fired == ()
    assert twin.explain(x).fired == block.explain(x).fired != ()
    assert torch.equal(train(twin, x), train(block, x))
    assert {row.calls for row in report.rows()} == {0}


def test_a_step_that_is_not_measured_keeps_no_tensor():
    model = pair()
    with octavo.inspect(model, every=2) as report:
        report.next_step()
        x = model[0](torch.randn(20, 64))
        kept = weakref.ref(x)
        train(model[2], x)
        del x
        gc.collect()
        assert kept() is None
        twin = copy.deepcopy(model)
    train(twin, torch.randn(20, 64))
    copy.deepcopy(twin)


def test_a_copy_that_outlives_the_block_is_inspected_in_one_of_its_own():
    model = pair()
    with octavo.inspect(model):
        twin = copy.deepcopy(model)
    with octavo.inspect(twin) as report:
        train(twin, torch.randn(20, 64))
    assert {row.calls for row in report.rows()} == {1}
    assert type(twin[0]) is octavo.Linear


def test_a_layer_that_leaves_the_model_in_the_block_is_as_it_was():
    model = pair()
    layer = model[0]
    with octavo.inspect(model):
        model[0] = nn.Identity()
    assert type(layer) is octavo.Linear and "inspection_stats" not in layer._hidden._buffers


def test_a_reset_separates_the_recipes_of_a_policy():
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(8, 64)
    octavo.convert(model, octavo.Policy([{"recipe": "bf16", "from_step": 1}, ("*", "mxfp8")]))
    with octavo.inspect(model) as report:
        train(model, x)
        first = by_tensor(report)["x"]
        octavo.step(model)
        report.reset()
        train(model, x)
    assert (first.cast, first.calls, first.sqnr > 25) == ("mx", 1, True)
    assert by_tensor(report)["x"][2:8] == ("", 1, None, None, 0.0, None)


@pytest.mark.parametrize("kind", ["linear", "subclass"])
def test_a_layer_that_is_reverted_leaves_the_block(kind):
    model = nn.Sequential((nn.Linear if kind == "linear" else Named)(64, 64), nn.GELU(), octavo.Linear(64, 64))
    octavo.convert(model, "fp8-block")
    x = torch.randn(8, 64)
    with octavo.inspect(model) as report:
        train(model, x)
        octavo.revert(model[0])
        assert type(model[0]) is (nn.Linear if kind == "linear" else Named)
        train(model, x)
        assert {row.layer: row.calls for row in report.rows()} == {"2": 2}
    assert {row.layer: row.calls for row in report.rows()} == {"2": 2}
    assert set(vars(model[0])) == set(vars(nn.Linear(2, 2))) and not model[0]._buffers
    assert type(model[2]) is octavo.Linear


def test_a_copy_that_outlives_the_block_is_reverted():
    model = nn.Sequential(nn.Linear(64, 64))
    octavo.convert(model, "fp8-block")
    with octavo.inspect(model):
        twin = copy.deepcopy(model)
    octavo.revert(twin)
    assert type(twin[0]) is nn.Linear and set(vars(twin[0])) == set(vars(nn.Linear(2, 2))) and not twin[0]._buffers


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("kind", [nn.Linear, Named], ids=["linear", "subclass"])
def test_a_whole_model_is_saved_as_it_is_outside_of_the_block(kind, copied):
    model, x, file = nn.Sequential(kind(64, 64), octavo.GroupedLinear(2, 64, 64)), torch.randn(8, 64), io.BytesIO()
    octavo.convert(model, "nvfp4")
    with octavo.inspect(model) as report:
        model[0](x)
        if not copied:
            torch.save(model, file)
        model[0](x)
        twin = copy.deepcopy(model)
    if copied:
        torch.save(twin, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert [type(layer) for layer in loaded] == [type(layer) for layer in model]
    assert [set(vars(layer)) for layer in loaded] == [set(vars(layer)) for layer in model]
    assert [set(layer._hidden._buffers) for layer in loaded] == [set(layer._hidden._buffers) for layer in model]
    assert torch.equal(loaded[0](x), model[0](x))
    assert by_tensor(report)["y"].calls == 2


def test_a_layer_that_is_parametrized_in_the_block_runs_after_it():
    model, x = pair("fp8-block"), torch.randn(8, 64)
    with octavo.inspect(model):
        nn.utils.parametrizations.weight_norm(model[0])
        train(model, x)
    y = train(model, x)
    with octavo.inspect(model) as report:
        assert torch.equal(train(model, x), y)
    assert by_tensor(report)["y"].calls == 1
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    with octavo.inspect(model) as report:
        train(model, x)
    assert by_tensor(report)["y"].calls == 1
    assert type(model[0]) is octavo.Linear and "inspection_stats" not in model[0]._hidden._buffers


def test_a_block_that_cannot_be_entered_changes_nothing(monkeypatch):
    model, zeros, made = pair(), torch.zeros, []

    def fails_at_the_second(*arguments, **keywords):
        made.append(1)
        if len(made) == 2:
            raise torch.OutOfMemoryError
        return zeros(*arguments, **keywords)

    monkeypatch.setattr(torch, "zeros", fails_at_the_second)
    with pytest.raises(torch.OutOfMemoryError), octavo.inspect(model):
        pass
    monkeypatch.undo()
    assert [type(layer) for layer in model] == [octavo.Linear, nn.GELU, octavo.Linear]
    with octavo.inspect(model):
        train(model, torch.randn(20, 64))


def test_a_block_is_entered_again_with_nothing_recorded():
    model, x = pair(), torch.randn(20, 64)
    block = octavo.inspect(model)
    for _ in range(2):
        with block, torch.inference_mode():
            model(x)
        assert {row.calls for row in block.rows()} == {1}


def test_a_model_is_inspected_once_at_a_time():
    model = pair()
    with octavo.inspect(model), pytest.raises(UnsupportedConfig, match="already inspecting 0"), octavo.inspect(model):
        pass
