"""`octavo explain`: what it prints and writes, its exit codes, and what it refuses."""

import json
import sys
import textwrap

import pytest

from octavo.cli import main

MODULE = """
    import torch
    from torch import nn

    import octavo

    class Chatty(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = octavo.Linear(16, 16, recipe="fp8-current")

        def forward(self, x):
            x = self.layer(x)
            print("hello")
            return self.layer(x)

    def rows(m):
        return torch.ones(m, 16)

    def clean():
        return octavo.Linear(16, 16, recipe="fp8-current"), rows(4)

    def sizes():
        return octavo.Linear(16, 16, recipe="fp8-current"), [(rows(4),), (rows(5),)]

    def broken():
        return Chatty(), rows(4)

    def skipped():
        from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

        class Skipped(nn.Module):
            def forward(self, x):
                self.skip()
                return x + 1

            @torch.compiler.disable
            def skip(self):
                log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to a test")

        return Skipped(), rows(4)

    def nothing():
        return None

    def alone():
        return octavo.Linear(16, 16),

    def only():
        return octavo.Linear(16, 16)

    def loose():
        return octavo.Linear(16, 16), [rows(4)]

    number = 3
"""


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    (tmp_path / "subject_of_explain.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "bad_import.py").write_text("import no_such_package")
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("subject_of_explain", None)


def command(function, *arguments):
    return main(["explain", f"subject_of_explain:{function}", *arguments])


def test_prints_a_report(capsys):
    path = list(sys.path)
    assert command("clean") == 0
    printed = capsys.readouterr().out
    assert "1 graph, 0 breaks, 0 recompiles" in printed
    assert "octavo::run 1" in printed and "octavo::run_bwd 1" in printed
    assert "fp8-current" in printed
    assert sys.path == path


def test_a_clean_model_passes_every_condition(capsys):
    assert command("clean", "--fail-on", "break,recompile,skip") == 0
    assert "octavo explain:" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "condition", "sentence"),
    [
        ("broken", "break", "--fail-on break: 1 graph break. The first: subject_of_explain.py:14 in forward: "),
        ("sizes", "recompile", "--fail-on recompile: 1 recompile. The first: "),
        ("skipped", "skip", "--fail-on skip: 1 cudagraph skip. The first: skipping cudagraphs due to a test"),
    ],
)
def test_a_condition_that_is_met_is_exit_code_1_and_a_sentence(function, condition, sentence, capsys):
    others = {"break", "recompile", "skip"} - {condition} - ({"break"} if function == "skipped" else set())
    assert command(function) == 0
    assert command(function, "--fail-on", ",".join(others)) == 0
    assert sentence not in capsys.readouterr().err
    assert command(function, "--fail-on", f" {condition} ") == 1
    assert f"octavo explain: {sentence}" in capsys.readouterr().err


def test_every_condition_that_is_met_has_its_sentence(capsys):
    assert command("skipped", "--fail-on", "break,recompile,skip") == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("octavo explain:")]
    assert [line.split()[3] for line in said] == ["break:", "skip:"]


def test_json_goes_to_a_file_besides_the_text(tmp_path, capsys):
    assert command("sizes", "--json", str(tmp_path / "report.json")) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["graphs"], len(report["recompiles"])) == (2, 1)
    assert "2 graphs" in capsys.readouterr().out


def test_json_alone_on_the_output_whatever_the_model_prints(capsys):
    assert command("broken", "--json", "-", "--fail-on", "break") == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["graphs"] == 2
    assert "hello" in printed.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["subject_of_explain"], "The target is module:function, got 'subject_of_explain'."),
        (["no_such_module:f"], "no_such_module cannot be imported: No module named 'no_such_module'."),
        (["bad_import:f"], "bad_import cannot be imported: No module named 'no_such_package'."),
        (["subject_of_explain:missing"], "subject_of_explain has no function missing."),
        (["subject_of_explain:number"], "subject_of_explain has no function number."),
        (["subject_of_explain:nothing"], "must return (model, *inputs), a torch.nn.Module first, got NoneType."),
        (
            ["subject_of_explain:alone"],
            "must return (model, *inputs), a torch.nn.Module first, got a model without inp",
        ),
        (["subject_of_explain:only"], "got a model without inputs (Linear). Or (model, [(x1, y1), (x2, y2)])."),
        (["subject_of_explain:loose"], "one tuple of arguments for each call, got a list of (Tensor)."),
        (["subject_of_explain:clean", "--fail-on", "brake"], "takes a list of break, recompile, skip, got 'brake'."),
        (["subject_of_explain:clean", "--mode", "fast"], "mode must be one of 'default'"),
        (["subject_of_explain:clean", "--json", "nowhere/r.json"], "--json writes into a folder that exists, got"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_refusal_is_a_sentence(arguments, sentence, monkeypatch, capsys):
    monkeypatch.setattr("octavo.cli.train.shutil.which", lambda name: name)
    assert main(["explain", *arguments]) == 2
    assert sentence in capsys.readouterr().err
