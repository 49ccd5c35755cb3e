"""The pages about writing operations and fused operations: their examples run, under every compiler."""

import pytest

from octavo import ops
from tests.support.operation_pages import PAGES, ran


def test_the_pages_show_how_to_write_an_operation_and_each_kind_of_fusion():
    shown = "\n".join(page.read_text() for page in PAGES)
    for word in ("op_forward_compute", "FusedOperation", "Rule(", "Forward(", "Backward(", "Joint("):
        assert word in shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_examples_in_the_docs_run(page, backend):
    names = ran(page, backend)
    assert any(isinstance(v, type) and issubclass(v, ops.BasicOperation) for v in names.values())
