"""octavo.integrations.torchtitan, with a stand-in for torchtitan's configs: a model is converted where it is built, and
its optimizers end Octavo's step and keep its state.

`python -m tests.integration.titan_on_cpu` runs the real trainer.
"""

import importlib
import logging
import sys
import types
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import InvalidCheckpoint, Unsupported, UnsupportedConfig


class Configurable:
    """torchtitan's base class: a config builds the class that it is written in."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        def build(self, **given):
            return self._owner(config=replace(self), **given)

    def __init_subclass__(cls):
        if "Config" in cls.__dict__:
            cls.Config._owner = cls


class BaseModel(nn.Module, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        width: int = 16

    def __init__(self, config):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(config.width, config.width), nn.Linear(config.width, config.width))
        self.lm_head = nn.Linear(config.width, 4)


class OptimizersContainer(torch.optim.Optimizer, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        lr: float = 0.1

    def __init__(self, config, *, model_parts):
        self.own = torch.optim.SGD([p for part in model_parts for p in part.parameters()], lr=config.lr)
        super().__init__([p for part in model_parts for p in part.parameters()], {})

    def step(self):
        self.own.step()

    def state_dict(self):
        return {"lr": self.own.param_groups[0]["lr"]}

    def load_state_dict(self, state):
        assert list(state) == ["lr"]


def derive(source, kind, **more):
    return kind(**{one.name: getattr(source, one.name) for one in fields(source)}, **more)


@pytest.fixture
def titan(monkeypatch):
    """Puts the stand-in in torchtitan's place, and returns octavo.integrations.torchtitan."""
    targets = []

    def override(*, target, description):
        targets.append(target)
        return lambda function: function

    for name, members in {
        "torchtitan": {}, "torchtitan.components": {}, "torchtitan.tools": {},
        "torchtitan.components.optimizer": {"OptimizersContainer": OptimizersContainer},
        "torchtitan.config": {"Configurable": Configurable},
        "torchtitan.config.override": {"override": override, "derive": derive},
        "torchtitan.protocols": {"BaseModel": BaseModel},
        "torchtitan.tools.logging": {"logger": logging.getLogger("titan")},
    }.items():  # fmt: skip
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "octavo.integrations.torchtitan", raising=False)
    module = importlib.import_module("octavo.integrations.torchtitan")
    module.targets = targets
    yield module
    sys.modules.pop("octavo.integrations.torchtitan", None)


def built(titan, seed=0, recipe="fp8-delayed"):
    torch.manual_seed(seed)
    config = BaseModel.Config()
    assert titan.convert(config, recipe=recipe) is config  # torchtitan builds the object that it has
    model = config.build()
    optimizers = titan.convert(OptimizersContainer.Config(lr=0.5), recipe=recipe).build(model_parts=[model])
    return model, optimizers


def step(model, optimizers):
    model.lm_head(model.body(torch.randn(4, 16))).square().mean().backward()
    optimizers.step()


def test_one_name_stands_for_the_model_and_the_optimizers(titan):
    (target,) = titan.targets
    assert isinstance(BaseModel.Config(), target) and isinstance(OptimizersContainer.Config(), target)
    assert not isinstance(Configurable.Config(), target)


def test_a_model_is_converted_where_it_is_built(titan):
    model, optimizers = built(titan)
    assert [type(layer) is octavo.Linear for layer in (*model.body, model.lm_head)] == [True, True, False]
    assert isinstance(model, BaseModel) and optimizers.state_dict()["lr"] == 0.5
    assert type(BaseModel.Config().build().body[0]) is nn.Linear  # other configs of the class are as they were
    with pytest.raises(UnsupportedConfig, match="names no recipe"):
        titan.convert(BaseModel.Config()).build()


def test_a_file_has_the_settings(titan, tmp_path):
    (tmp_path / "octavo.toml").write_text('recipe = "fp8-block"\nexclude = "body.0"\n')
    config = BaseModel.Config()
    titan.convert(config, config=str(tmp_path / "octavo.toml"))
    model = config.build()
    assert type(model.body[0]) is nn.Linear and str(model.body[1].recipe) == "fp8-block"


def test_optimizers_end_the_step_and_keep_its_state(titan):
    model, optimizers = built(titan)
    step(model, optimizers)
    step(model, optimizers)
    saved = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in optimizers.state_dict().items()}
    assert saved["octavo.body.0.scaling.forward.head"].tolist() == [2, 2]  # steps that have entered the windows
    other, others = built(titan, seed=1)
    others.load_state_dict(saved)
    wanted = octavo.state_dict(model)
    assert wanted and all(torch.equal(t, wanted[name]) for name, t in octavo.state_dict(other).items())
    with pytest.raises(InvalidCheckpoint, match=r"without octavo.*torchtitan, or by another number"):
        others.load_state_dict({"lr": 0.5})


def test_recipes_without_state_load_any_checkpoint(titan):
    model, optimizers = built(titan, recipe="fp8-current")
    step(model, optimizers)
    assert list(optimizers.state_dict()) == ["lr"]
    optimizers.load_state_dict({"lr": 0.5})


def test_without_the_package_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    monkeypatch.delitem(sys.modules, "octavo.integrations.torchtitan", raising=False)
    with pytest.raises(Unsupported, match=r"needs the package torchtitan.* pip install torchtitan"):
        importlib.import_module("octavo.integrations.torchtitan")
