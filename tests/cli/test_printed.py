"""What reaches a terminal or a reader of JSON: names may hold codes that a terminal obeys, and numbers may be NaN."""

import json
import math
import sys
import textwrap
import warnings

import pytest
import torch
from torch import nn

import octavo
from octavo.cli import main, output
from octavo.errors import Unsupported, UnsupportedConfig, warn_caller
from octavo.inspection.webpage import Markup, document, paragraph

EVIL = "a\x1b]0;title\x07\x9b31m\u202e\ud800\nline"
HARMLESS = r"a\x1b]0;title\x07\x9b31m\u202e\ud800\nline"

MODULE = f"""
    import torch
    from torch import nn

    import octavo

    class Named(nn.Module):
        def __init__(self, recipe=None):
            super().__init__()
            torch.manual_seed(0)
            self.add_module({EVIL!r}, octavo.Linear(64, 64, recipe=recipe) if recipe else nn.Linear(64, 64))

        def forward(self, x):
            return next(self.children())(x)

    def plain():
        return Named(), torch.randn(32, 64)

    def converted():
        return Named("mxfp8"), torch.randn(32, 64)

    def broken():
        model, x = converted()
        next(model.children()).weight.data.fill_(float("nan"))
        return model, x

    def infinite():
        model, x = plain()
        return model, x / 0.0
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "subject_of_printing.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("subject_of_printing", None)


def run(command, function, *arguments):
    return main([command, f"subject_of_printing:{function}", *arguments])


def is_harmless(text):
    assert all(c.isprintable() or c == "\n" for c in text), ascii(text)
    return True


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [("inspect", "broken"), ("inspect", "broken", "--fail"), ("inspect", "converted"),
     ("compare", "plain", "mxfp8", "nvfp4"), ("explain", "converted")],
    ids=" ".join,
)  # fmt: skip
def test_commands_escape_names(command, capsys):
    run(*command)
    said = capsys.readouterr()
    assert is_harmless(said.out) and is_harmless(said.err)
    assert HARMLESS in said.out + said.err


@pytest.mark.parametrize("command", [("inspect", "broken"), ("compare", "plain", "mxfp8", "nvfp4")], ids=" ".join)
def test_pages_escape_names(command, tmp_path):
    assert run(*command, "--html", "page.html") == 0
    text = (tmp_path / "page.html").read_text()
    assert is_harmless(text)
    assert HARMLESS.removesuffix(r"\nline") in text


def test_json_keeps_names(capsys):
    assert run("inspect", "converted", "--json", "-") == 0
    printed = capsys.readouterr().out
    assert is_harmless(printed)
    assert {row["layer"] for row in json.loads(printed)["tensors"]} == {EVIL}


def named(kind=nn.Linear):
    model = nn.Module()
    model.add_module(EVIL, kind(16, 16))
    return model


def test_a_conversions_report_escapes_names():
    model = named()
    report = octavo.convert(model, "mxfp8")
    assert is_harmless(str(report)) and HARMLESS in str(report)
    assert report.rows[0].path == EVIL


def test_errors_and_warnings_escape_names():
    for kind in (Unsupported, UnsupportedConfig, octavo.errors.UnknownSetting, octavo.errors.InvalidCheckpoint):
        assert is_harmless(str(kind(f"{EVIL} is wrong.")))
    with pytest.raises(Unsupported) as caught:
        octavo.quantize_weights(named())
    assert is_harmless(str(caught.value))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        warn_caller(f"{EVIL} is old.")
    assert is_harmless(str(heard[0].message))


def test_a_page_keeps_spaces_and_letters():
    text = "naïve Grüße 你好 100\u00a0% 1\u202f000 – ±"
    assert text in document("title", Markup(""), [paragraph(text)])


# -- numbers -----------------------------------------------------------------------------------------------------------


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    "command",
    [("compare", "broken", "mxfp8", "nvfp4"), ("compare", "infinite", "mxfp8", "nvfp4")],
    ids=" ".join,
)
def test_reports_are_json_whatever_the_numbers_are(command, capsys, tmp_path):
    assert run(*command, "--json", "-") == 0
    printed = strict(capsys.readouterr().out)
    assert run(*command, "--json", "report.json") == 0
    saved = strict((tmp_path / "report.json").read_text())
    assert saved.pop("command").endswith("--json report.json") and printed.pop("command").endswith("--json -")
    assert saved == printed
    assert any(word in json.dumps(printed) for word in ('"NaN"', '"Infinity"'))


def test_numbers_that_are_not_finite_are_strings_that_read_back():
    report = {"a": [1.5, math.nan, (math.inf, -math.inf)], "b": {"c": math.nan, "d": None, "e": True, "f": 3}}
    found = strict(output.as_json(report))
    assert found == {"a": [1.5, "NaN", ["Infinity", "-Infinity"]], "b": {"c": "NaN", "d": None, "e": True, "f": 3}}
    assert math.isnan(float(found["b"]["c"])) and float(found["a"][2][1]) == -math.inf


def test_a_diverged_run_is_json(monkeypatch, capsys):
    def fill(report):
        report["losses"] = [2.0, float(torch.tensor(float("nan")))]

    output.produce(fill, lambda report: "text", "-")
    assert strict(capsys.readouterr().out) == {"losses": [2.0, "NaN"]}
