"""Checkpoints of a run: a resumed run is bitwise the same, and a save that fails leaves the previous one the newest."""

import os
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import octavo
from octavo.checkpoints import tensor_file
from octavo.errors import InvalidCheckpoint, Unsupported
from octavo.recipes import SHIPPED
from tests.support.processes import output_of
from tests.support.small_run import FILES, Net, assert_same, make, seed_all, train, values

# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_resumed_run_is_bitwise_the_same(recipe, tmp_path):
    model, optimizer = make(recipe)
    seed_all(1)
    losses = train(model, optimizer, 6)
    half, its = make(recipe)
    seed_all(1)
    first = train(half, its, 3)
    octavo.save_checkpoint(tmp_path, half, its, step=3)
    seed_all(5)
    resumed, other = make(recipe, seed=7)
    loaded = octavo.load_checkpoint(tmp_path, resumed, other)
    assert (loaded.path, loaded.step, loaded.extra) == (tmp_path / "step-000003", 3, {})
    assert first + train(resumed, other, 3) == losses
    assert_same(values(resumed, other), values(model, optimizer))


SCRIPT = """
import sys, torch, octavo
from tests.support.small_run import make, seed_all, train, values
model, optimizer = make("nvfp4", seed=3)
octavo.load_checkpoint({folder!r}, model, optimizer)
print(train(model, optimizer, 2))
"""


def test_another_process_resumes(tmp_path):
    model, optimizer = make("nvfp4")
    seed_all(1)
    train(model, optimizer, 2)
    octavo.save_checkpoint(tmp_path, model, optimizer, step=2)
    printed = output_of(SCRIPT.format(folder=str(tmp_path)))
    assert printed.strip() == str(train(model, optimizer, 2))


@pytest.mark.parametrize("cls", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adafactor", "NAdam", "Rprop", "ASGD"])
def test_every_optimizer_of_torch_comes_back(cls, tmp_path):
    optimizer_class = getattr(torch.optim, cls)
    model, optimizer = make("bf16", optimizer=optimizer_class)
    train(model, optimizer, 2)
    octavo.save_checkpoint(tmp_path, model, optimizer, step=2)
    resumed, other = make("bf16", seed=4, optimizer=optimizer_class)
    octavo.load_checkpoint(tmp_path, resumed, other)
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    assert_same(values(resumed, other), values(model, optimizer))


def test_an_optimizer_with_lists_of_tensors_comes_back(tmp_path):
    def run(optimizer, model, steps):
        x = torch.linspace(-1, 1, 32).view(4, 8)

        def closure():
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(steps)]

    models = [nn.Linear(8, 8), nn.Linear(8, 8)]
    first, second = (torch.optim.LBFGS(model.parameters(), max_iter=3) for model in models)
    run(first, models[0], 2)
    octavo.save_checkpoint(tmp_path, models[0], first)
    octavo.load_checkpoint(tmp_path, models[1], second)
    assert run(first, models[0], 2) == run(second, models[1], 2)


class Wrapper:
    def __init__(self, optimizer):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups


def test_wrappers_of_models_and_optimizers_leave_no_trace(tmp_path):
    model, optimizer = make(attached=False)
    train(model, optimizer, 1)
    octavo.save_checkpoint(tmp_path / "a", model, optimizer)
    octavo.save_checkpoint(tmp_path / "b", torch.compile(model, backend="eager"), Wrapper(optimizer))
    for name in FILES:
        assert (tmp_path / "a/step-000000" / name).read_bytes() == (tmp_path / "b/step-000000" / name).read_bytes(), (
            name
        )
    other, its = make(seed=2)
    octavo.load_checkpoint(tmp_path / "b", nn.DataParallel(other), Wrapper(its))
    assert_same(values(other, its), values(model, optimizer))


class WithHead(nn.Module):
    """A wrapper with a layer of its own, which hands out the attributes of the compiled module inside of it."""

    def __init__(self):
        super().__init__()
        self.body = torch.compile(nn.Sequential(octavo.Linear(16, 16, recipe="fp8-current")), backend="aot_eager")
        self.head = octavo.Linear(16, 4, recipe="fp8-current")

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("body"), name)

    def forward(self, x):
        return self.head(self.body(x))


