"""Names of layers in reports: paths that differ only in their numbers are one name."""

import pytest

from octavo.text import path_names


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["blocks.0.up"], "blocks.0.up"),
        (["blocks.0.up", "blocks.1.up", "head"], "blocks.*.up, head"),
        (["blocks.0.experts.0", "blocks.0.experts.1"], "blocks.0.experts.*"),
        (["blocks.1.experts.0", "blocks.2.experts.0", "blocks.2.experts.1"], "blocks.*.experts.*"),
        (["blocks.3.up", "blocks.3.up"], "blocks.3.up"),
        ([""], "(model)"),
        (["0", "1"], "*"),
    ],
)
def test_a_star_is_where_paths_differ(paths, names):
    assert path_names(paths) == names


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["layers.0.up", "layers.7.up"], "layers.{0,7}.up"),
        (["layers.0.up", "layers.1.up", "layers.2.up", "layers.5.up"], "layers.{0-2,5}.up"),
        ([f"layers.{i}.up" for i in range(8)], "layers.*.up"),
        (["layers.3.up", "head"], "layers.3.up, head"),
    ],
)
def test_numbers_are_named_where_other_paths_have_the_same_pattern(paths, names):
    assert path_names(paths, [*(f"layers.{i}.up" for i in range(8)), "head"]) == names


def test_numbers_of_two_kinds_are_sets_only_if_they_name_no_other_path():
    every = [f"layers.{i}.experts.{j}" for i in range(3) for j in range(3)]
    assert path_names(["layers.0.experts.1", "layers.2.experts.1"], every) == "layers.{0,2}.experts.1"
    found = path_names(["layers.0.experts.1", "layers.2.experts.0"], every)
    assert found == "layers.0.experts.1, layers.2.experts.0"
