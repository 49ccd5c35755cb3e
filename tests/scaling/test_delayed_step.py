"""octavo.step: forgetting it is said, an optimizer can call it, and a process group can share its amaxes."""

import copy
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import octavo
from tests.support.linear_oracle import Memory, make, spiky
from tests.support.steps import batch

RECIPE = "fp8-delayed(history=4)"


def train(layer, steps, step=False, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(layer.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(steps):
            layer(batch(i)[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step:
                octavo.step(layer)
    return [w for w in caught if "octavo.step" in str(w.message)]


def test_a_scale_that_is_never_updated_is_said_once():
    (said,) = train(make(RECIPE), 6)
    assert issubclass(said.category, UserWarning)


def test_a_run_that_steps_is_not_warned():
    assert not train(make(RECIPE), 6, step=True)


def test_an_attached_optimizer_steps():
    layer = make(RECIPE)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    octavo.attach(layer, optimizer)
    assert not train(layer, 6, optimizer=optimizer)
    assert octavo.state_dict(layer)["scaling.forward.history"].all()


def test_many_forwards_without_a_step_are_said_once_too():
    layer, x = make(RECIPE, 4, 4), torch.ones(1, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(1100):
            layer(x)
            if i == 1000:
                assert not caught
    assert ["octavo.step" in str(w.message) for w in caught] == [True]


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4", "bf16"])
def test_recipes_without_a_state_are_never_warned(recipe):
    layer = make(recipe)
    assert not train(layer, 6)
    octavo.step(layer)  # and stepping them is nothing


# -- across ranks --------------------------------------------------------------------------------------------------

RANK = """
import sys, torch, octavo
import torch.distributed as dist
from tests.support.linear_oracle import make, run, spiky
rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
layer, lonely = make("fp8-delayed(history=4)"), make("fp8-delayed(history=4)")
for i in range(2):
    x, dy = spiky(21, 48, seed=10 * i + rank) * (1 + 3 * rank), spiky(21, 40, seed=10 * i + 2 + rank) * (4 - 3 * rank)
    run(layer, x, dy), run(lonely, x, dy)
    octavo.step(layer, group=dist.group.WORLD), octavo.step(lonely)
torch.save([octavo.state_dict(m) for m in (layer, lonely)], f"{out}/{rank}.pt")
dist.destroy_process_group()
"""


def test_a_group_shares_the_largest_amax_and_no_group_shares_nothing(tmp_path):
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", RANK]
    environment = {**os.environ, "PYTHONPATH": root}
    ranks = [subprocess.Popen([*command, str(r), f"{tmp_path}/store", str(tmp_path)], env=environment) for r in (0, 1)]
    assert [r.wait(120) for r in ranks] == [0, 0]
    shared, own = Memory(RECIPE), [Memory(RECIPE), Memory(RECIPE)]
    for i in range(2):
        for rank in (0, 1):
            x = spiky(21, 48, seed=10 * i + rank) * (1 + 3 * rank)
            dy = spiky(21, 40, seed=10 * i + 2 + rank) * (4 - 3 * rank)
            for memory in (shared, own[rank]):
                memory.observe(x=x, w=make(RECIPE).weight, dy=dy)
        for memory in (shared, *own):
            memory.step()
    for rank in (0, 1):
        layer, lonely = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        shared.assert_state(layer)
        own[rank].assert_state(lonely)
    assert own[0].slots["x"].history() != own[1].slots["x"].history()


# -- optimizers of others ----------------------------------------------------------------------------------------------


class Container(torch.optim.Optimizer):
    """An optimizer whose step is another's, over the same parameters: torchtitan's is one."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})

    def step(self, closure=None):
        self.inner.step()


def trained(model, optimizer, steps):
    for _ in range(steps):
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()


def delayed(*more):
    model = nn.Sequential(nn.Linear(16, 16), *more)
    octavo.convert(model, "fp8-delayed")
    return model


def test_a_reverted_layer_is_no_longer_heard():
    model, other = delayed(), nn.Linear(16, 16)
    octavo.attach(model, torch.optim.SGD(model.parameters()))
    octavo.revert(model)
    trained(other, torch.optim.SGD(other.parameters(), lr=0.1), 1)
    trained(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    assert type(model[0]) is nn.Linear and model[0].weight.grad.any()


def test_a_step_inside_a_step_counts_once():
    model = delayed()
    optimizer = Container(torch.optim.SGD(model.parameters(), lr=0.1))
    octavo.attach(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(model, optimizer, 4)
    assert octavo.state_dict(model)["0.scaling.forward.history"].count_nonzero(1).tolist() == [4, 4]


def test_a_missing_step_is_said_once_for_all_layers_and_where_the_optimizer_steps():
    model = delayed(nn.Linear(16, 16), nn.Linear(16, 16))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained(model, torch.optim.SGD(model.parameters(), lr=0.1), 4)
    assert [w.filename for w in said if "octavo.step" in str(w.message)] == [__file__]


# -- weights that change without an optimizer ------------------------------------------------------------------------


def updated_by_hand(model, times):
    for _ in range(times):
        model(torch.ones(4, 16))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
    model(torch.ones(4, 16))


def said_of(call, *arguments):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call(*arguments)
    return [str(w.message) for w in said]


def test_weights_that_the_program_updates_are_said_once_for_all_layers():
    model = delayed(nn.Linear(16, 16), nn.Linear(16, 16))
    (text,) = said_of(updated_by_hand, model, 6)
    assert "octavo.step(model) was not called" in text


def test_many_forwards_are_said_once_for_all_layers():
    model = delayed(nn.Linear(16, 16), nn.Linear(16, 16))
    assert len(said_of(lambda: [model(torch.ones(1, 16)) for _ in range(1030)])) == 1


def test_a_model_that_is_late_after_another_is_warned_of_too():
    first, second = delayed(), delayed()
    assert len(said_of(updated_by_hand, first, 3)) == 1
    assert len(said_of(updated_by_hand, second, 3)) == 1


def attached():
    model = delayed(nn.ReLU(), nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, octavo.attach(model, optimizer)


def test_an_attached_model_that_rolls_back_is_not_warned():
    model, optimizer, _ = attached()

    def rolled_back():
        for _ in range(3):
            trained(model, optimizer, 2)
            model(torch.ones(4, 16))
            model.load_state_dict(model.state_dict())
            model(torch.ones(4, 16)).sum().backward()

    assert said_of(rolled_back) == []


def test_loading_weights_is_no_update():
    model = delayed(nn.Linear(16, 16))
    octavo.step(model)

    def loads():
        for _ in range(4):
            model(torch.ones(4, 16))
            model.load_state_dict(model.state_dict())

    assert said_of(loads) == []


def test_an_attached_model_is_warned_once_it_is_detached():
    model, _, handle = attached()
    assert said_of(updated_by_hand, model, 3) == []
    assert said_of(lambda: [model(torch.ones(1, 16)) for _ in range(1030)]) == []
    handle.remove()
    assert len(said_of(updated_by_hand, model, 3)) == 1


def test_an_attached_optimizer_that_evaluates_a_closure_is_not_warned():
    model = delayed()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    octavo.attach(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 16)).square().sum()
        loss.backward()
        return loss

    assert said_of(lambda: [optimizer.step(closure) for _ in range(3)]) == []


def test_an_attached_optimizer_that_never_steps_is_said_at_last():
    model = nn.Sequential(octavo.Linear(64, 64, bias=False, recipe="fp8-delayed"))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    octavo.attach(model, optimizer)

    def train():
        for _ in range(40):
            model(torch.randn(8, 64)).sum().backward()
            with torch.no_grad():
                model[0].weight.mul_(0.99)

    with pytest.warns(UserWarning, match=r"octavo.step\(model\) was not called"):
        train()


def test_an_optimizer_besides_the_attached_one_is_said():
    model, *_ = attached()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    (text,) = said_of(trained, model, other, 4)
    assert text.endswith("call octavo.attach(model, optimizer) once, with the optimizer that updates them.")


def test_a_pickled_model_has_not_missed_a_step():
    model = delayed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    octavo.attach(model, optimizer)
    trained(model, optimizer, 2)
    model(torch.ones(4, 16))
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(twin(torch.ones(4, 16)), twin(torch.ones(4, 16)))


@pytest.mark.parametrize("around", [lambda layer: layer, octavo.Sequential], ids=["alone", "in a Sequential"])
def test_warnings_name_the_line_that_called(around):
    (said,) = train(around(make(RECIPE)), 6)
    assert said.filename == __file__
    loaded = make(RECIPE)
    loaded.load_state_dict(make(RECIPE).state_dict())
    with pytest.warns(UserWarning, match="no scaling state") as caught:
        around(loaded)(batch(0)[0]).sum().backward()
    assert [w.filename for w in caught] == [__file__]