def test_a_wrapper_around_a_compiled_module_keeps_its_own_layers(tmp_path):
    model = WithHead()
    assert model._orig_mod is model.body._orig_mod
    octavo.save_checkpoint(tmp_path, model, step=1)
    other = WithHead()
    octavo.load_checkpoint(tmp_path, other)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
    x = torch.randn(8, 16)
    with octavo.inspect(model) as report:
        model(x).sum().backward()
    assert any(name.startswith("head/") for name in report.to_dict())
    rows = octavo.compare(model, [x], "fp8-block", "fp8-current").rows
    assert "head.weight" in {row.parameter for row in rows}


def test_the_weights_load_into_a_stock_model(saved):
    path, *_ = saved
    weights = load_file(path / "model.safetensors")
    stock = Net()
    stock.load_state_dict(weights, strict=True)
    assert torch.equal(stock.up.weight, weights["up.weight"])
    assert torch.equal(weights["tied.weight"], weights["down.weight"])


def test_weights_without_the_optimizer_are_loaded(saved):
    path, model, optimizer = saved
    before = optimizer.state_dict()
    octavo.load_checkpoint(path, model)
    assert torch.equal(model.up.weight, load_file(path / "model.safetensors")["up.weight"])
    assert optimizer.state_dict() == before


EXTRA = {
    "schedule": {"last": 3, "rates": [1e-3, float("inf")], "name": "ß", "none": None, "on": True},
    "nested": [{"a": (1, (2.5, [torch.arange(3)]))}, {}, [], ()],
    "a.b": torch.ones(2),
    "a": {"b": torch.zeros(2), 0: torch.zeros(1, dtype=torch.bool), "0": torch.full((1,), 7)},
    "big": 2**80,
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_extra_values_come_back_as_they_were(tmp_path):
    model = nn.Linear(2, 2)
    octavo.save_checkpoint(tmp_path, model, extra=EXTRA)
    assert same(octavo.load_checkpoint(tmp_path, model).extra, EXTRA)


OBJECTS = {
    "object": object(), "a number as key": {1.5: 2}, "set": {"a": {1, 2}}, "bytes": [b"bytes"], "function": print,
    "dtype": torch.float32, "complex": 1j,
}  # fmt: skip


@pytest.mark.parametrize("value", OBJECTS.values(), ids=OBJECTS)
def test_objects_are_refused_by_their_path(value, tmp_path):
    with pytest.raises(Unsupported, match=r"extra\.here"):
        octavo.save_checkpoint(tmp_path / "run", nn.Linear(2, 2), extra={"here": value})
    assert not (tmp_path / "run").exists()


# -- the newest --------------------------------------------------------------------------------------------------------


def test_the_highest_step_is_the_newest(tmp_path):
    model = nn.Linear(2, 2)
    for step in (9, 1_000_000, 100, 999_999):
        octavo.save_checkpoint(tmp_path, model, step=step, extra={"step": step})
    assert octavo.load_checkpoint(tmp_path, model).extra == {"step": 1_000_000}
    assert octavo.load_checkpoint(tmp_path / "step-000009", model).step == 9


@pytest.mark.parametrize("failing", [*FILES, "checkpoint.json", "rename"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["disk", "Ctrl-C"])
def test_a_save_that_fails_leaves_the_previous_one_as_the_newest(failing, error, saved, monkeypatch):
    path, model, optimizer = saved
    octavo.load_checkpoint(path, model, optimizer)
    train(model, optimizer, 1)
    before = sorted(os.listdir(path.parent))
    write = tensor_file.write

    def half(file, *rest):
        digest = write(file, *rest)
        if file.name == failing:
            os.truncate(file, digest.bytes // 2)
            raise error
        return digest

    def fails(*_):
        raise error

    monkeypatch.setattr(tensor_file, "write", half)
    if failing == "rename":
        monkeypatch.setattr("octavo.checkpoints.folder.os.rename", fails)
    if failing == "checkpoint.json":
        monkeypatch.setattr("octavo.checkpoints.folder._write_manifest", fails)
    with pytest.raises(type(error)):
        octavo.save_checkpoint(path.parent, model, optimizer, step=4)
    monkeypatch.undo()
    assert sorted(os.listdir(path.parent)) == before
    assert octavo.load_checkpoint(path.parent, *make()).step == 3
    octavo.save_checkpoint(path.parent, model, optimizer, step=4)
    assert octavo.load_checkpoint(path.parent, *make()).step == 4


def test_a_folder_that_is_not_complete_is_not_the_newest(saved):
    """Such as one that a copy left, or a killed process."""
    path, model, optimizer = saved
    for step, missing in enumerate((*FILES, "checkpoint.json"), start=4):
        copy = path.parent / f"step-{step:06d}"
        shutil.copytree(path, copy)
        (copy / missing).unlink()
        with pytest.raises(InvalidCheckpoint, match=f"is not complete: {missing}: No such file"):
            octavo.load_checkpoint(copy, model, optimizer)
    (path.parent / "step-000050").mkdir()
    (path.parent / "step-000060").write_text("a file")
    shutil.copytree(path, path.parent / ".partial-00000000")
    shutil.copytree(path, path.parent / "step-000070")  # says of itself that it is step 3
    short = path.parent / "step-000080"
    shutil.copytree(path, short)
    os.truncate(short / "model.safetensors", 100)
    with pytest.warns(
        UserWarning, match="9 newer checkpoints that cannot be loaded, and step-000003 is taken"
    ) as found:
        assert octavo.load_checkpoint(path.parent, model, optimizer).path == path
    assert f"Of the newest: {short / 'model.safetensors'} is damaged" in str(found[0].message)
    assert found[0].filename == __file__
    shutil.rmtree(path)
    with pytest.raises(
        InvalidCheckpoint, match=r"has no complete checkpoint. Of its newest: .*model.safetensors is dam"
    ):
        octavo.load_checkpoint(path.parent, model, optimizer)


def test_a_killed_process_leaves_no_checkpoint(tmp_path):
    script = """
    import os, signal
    from torch import nn
    import octavo
    from octavo.checkpoints import tensor_file
    model, write = nn.Linear(64, 64), tensor_file.write
    octavo.save_checkpoint({folder!r}, model, step=1)
    if os.fork() == 0:
        def killed(path, *rest):
            write(path, *rest)
            os.kill(os.getpid(), signal.SIGKILL)
        tensor_file.write = killed
        octavo.save_checkpoint({folder!r}, model, step=2)
    os.wait()
    print(sorted(name[:6] for name in os.listdir({folder!r})), octavo.load_checkpoint({folder!r}, model).step)
    """
    assert output_of(script.format(folder=str(tmp_path))).strip() == "['.parti', 'step-0'] 1"


def test_a_step_is_saved_once(saved):
    path, model, optimizer = saved
    content = (path / "model.safetensors").read_bytes()
    with pytest.raises(Unsupported, match="step-000003 exists already, and a checkpoint is not replaced"):
        octavo.save_checkpoint(path.parent, model, optimizer, step=3)
    assert (path / "model.safetensors").read_bytes() == content


@pytest.mark.parametrize("step", [-1, 1.0, True, "3", 10**18, None])
def test_a_step_is_a_number(step, tmp_path):
    with pytest.raises(Unsupported, match=f"A step is an int from 0 up .*got {step!r}"):
        octavo.save_checkpoint(tmp_path, nn.Linear(2, 2), step=step)


# -- one part at a time ------------------------------------------------------------------------------------------------


def test_loading_a_checkpoint_brings_the_scales_of_delayed_scaling_back(saved):
    path, model, _ = saved
    octavo.load_checkpoint(path, model)
    found = octavo.state_dict(model)
    wanted = load_file(path / "recipe.safetensors")
    assert wanted["up.scaling.forward.head"].tolist() == [3, 3]
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
