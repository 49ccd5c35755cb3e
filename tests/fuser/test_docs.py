"""The pages about writing operations and fused operations: all that they show runs, under each compiler."""

import pytest

from octavo import ops
from tests.pages import DOCS, run

PAGES = [page for page in sorted(DOCS.glob("*.md")) if "(ops.BasicOperation)" in page.read_text()]


def test_the_pages_show_how_to_write_an_operation_and_each_kind_of_fusion():
    shown = "\n".join(page.read_text() for page in PAGES)
    for word in ("op_forward_compute", "FusedOperation", "Rule(", "Forward(", "Backward(", "Joint("):
        assert word in shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_examples_in_the_docs_run(page, backend, tmp_path):
    names = run(page, folder=tmp_path, compiler=backend)
    assert any(isinstance(v, type) and issubclass(v, ops.BasicOperation) for v in names.values())
