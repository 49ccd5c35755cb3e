"""octavo.from_config: a conversion as data."""

import json
import sys

import pytest
from torch import nn

import octavo
from octavo.errors import UnknownSetting, UnsupportedConfig
from octavo.model import config_file

TOML = """
[octavo]
recipe = "fp8-current"
exclude = ["out"]
keep_weight_codes = false
[[octavo.rules]]
layers = "blocks.0"
recipe = "fp8-block(scale='fp32')"
[trainer]
steps = 3
"""
YAML = """
base_model: llama
octavo:
  recipe: fp8-current
  exclude: [out]
  keep_weight_codes: false
  rules:
    - {layers: blocks.0, recipe: "fp8-block(scale='fp32')"}
"""


def model():
    return nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(32, 32) for _ in range(2)), "out": nn.Linear(32, 8)})


def check(converted):
    first, second = converted["blocks"]
    assert [str(first.recipe), str(second.recipe)] == ["fp8-block(scale='fp32')", "fp8-current"]
    assert type(converted["out"]) is nn.Linear and not first.keep_weight_codes


def test_a_toml_file_converts_a_model(tmp_path):
    (tmp_path / "octavo.toml").write_text(TOML)
    converted = model()
    report = octavo.from_config(converted, tmp_path / "octavo.toml")
    check(converted)
    assert report.shares()["converted"].layers == 2


def test_a_yaml_file_converts_a_model(tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "axolotl.yaml").write_text(YAML)
    converted = model()
    octavo.from_config(converted, str(tmp_path / "axolotl.yaml"))
    check(converted)


def test_yaml_runs_nothing(tmp_path):
    pytest.importorskip("yaml")
    path, mark = tmp_path / "evil.yml", tmp_path / "mark"
    path.write_text(f"recipe: !!python/object/apply:os.system ['touch {mark}']")
    with pytest.raises(UnsupportedConfig, match="is no YAML of plain data"):
        octavo.from_config(model(), path)
    assert not mark.exists()


def test_aliases_that_stand_for_billions_of_values_are_refused(tmp_path, monkeypatch):
    """YAML reads them as one list in many places, which no one may print; and a list that holds itself."""
    nested = ["x"] * 9
    for _ in range(12):
        nested = [nested] * 9
    endless = []
    endless.append(endless)
    (tmp_path / "a.yaml").write_text("")
    for data in (nested, {"octavo": nested}, {"recipe": endless}):
        monkeypatch.setattr(config_file, "_yaml", lambda name, data=data: lambda text: data)
        with pytest.raises(UnsupportedConfig, match="more than 100000 values") as refused:
            octavo.from_config(model(), tmp_path / "a.yaml")
        assert len(str(refused.value)) < 400


def test_yaml_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "a.yaml").write_text("recipe: bf16")
    with pytest.raises(UnsupportedConfig, match="pip install pyyaml, or write TOML"):
        octavo.from_config(model(), tmp_path / "a.yaml")


def test_a_dict_of_rules_alone_is_a_policy():
    converted = model()
    octavo.from_config(converted, json.loads('{"rules": [{"layers": "blocks.1", "recipe": "mxfp8"}]}'))
    assert type(converted["blocks"][0]) is nn.Linear and str(converted["blocks"][1].recipe) == "mxfp8"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"octavo": "fp8-current"}, "octavo in the config has settings by name, got 'fp8-current'"),
        ({"strict": True}, "the config names no recipe"),
        ({"recipe": "fp8-curent"}, "fp8-curent"),
        ({"recipe": "fp8-current", "exclude": "nowhere"}, "is no path of a module"),
        (3, "takes the path of a TOML or YAML file or a dict, got 3"),
        ("/nowhere/octavo.toml", "cannot be read"),
    ],
)
def test_a_config_that_means_nothing_is_refused(config, said):
    plain = model()
    with pytest.raises(UnsupportedConfig, match=said):
        octavo.from_config(plain, config)
    assert type(plain["blocks"][0]) is nn.Linear


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(UnknownSetting, match=r"no setting 'exlude'.*exclude"):
        octavo.from_config(model(), {"recipe": "bf16", "exlude": "out"})


def test_a_damaged_file(tmp_path):
    (tmp_path / "a.toml").write_text("recipe = ")
    with pytest.raises(UnsupportedConfig, match="is no TOML of plain data"):
        octavo.from_config(model(), tmp_path / "a.toml")
