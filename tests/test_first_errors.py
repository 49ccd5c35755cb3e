"""The errors that a new user is likely to meet, along the way from a model to a checkpoint: each says what to do.

Those of docs/troubleshooting.md run with the page, text by text. Those of a version of torch that is too old are in
test_torch_version.py, those of damaged checkpoints in tests/checkpoints.
"""

import pytest
import torch
from torch import nn

import octavo
from octavo.cli import main


def layer(recipe="fp8-current"):
    return octavo.Linear(16, 16, recipe=recipe)


def policy(folder, text):
    path = folder / "policy.toml"
    path.write_text(text)
    return octavo.Policy.load(path)


def text_file(folder):
    path = folder / "notes.txt"
    path.write_text("no checkpoint")
    return path


X, SGD = torch.randn(4, 16), torch.optim.SGD

CALLS = {  # what a user does, and the way out that the error names
    "convert a list": (lambda _: octavo.convert([layer()], "mxfp8"), "Call it for each module, or pass nn.ModuleList"),
    "convert without a recipe": (lambda _: octavo.convert(nn.Linear(4, 4), None), "Names: bf16, fp8-block"),
    "a recipe of another library": (lambda _: octavo.recipe("float8"), "Names: bf16, fp8-block"),
    "half a name": (lambda _: octavo.autocast("fp8").__enter__(), "Did you mean 'fp8-block' or 'fp8-current'"),
    "a batch of integers": (lambda _: layer()(torch.ones(4, 16, dtype=torch.int64)), "Cast x first."),
    "a batch and a layer in float64": (
        lambda _: octavo.Linear(16, 16).double()(X.double()), "float64 and torch.float64. Cast both: module.float()(x.f"
    ),
    "a batch and a norm in float64": (lambda _: octavo.ops.RMSNorm(16).double()(X.double()), "Cast both"),
    "a batch and a mixture in float64": (lambda _: octavo.MoE(16, 16, 4, 2).double()(X.double()), "Cast both"),
    "a batch and groups in float64": (
        lambda _: octavo.GroupedLinear(2, 16, 16).double()(X.double(), torch.tensor([2, 2])), "Cast both"
    ),
    "a layer in float64": (lambda _: octavo.Linear(16, 16).double()(X), "Cast the layer: layer.float()."),
    "a batch of another width": (lambda _: layer()(torch.randn(4, 8)), "Check the layer before it, or in_features."),
    "attach before convert": (
        lambda _: octavo.attach(m := nn.Linear(4, 4), SGD(m.parameters(), 0.1)),
        "Call octavo.convert(model, recipe) first",
    ),
    "attach another model's optimizer": (
        lambda _: octavo.attach(layer(), SGD(nn.Linear(4, 4).parameters(), 0.1)),
        "Build it from model.parameters()",
    ),
    "an activation that is none": (lambda _: octavo.LayerNormMLP(16, 32, activation="relu6"), "Did you mean 'relu'?"),
    "more experts for a token than there are": (lambda _: octavo.MoE(16, 16, 4, 8), "a number from 1 to 4"),
    "a policy that is not there": (lambda f: octavo.Policy.load(f / "no.toml"), "Name a TOML file with a table"),
    "a policy that is no TOML": (lambda f: policy(f, "[[rules]\n"), "(at line 1, column 8). Correct it."),
    "a key that is wrong": (lambda f: policy(f, '[[rules]]\nlayer = "*"\n'), "Did you mean 'layers'?"),
    "a rule without a recipe": (lambda f: policy(f, '[[rules]]\nlayers = "*"\n'), "Give it one, or recipe = 'none'"),
    "inspect before convert": (lambda _: octavo.inspect(nn.GELU()).__enter__(), "Call octavo.convert(model, recipe)"),
    "compare on a tensor": (lambda _: octavo.compare(layer(), X, "mxfp8", "nvfp4"), "Write [x], or [(x, y)]"),
    "compare without layers": (lambda _: octavo.compare(nn.GELU(), [X], "mxfp8", "nvfp4"), "Pass a model with nn."),
    "load from nowhere": (lambda f: octavo.load_checkpoint(f / "no", layer()), "Pass the folder that octavo."),
    "load from an empty folder": (lambda f: octavo.load_checkpoint(f, layer()), "Pass the folder that octavo."),
    "save over a file": (lambda f: octavo.save_checkpoint(text_file(f), layer(), step=1), "Name another folder."),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_mistake_in_python_is_told_the_way_out(name, tmp_path):
    call, way_out = CALLS[name]
    with pytest.raises(octavo.errors.Unsupported) as caught:
        call(tmp_path)
    assert way_out in str(caught.value)


COMMANDS = {
    "no GPU": (["train", "--device", "cuda"], "Use --device cpu."),
    "no such device": (["doctor", "--device", "tpu"], "Use cpu or cuda[:index]."),
    "a bench without a GPU": (["bench", "linear"], "Run it on a machine that has one."),
    "a page in no folder": (["train", "--html", "nowhere/page.html"], "Make it first."),
    "resume without a folder": (["train", "--resume"], "Pass --out DIR too."),
    "a text that is not there": (["train", "--data", "nowhere.txt"], "Name a file of text, or leave --data out"),
    "a size that is none": (["train", "--size", "8B"], "width,layers,heads,context such as 256,4,4,128"),
    "a policy that is not there": (["train", "--policy", "nowhere.toml"], "Name a TOML file"),
    "a module that is not here": (["inspect", "nowhere:example"], "Run this in the folder it lies in, or install it."),
    "a file for a module": (["explain", "nowhere.py:example"], "with nowhere:example."),
    "no function": (["inspect", "nowhere"], "For example: mymodel:example."),
    "a function that is not there": (["compare", "octavo:example", "mxfp8", "nvfp4"], "Define one that returns (model"),
}  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="some of these are errors only without a GPU")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_mistake_in_a_command_is_told_the_way_out(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    command, way_out = COMMANDS[name]
    assert main(command) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"octavo {command[0]}: ") and way_out in said.err
    assert said.err.count("\n") == 1  # one sentence after another on one line, and no traceback
