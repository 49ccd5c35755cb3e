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
