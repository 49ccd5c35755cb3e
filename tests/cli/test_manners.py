"""Manners of the command line: answers at once, tables of 80 columns, one head for all JSON, words completed."""

import json
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import octavo
from octavo import text
from octavo.cli import main, output
from octavo.cli.bench import SUITES, suite_of
from octavo.cli.commands import COMMANDS
from octavo.cli.completion import bash, described, fish

ROOT = Path(octavo.__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MODULE = """
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a_projection_with_a_long_name = nn.ModuleDict({"post_attention_output_projection": nn.Linear(64, 64)})

        def forward(self, x):
            return self.a_projection_with_a_long_name["post_attention_output_projection"](x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()])})

        def forward(self, x):
            for layer in self.model["layers"]:
                x = torch.relu(layer(x))
            return x

    def example():
        torch.manual_seed(0)
        return Model(), torch.randn(32, 64)
"""
NAME = "model.layers.0.a_projection_with_a_long_name.post_attention_output_projection"


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "subject_of_manners.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    yield "subject_of_manners:example"
    sys.modules.pop("subject_of_manners", None)


def tables(said):
    """The lines of a text that are no sentences and no names alone."""
    return [line for line in said.splitlines() if "  " in line.strip() and "  failed: " not in line]


def is_narrow(said):
    assert tables(said)
    assert [line for line in tables(said) if len(line) > text.WIDE] == []
    return True


# -- tables ------------------------------------------------------------------------------------------------------------


def test_a_long_name_has_a_line_of_its_own():
    rows = [("x" * 70, "12345678", "123456"), ("short", "1", "2")]
    lines = text.table(("name", "number", "other"), rows).splitlines()
    assert lines[2] == "x" * 70 and lines[3].split() == ["12345678", "123456"] and lines[4].split()[0] == "short"
    assert lines[3].index("12345678") == lines[4].index("1") and set(lines[1]) == {"-", " "}


def test_words_of_a_long_last_cell_go_on_in_the_next_line():
    lines = text.columns([("name", "words"), ("a", " ".join(["word"] * 40))])
    assert len(lines) > 3 and all(len(line) <= text.WIDE for line in lines)
    assert [line.index("word") for line in lines] == [6] * len(lines)


def test_a_table_without_room_for_names_is_indented():
    lines = text.columns([("name", *["12345678"] * 8), ("x", *["1"] * 8)])
    assert lines[0] == "name" and lines[2] == "x" and lines[3].startswith("  1")


@pytest.mark.parametrize("suite", SUITES)
def test_tables_of_benches_have_80_columns(suite):
    report = json.loads((RESULTS / f"{suite}-h200.json").read_text())
    said = suite_of(suite).render(report)
    titles = {line for line in said.splitlines() if "; " in line or ", in all" in line or " us of " in line}
    assert is_narrow("\n".join(line for line in said.splitlines() if line not in titles))


@pytest.mark.parametrize(
    "command",
    [("inspect", "--recipe", "nvfp4"), ("compare", "fp8-block(scale='fp32')", "nvfp4"),
     ("explain", "--recipe", "mxfp8"), ("convert", "--dry-run", "--recipe", "fp8-block")],
    ids=lambda command: command[0],
)  # fmt: skip
def test_tables_of_a_model_with_long_names_have_80_columns(command, module, capsys):
    name, *options = command
    assert main([name, module, *options]) == 0
    said = capsys.readouterr().out
    assert is_narrow(said) and NAME.replace(".0.", ".*." if name in ("explain", "convert") else ".0.") in said


def test_a_policy_file_that_inspect_writes_is_one_that_convert_takes(module, capsys):
    assert main(["inspect", module, "--recipe", "nvfp4", "--write-policy", "policy.toml"]) == 0
    assert main(["convert", module, "--dry-run", "--policy", "policy.toml"]) == 0
    assert "nvfp4" in capsys.readouterr().out


# -- JSON --------------------------------------------------------------------------------------------------------------


def test_all_reports_begin_with_the_same_fields(module, capsys):
    for command in (["inspect", module, "--recipe", "mxfp8"], ["compare", module, "mxfp8", "nvfp4"],
                    ["explain", module], ["convert", module, "--dry-run", "--recipe", "mxfp8"]):  # fmt: skip
        assert main([*command, "--json", "-"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert list(found)[:4] == ["schema", "kind", "octavo", "command"]
        assert (found["schema"], found["kind"]) == (output.SCHEMA, command[0])
        assert found["command"].startswith(f"octavo {command[0]} {module}")
    page = (ROOT / "docs" / "cli.md").read_text()
    assert all(f"| `{kind}` |" in page for kind in COMMANDS if kind != "completion")


# -- answers at once ---------------------------------------------------------------------------------------------------


def answered(word, *options):
    """The output of the script that a wheel installs."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from octavo_command import main; main()"
    return subprocess.run([sys.executable, *options, "-c", script, word], capture_output=True, text=True, check=True)


def seconds_of(word):
    """The least of three runs: other work delays one."""
    found = []
    for _ in range(3):
        start = time.perf_counter()
        answered(word)
        found.append(time.perf_counter() - start)
    return min(found)


@pytest.mark.parametrize("word", ["--version", "--help"])
def test_the_command_answers_without_torch(word):
    bare = answered(word, "-X", "importtime")
    imported = [line.rpartition("|")[2].strip() for line in bare.stderr.splitlines()]
    assert "torch" not in imported and bare.stdout.startswith(("octavo", "usage: octavo"))
    assert seconds_of(word) < 1, "0.3 on a machine that is idle"


# -- completion --------------------------------------------------------------------------------------------------------


def completed(script, *words):
    line = f"{script}\nCOMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _octavo; echo ${{COMPREPLY[@]}}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_words_are_completed():
    script = bash([described(name, f"octavo.cli.{module}") for name, module in COMMANDS.items()])
    assert completed(script, "octavo", "in") == ["inspect"]
    assert completed(script, "octavo", "inspect", "a:b", "--w") == ["--write-policy"]
    assert completed(script, "octavo", "train", "--recipe", "fp8-b") == ["fp8-block"]
    assert completed(script, "octavo", "bench", "mo") == ["moe", "model"]
    assert completed(script, "octavo", "completion", "z") == ["zsh"]


def test_scripts_of_all_shells_are_printed(capsys):
    for shell, word in (("bash", "complete -o default"), ("zsh", "bashcompinit"), ("fish", "__fish_use_subcommand")):
        assert main(["completion", shell]) == 0
        assert word in capsys.readouterr().out
    assert "-l recipe -xa" in fish([described("train", "octavo.cli.train")])
