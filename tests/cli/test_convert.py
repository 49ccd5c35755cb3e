"""`octavo convert --dry-run`: the report of a conversion, of a recipe or of a policy, and what it refuses."""

import json
import sys
import textwrap

import pytest

from octavo.cli import main

MODULE = """
    import torch
    from torch import nn

    def plain():
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(4, 64)
"""
TARGET = "subject_of_convert:plain"


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "subject_of_convert.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("subject_of_convert", None)


def test_the_report_of_a_recipe_is_printed_and_written(capsys, tmp_path):
    assert main(["convert", "--dry-run", TARGET, "--recipe", "fp8-block", "--json", "c.json"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("Converted 2 layers (100.0% of the weights).")
    assert json.loads((tmp_path / "c.json").read_text())["rows"][0]["recipe"] == "fp8-block"


def test_a_policy_decides_for_each_layer(capsys, tmp_path):
    (tmp_path / "p.toml").write_text('[[rules]]\nlayers = "2"\nrecipe = "mxfp8"\n')
    assert main(["convert", "--dry-run", TARGET, "--policy", "p.toml"]) == 0
    said = capsys.readouterr().out
    assert "mxfp8" in said and "Converted 1 layer " in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--recipe", "mxfp8"], "writes no model. Pass --dry-run"),
        (["--dry-run"], "takes one of --recipe R and --policy FILE"),
        (["--dry-run", "--recipe", "mxfp8", "--policy", "p.toml"], "takes one of --recipe R and --policy FILE"),
        (["--dry-run", "--recipe", "fp9"], "There is no recipe"),
    ],
)
def test_refusals(options, says, capsys):
    assert main(["convert", TARGET, *options]) == 2
    assert says in capsys.readouterr().err
