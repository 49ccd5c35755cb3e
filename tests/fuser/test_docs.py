"""The pages about writing operations and fused operations: their examples run, under every compiler."""

import functools
import re
from pathlib import Path

import pytest
import torch

import octavo
from octavo import ops

DOCS = Path(octavo.__file__).parents[1] / "docs"
PAGES = [DOCS / f"{name}.md" for name in ("writing-an-operation", "writing-a-fused-operation", "operation-reference")]


def test_the_pages_show_how_to_write_an_operation_and_each_kind_of_fusion():
    shown = "\n".join(page.read_text() for page in PAGES)
    for word in ("op_forward_compute", "FusedOperation", "Rule(", "Forward(", "Backward(", "Joint("):
        assert word in shown


def ran(page, backend):
    """The names that a page's examples define, once all of them have run, compiled by this backend."""
    names, plain = {}, torch.compile
    torch.compile = functools.partial(plain, backend=backend)
    try:
        for example in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            exec(example, names)
    finally:
        torch.compile = plain
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_examples_in_the_docs_run(page, backend):
    names = ran(page, backend)
    assert any(isinstance(v, type) and issubclass(v, ops.BasicOperation) for v in names.values())
