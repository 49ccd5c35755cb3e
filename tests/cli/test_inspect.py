"""`octavo inspect` and `octavo compare`: what they print and write, their exit codes, and what they refuse."""

import json
import sys
import textwrap

import pytest

import octavo
from octavo.cli import main

MODULE = """
    import torch
    from torch import nn

    import octavo

    def plain():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        return model, [(torch.randn(32, 64),), (torch.randn(32, 64),)]

    def converted():
        model, batches = plain()
        octavo.convert(model, "fp8-delayed")
        return model, *batches[0]

    def broken():
        model, batches = plain()
        print("hello")
        octavo.convert(model, "mxfp8")
        model[2].requires_grad_(False)
        model[0].weight.data.fill_(float("nan"))
        return model, batches

    def outlier():
        model, batches = plain()
        model[2].weight.data[0, 0] = 1e5
        return model, batches

    def arguments(size, depth=2):
        return plain()

    def no_linear():
        return nn.LayerNorm(64), torch.randn(4, 64)
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "subject_of_inspect.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("subject_of_inspect", None)


def run(command, function, *arguments):
    return main([command, f"subject_of_inspect:{function}", *arguments])


def test_a_plain_model_is_inspected_in_the_recipe_that_is_named(capsys, tmp_path):
    assert run("inspect", "plain", "--recipe", "nvfp4", "--steps", "3", "--html", "r.html", "--json", "r.json") == 0
    said = capsys.readouterr().out
    assert said.startswith("2 layers over 3 steps\n") and "\n\nNothing stands out.\n\n  tensor  format" in said
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["findings"] == []
    assert {(t["layer"], t["tensor"], t["calls"]) for t in report["tensors"]} >= {("0", "x", 3), ("2", "dx", 3)}
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")


def test_a_model_keeps_its_own_recipes(capsys):
    assert run("inspect", "converted", "--json", "-", "--fail") == 0
    report = json.loads(capsys.readouterr().out)
    assert {t["cast"] for t in report["tensors"]} == {"tensorwise", "tensorwise(fmt=E5M2)", ""}


def test_findings_fail_if_they_shall(capsys):
    assert run("inspect", "broken") == 0
    assert "0: w has Inf or NaN in 100.00 % of its values." in capsys.readouterr().out
    assert run("inspect", "broken", "--fail") == 1
    assert "octavo inspect: --fail: " in capsys.readouterr().err


def test_advice_is_tried_and_written_as_a_policy_that_other_commands_take(capsys, tmp_path):
    options = ["--recipe", "fp8-current", "--steps", "2", "--top", "1"]
    assert run("inspect", "outlier", *options, "--write-policy", "p.toml", "--html", "r.html") == 0
    said = capsys.readouterr().out
    assert said.index("2: w underflows: ") < said.index("Tried on the same batches:") < said.index("  tensor  format")
    assert "report.try_recipes" not in said, "the advice is there"
    assert "instead of" in said and said.rstrip().endswith("Left out: 1 layer, none of them with a finding.")
    assert "octavo inspect subject_of_inspect:outlier --policy policy.toml" in (tmp_path / "r.html").read_text()
    policy = octavo.Policy.load("p.toml")
    assert [rule.layers for rule in policy.rules] == [("2",), ("*",)] and str(policy.rules[1].recipe) == "fp8-current"
    assert str(policy.rules[0].recipe) != "fp8-current"
    assert run("inspect", "outlier", "--policy", "p.toml") == 0
    assert "Nothing stands out." in capsys.readouterr().out
    assert run("compare", "outlier", "fp8-current", "--policy", "p.toml") == 0
    assert "B  policy  " in capsys.readouterr().out.replace("policy       ", "policy  ")
    assert run("inspect", "outlier", *options, "--no-advice") == 0
    said = capsys.readouterr().out
    assert "Tried" not in said and "report.try_recipes(batches) tries other recipes" in said


def test_a_model_is_explained_in_the_recipe_that_is_named(capsys):
    assert run("explain", "plain", "--recipe", "fp8-block") == 0
    assert "fp8-block" in capsys.readouterr().out


def test_two_recipes_are_compared(capsys, tmp_path):
    assert run("compare", "plain", "mxfp8", "nvfp4", "--steps", "3", "--html", "c.html", "--json", "c.json") == 0
    said = capsys.readouterr().out
    assert said.startswith("Gradients over 3 batches\n") and "B  nvfp4        mean loss " in said
    report = json.loads((tmp_path / "c.json").read_text())
    assert report["recipes"] == ["mxfp8", "nvfp4"] and report["gradients"][0]["parameter"] == "(all)"
    assert "octavo compare subject_of_inspect:plain mxfp8 nvfp4" in (tmp_path / "c.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["inspect", "subject_of_inspect:plain"], "has no layer of Octavo in its Sequential. Name a recipe"),
        (["inspect", "subject_of_inspect"], "The target is module:function"),
        (
            ["inspect", "folder/subject_of_inspect.py:plain"],
            "Name the module, not its file: run this in the folder it lies in, with subject_of_inspect:plain.",
        ),
        (
            ["explain", "subject_of_inspect:arguments"],
            "is called without arguments, and takes (size, depth=2): missing a required argument: 'size'. Give them",
        ),
        (["inspect", "subject_of_inspect:no_linear", "--recipe", "mxfp8"], "No layer of this LayerNorm can run in a"),
        (["compare", "subject_of_inspect:no_linear", "mxfp8", "nvfp4"], "No layer of this LayerNorm can run in a"),
        (["inspect", "subject_of_inspect:plain", "--recipe", "fp9"], "There is no recipe"),
        (
            ["inspect", "subject_of_inspect:plain", "--html", "nowhere/r.html"],
            "--html writes into a folder that exists",
        ),
        (["compare", "subject_of_inspect:plain", "mxfp8", "fp9"], "There is no recipe"),
        (["compare", "subject_of_inspect:plain", "mxfp8"], "takes two recipes, or one and --policy FILE."),
        (["inspect", "subject_of_inspect:plain", "--recipe", "mxfp8", "--policy", "p"], "Leave one out."),
    ],
)
def test_refusals(arguments, says, capsys):
    assert main(arguments) == 2
    assert says in capsys.readouterr().err
