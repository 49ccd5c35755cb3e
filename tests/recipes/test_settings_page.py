"""docs/recipe-settings.md lists the settings that exist, with their defaults, and values that are accepted."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest

import octavo
from octavo.recipes import SHIPPED
from tests.support.recipe_traits import QUANTIZED

PAGE = Path(octavo.__file__).parents[1] / "docs" / "recipe-settings.md"
COMMON = "Settings of every recipe but bf16"


def tables():
    """Returns, for each section of the page, {setting: (default, other values)} as they are written there."""
    found = {}
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        rows = re.findall(r"^\| `(\w+)` \| `([^|]+)` \| ([^|]+) \|", body, re.MULTILINE)
        found[title.strip()] = {name: (default, re.findall(r"`([^`]+)`", values)) for name, default, values in rows}
    return found


def on_the_page(name):
    if name == "bf16":
        return {}
    assert name in tables(), f"docs/recipe-settings.md has no section '## {name}' with a table of its settings."
    return tables()[COMMON] | tables()[name]


def written(setting, value):
    return f"{setting}={value}".replace('"', "'")


@pytest.mark.parametrize("name", SHIPPED)
def test_every_field_is_on_the_page_and_no_other(name):
    fields = {field.name for field in dataclasses.fields(octavo.recipe(name)) if not field.name.startswith("_")}
    assert set(on_the_page(name)) == fields


@pytest.mark.parametrize("name", QUANTIZED)
def test_defaults_and_values_are_those_of_the_class(name):
    for setting, (default, values) in on_the_page(name).items():
        assert octavo.recipe(f"{name}({written(setting, default)})") == octavo.recipe(name), setting
        for value in values:
            other = octavo.recipe(f"{name}({written(setting, value)})")
            assert other != octavo.recipe(name), (setting, value)


@pytest.mark.parametrize("name", QUANTIZED)
def test_all_values_of_the_settings_of_a_recipe_fit_each_other(name):
    """So that no combination names quantizers that no GEMM takes together."""
    own = tables()[name]
    for values in itertools.product(*([default, *others] for default, others in own.values())):
        quant = octavo.recipe(f"{name}({','.join(map(written, own, values))})").linear()
        assert None not in (quant.fprop.left, quant.dgrad.left, quant.wgrad.left), values


def test_the_page_has_a_section_for_every_recipe_and_no_other():
    sections = {title for title, rows in tables().items() if rows and title != "The recipes"}
    assert sections == set(SHIPPED) - {"bf16"} | {COMMON}
