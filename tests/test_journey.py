"""The script that walks README from an empty environment: what it would run. `python -m tests.journey` runs it."""

from tests.journey import ROOT, commands, program

README = (ROOT / "README.md").read_text()


def test_the_journey_has_every_command_of_the_readme_in_order():
    found = commands(README)
    assert found == ["make demo", "pip install -e .", "octavo doctor", "octavo train --html run.html"]


def test_the_program_of_the_journey_has_every_code_block():
    text = program(README)
    assert "octavo.convert(model" in text and "octavo.LayerNormMLP" in text
    compile(text, "README.md", "exec")
