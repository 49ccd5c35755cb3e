"""octavo.integrations, with stand-ins for the packages: what is attached, saved, loaded and refused.

`python -m tests.integration resuming` runs them with the packages themselves.
"""

import importlib
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import InvalidCheckpoint, Unsupported
from octavo.integrations import recipe_file
from tests.support.processes import output_of

pytestmark = pytest.mark.filterwarnings("ignore:fp8-delayed. octavo.step")  # after an attachment was removed
NAMES = {"hugging_face": "transformers", "accelerate": "accelerate", "lightning": "lightning"}


def made(recipe="fp8-delayed", seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    octavo.convert(model, recipe)
    return model, torch.optim.AdamW(model.parameters())


def step(model, optimizer):
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()


def assert_state(model, other):
    found, wanted = octavo.state_dict(model), octavo.state_dict(other)
    assert wanted and all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def stepped(model):
    """How many steps have entered the windows."""
    return octavo.state_dict(model)["0.scaling.forward.head"].tolist()


class Handle:
    def __init__(self, hooks, hook):
        self.hooks, self.hook = hooks, hook
        hooks.append(hook)

    def remove(self):
        self.hooks.remove(self.hook)


class Accelerator:
    """A stand-in with the members of an Accelerator that `register` uses."""

    process_index, num_processes = 0, 1

    def __init__(self):
        self.saving, self.loading = [], []

    def register_save_state_pre_hook(self, hook):
        return Handle(self.saving, hook)

    def register_load_state_pre_hook(self, hook):
        return Handle(self.loading, hook)

    def save_state(self, folder):
        for hook in self.saving:
            hook([], [], str(folder))

    def load_state(self, folder):
        for hook in self.loading:
            hook([], str(folder))


@pytest.fixture
def packages(monkeypatch):
    """Puts stand-ins in place of the packages, and returns a function that imports a module of octavo.integrations."""
    for name, members in {
        "transformers": {}, "transformers.trainer_callback": {"TrainerCallback": type("TrainerCallback", (), {}),
                                                              "ExportableState": type("ExportableState", (), {})},
        "accelerate": {"Accelerator": Accelerator},
        "lightning": {}, "lightning.pytorch": {"Callback": type("Callback", (), {})},
    }.items():  # fmt: skip
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return fresh(monkeypatch)


def fresh(monkeypatch):
    def load(name):
        monkeypatch.delitem(sys.modules, f"octavo.integrations.{name}", raising=False)
        return importlib.import_module(f"octavo.integrations.{name}")

    return load


# -- without the packages ----------------------------------------------------------------------------------------------


def test_octavo_imports_no_package_that_it_integrates():
    script = "import sys, octavo\nprint([n for n in sys.modules if 'integrations' in n or n in {names!r}])"
    assert output_of(script.format(names=[*NAMES.values()])).strip() == "[]"


@pytest.mark.parametrize("name", NAMES)
def test_without_the_package_a_sentence_says_what_to_install(name, monkeypatch):
    for package in ("transformers", "transformers.trainer_callback", "accelerate", "lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    module = fresh(monkeypatch)(name)
    with pytest.raises(Unsupported, match=f"needs the package {NAMES[name]}.* pip install {NAMES[name]}"):
        module.register(Accelerator(), *made()) if name == "accelerate" else module.OctavoCallback()


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_file_is_replaced_whole(tmp_path, monkeypatch):
    model, optimizer = made()
    octavo.attach(model, optimizer)
    path = tmp_path / "octavo.safetensors"
    recipe_file.save(path, model)
    before = path.read_bytes()
    step(model, optimizer)
    monkeypatch.setattr(recipe_file.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        recipe_file.save(path, model)
    monkeypatch.undo()
    assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == [path.name]
    recipe_file.save(path, model)
    other, _ = made(seed=1)
    recipe_file.load(path, nn.DataParallel(other))
    assert_state(other, model)


def test_a_changed_byte_anywhere_is_refused(tmp_path):
    model, _ = made("nvfp4")
    path = tmp_path / "octavo.safetensors"
    recipe_file.save(path, model)
    content, before = path.read_bytes(), octavo.state_dict(model)
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(Unsupported):
            recipe_file.load(path, model)
    assert all(torch.equal(octavo.state_dict(model)[name], tensor) for name, tensor in before.items())


# -- transformers ------------------------------------------------------------------------------------------------------


class Trainer:
    """The events of transformers' Trainer, in its order, and the parts of its state that callbacks see."""

    def __init__(self, folder, callback, model, optimizer, **args):
        names = {"process_index": 0, "world_size": 1, "resume_from_checkpoint": None}
        self.args = types.SimpleNamespace(**{**names, "output_dir": str(folder), **args})
        self.callback, self.model, self.optimizer = callback, model, optimizer
        self.state = types.SimpleNamespace(
            global_step=0, is_hyper_param_search=False, stateful_callbacks={"OctavoCallback": callback.state()}
        )

    def event(self, name):
        getattr(self.callback, name)(
            self.args, self.state, None, model=self.model, optimizer=self.optimizer, lr_scheduler=None
        )

    def resume(self, folder):
        vars(self.state).update(json.loads((folder / "trainer_state.json").read_text()))
        self.event("on_train_begin")

    def train(self, steps):
        self.event("on_train_begin")
        for _ in range(steps):
            step(self.model, self.optimizer)
            self.state.global_step += 1
        self.save()
        self.event("on_train_end")

    def save(self):
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        folder.mkdir(parents=True)
        self.state.stateful_callbacks["OctavoCallback"] = self.callback.state()
        (folder / "trainer_state.json").write_text(json.dumps(vars(self.state)))
        self.event("on_save")


def test_a_trainer_attaches_while_it_trains(packages, tmp_path):
    callback = packages("hugging_face").OctavoCallback()
    model, optimizer = made()
    trainer = Trainer(tmp_path, callback, model, optimizer)
    trainer.train(3)
    assert stepped(model) == [3, 3]
    step(model, optimizer)
    assert stepped(model) == [3, 3] and callback.attachment is None
    trainer.event("on_train_begin")
    trainer.event("on_train_begin")  # the first was not ended: training raised
    step(model, optimizer)
    assert stepped(model) == [4, 4]


def test_a_trainer_leaves_attaching_to_the_program(packages, tmp_path):
    model, optimizer = made()
    octavo.attach(model, optimizer)
    Trainer(tmp_path, packages("hugging_face").OctavoCallback(attach=False), model, optimizer).train(2)
    assert stepped(model) == [2, 2]


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_trainer_saves_and_resumes_the_state(recipe, elsewhere, packages, tmp_path):
    callback, saved = packages("hugging_face").OctavoCallback, tmp_path / "a/checkpoint-3"
    model, optimizer = made(recipe)
    Trainer(tmp_path / "a", callback(), model, optimizer).train(3)
    assert (saved / "octavo.safetensors").is_file()
    resumed, other = made(recipe, seed=1)
    own = callback(resume_from=saved) if elsewhere else callback()
    trainer = Trainer(tmp_path / ("b" if elsewhere else "a"), own, resumed, other)
    trainer.resume(saved)
    assert_state(resumed, model)


def test_a_trainer_refuses_the_state_of_another_run(packages, tmp_path):
    callback = packages("hugging_face").OctavoCallback
    for name, seed in (("a", 0), ("b", 1)):
        Trainer(tmp_path / name, callback(), *made(seed=seed)).train(3)
    resumed, other = made(seed=2)
    before = octavo.state_dict(resumed)
    for folder in ("b", "c"):  # a file of another run, and no file
        trainer = Trainer(tmp_path / folder, callback(), resumed, other)
        with pytest.raises(InvalidCheckpoint, match=r"is not at .*checkpoint-3.*Pass OctavoCallback\(resume_from="):
            trainer.resume(tmp_path / "a/checkpoint-3")
    assert all(torch.equal(octavo.state_dict(resumed)[name], tensor) for name, tensor in before.items())


def test_a_trainer_refuses_a_checkpoint_without_state(packages, tmp_path):
    callback = packages("hugging_face").OctavoCallback
    Trainer(tmp_path, callback(), *made("fp8-current")).train(1)
    state = tmp_path / "checkpoint-1/trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"stateful_callbacks": {}}))
    with pytest.raises(InvalidCheckpoint, match="saved without OctavoCallback"):
        Trainer(tmp_path, callback(), *made()).resume(tmp_path / "checkpoint-1")
    stateless = made("fp8-current", seed=1)
    Trainer(tmp_path, callback(), *stateless).resume(tmp_path / "checkpoint-1")
    assert octavo.state_dict(stateless[0]) == {}


def test_each_process_of_a_trainer_has_its_own_file(packages, tmp_path):
    callback = packages("hugging_face").OctavoCallback
    models = []
    for process in range(2):
        models.append(made("nvfp4", seed=process)[0])
        optimizer = torch.optim.AdamW(models[-1].parameters())
        trainer = Trainer(tmp_path, callback(), models[-1], optimizer, process_index=process, world_size=2)
        trainer.state.global_step = 2
        (tmp_path / "checkpoint-2").mkdir(exist_ok=True)
        trainer.event("on_save")
    assert sorted(path.name for path in (tmp_path / "checkpoint-2").iterdir()) == [
        "octavo-0.safetensors",
        "octavo-1.safetensors",
    ]
    resumed, optimizer = made("nvfp4", seed=5)
    trainer = Trainer(tmp_path, callback(), resumed, optimizer, process_index=1, world_size=2)
    trainer.state.global_step = 2
    trainer.event("on_train_begin")
    assert_state(resumed, models[1])


# -- accelerate --------------------------------------------------------------------------------------------------------


def test_an_accelerator_saves_and_loads_the_state(packages, tmp_path):
    register = packages("accelerate").register
    model, optimizer = made()
    accelerator = Accelerator()
    handle = register(accelerator, model, optimizer)
    step(model, optimizer)
    accelerator.save_state(tmp_path)
    assert stepped(model) == [1, 1] and (tmp_path / "octavo.safetensors").is_file()
    resumed, other = made(seed=1)
    second = Accelerator()
    with register(second, resumed, other):
        second.load_state(tmp_path)
        assert_state(resumed, model)
    assert second.saving == second.loading == []
    handle.remove()
    step(model, optimizer)
    assert stepped(model) == [1, 1] and accelerator.saving == accelerator.loading == []


def test_an_accelerator_refuses_what_it_cannot_load(packages, tmp_path):
    register = packages("accelerate").register
    model, optimizer = made()
    accelerator = Accelerator()
    register(accelerator, model)
    with pytest.raises(InvalidCheckpoint, match="saved without octavo"):
        accelerator.load_state(tmp_path)
    (tmp_path / "octavo.safetensors").write_bytes(b"PK\x03\x04" + bytes(99))
    with pytest.raises(InvalidCheckpoint, match="a pickle can run code"):
        accelerator.load_state(tmp_path)
    with pytest.raises(Unsupported, match=r"takes an accelerate\.Accelerator first, got Sequential"):
        register(model, accelerator)
    with pytest.raises(Unsupported, match="takes a model"):
        register(accelerator, optimizer)


# -- Lightning ---------------------------------------------------------------------------------------------------------


def test_lightning_saves_and_loads_the_state(packages):
    callback = packages("lightning").OctavoCallback()
    model, optimizer = made()
    trainer, checkpoint = types.SimpleNamespace(optimizers=[optimizer]), {}
    callback.on_train_start(trainer, model)
    step(model, optimizer)
    callback.on_save_checkpoint(trainer, model, checkpoint)
    assert stepped(model) == [1, 1] and all(type(t) is torch.Tensor for t in checkpoint["octavo"].values())
    callback.on_exception(trainer, model, RuntimeError())
    step(model, optimizer)
    assert stepped(model) == [1, 1]
    callback.on_train_start(trainer, model)
    callback.on_train_end(trainer, model)
    assert callback.attachments == []
    resumed, _ = made(seed=1)
    callback.on_load_checkpoint(trainer, resumed, checkpoint)
    assert octavo.state_dict(resumed)["0.scaling.forward.head"].tolist() == [1, 1]


def test_lightning_refuses_a_checkpoint_without_state(packages):
    callback = packages("lightning").OctavoCallback()
    with pytest.raises(InvalidCheckpoint, match="saved without OctavoCallback"):
        callback.on_load_checkpoint(None, made()[0], {})
    stateless, _ = made("fp8-current")
    callback.on_load_checkpoint(None, stateless, {})
    assert octavo.state_dict(stateless) == {}
