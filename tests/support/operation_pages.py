"""The pages that show how to write operations, run once."""

import functools
import re
from pathlib import Path

import torch

import octavo

DOCS = Path(octavo.__file__).parents[1] / "docs"
PAGES = [
    DOCS / f"{name}.md"
    for name in (
        "writing-an-operation",
        "writing-a-fused-operation",
        "operation-reference",
        "fused-operation-reference",
    )
]


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
