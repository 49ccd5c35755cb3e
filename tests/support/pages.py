"""Pages of the docs: their code blocks, run in order, their prose, their links and their anchors."""

import contextlib
import doctest
import functools
import io
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import octavo

ROOT = Path(octavo.__file__).parents[1]
DOCS = ROOT / "docs"
GPU = "<!-- gpu -->"
FENCE = re.compile(r"^ *```")
MODULE = "page"  # where the examples of all pages live: a class that two pages define is one class, loaded again
LIST_ITEM = re.compile(r"\s*([-*+]|\d+\.)\s")
LINK = re.compile(r"\]\((?!\w+:)([^)\s]+)\)")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    """A fenced block: its language, its text, the index of its first line, and whether it needs a GPU."""

    language: str
    text: str
    first: int
    gpu: bool = False

    @property
    def after(self) -> int:
        """The index of the line after the closing fence."""
        return self.first + self.text.count("\n") + 1


def blocks(text: str) -> list[Block]:
    """Returns the fenced blocks of a page, without the indentation that they have in a list."""
    found, lines, opened = [], text.splitlines(), None
    for index, line in enumerate(lines):
        if not FENCE.match(line):
            continue
        if opened is None:
            opened = index
            continue
        fence = lines[opened]
        indent = len(fence) - len(fence.lstrip())
        inside = "".join(f"{each[indent:]}\n" for each in lines[opened + 1 : index])
        language = (fence.strip().removeprefix("```").split() or [""])[0]
        gpu = opened > 0 and lines[opened - 1].strip() == GPU
        found.append(Block(language, inside, opened + 1, gpu))
        opened = None
    assert opened is None, f"the fence of line {opened} is never closed"
    return found


def examples(text: str) -> Iterator[tuple[Block, str | None]]:
    """Yields each Python block of a page, with the output that a text block directly after it shows."""
    found, lines = blocks(text), text.splitlines()
    for block, following in zip(found, [*found[1:], None], strict=True):
        if block.language == "python":
            shown = following is not None and following.language == "text"
            between = lines[block.after : following.first - 1] if following is not None else []
            yield block, following.text if shown and not any(line.strip() for line in between) else None


def run(page: Path, *, folder: Path, gpu: bool = False, until: str = "", compiler: str = "aot_eager") -> dict[str, Any]:
    """Runs the examples of a page in order, compares what they print, and returns the names that they define.

    Ends after the first example with `until` in it. Examples that need a GPU are compiled, and run only with `gpu`. The
    code is written to `folder`, on the lines that it has on the page, so that tracebacks and `inspect` find it.
    """
    text, source = page.read_text(), folder / f"{page.stem}.py"
    lines = [""] * (len(text.splitlines()) + 1)
    for block, _ in examples(text):
        lines[block.first : block.after - 1] = block.text.splitlines()
    source.write_text("\n".join(lines))
    module = types.ModuleType(MODULE)
    module.__file__ = str(source)
    sys.modules[MODULE] = module
    with _compiled_by(compiler):
        for block, shown in examples(text):
            code = compile("\n" * block.first + block.text, str(source), "exec")
            if block.gpu and not gpu:
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, vars(module))
            if shown is not None:
                assert_printed(printed.getvalue(), shown, f"{page.name}:{block.first}")
            if until and until in block.text:
                break
    assert not until or until in block.text, f"no example of {page.name} has {until!r} in it"
    return vars(module)


def assert_printed(printed: str, shown: str, where: str) -> None:
    checker, example = doctest.OutputChecker(), doctest.Example("", shown)
    if not checker.check_output(shown, printed, FLAGS):
        raise AssertionError(f"{where} shows another output.\n{checker.output_difference(example, printed, FLAGS)}")


@contextlib.contextmanager
def _compiled_by(compiler: str) -> Iterator[None]:
    """Lets torch.compile take this compiler where a page names none."""
    plain = torch.compile
    torch.compile = functools.partial(plain, backend=compiler)
    try:
        yield
    finally:
        torch.compile = plain


# -- prose, links, anchors ---------------------------------------------------------------------------------------------


def prose(text: str) -> str:
    """Returns a page without its fenced blocks and comments."""
    lines = text.splitlines()
    for block in blocks(text):
        lines[block.first - 1 : block.after] = [""] * (block.after - block.first + 1)
    return re.sub(r"<!--.*?-->", "", "\n".join(lines), flags=re.DOTALL)


def paragraphs(text: str) -> list[str]:
    """Returns paragraphs, items of lists and cells of tables."""
    found = [""]
    for line in prose(text).splitlines():
        if line.lstrip().startswith("|"):
            found += [*line.split("|"), ""]
        elif not line.strip() or line.startswith("#"):
            found.append("")
        elif LIST_ITEM.match(line):
            found.append(line)
        else:
            found[-1] += f" {line}"
    return [" ".join(each.split()) for each in found if each.strip()]


def links(text: str) -> list[str]:
    """Returns the relative targets of a page's links and images."""
    return LINK.findall(re.sub(r"`[^`\n]*`", "", prose(text)))


def anchors(text: str) -> set[str]:
    """Returns the fragments that a page can be linked by, as code hosts and mkdocs.yml make them."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip()
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    given = re.findall(r'(?:\{#|<a id=")([\w.-]+)', text)
    documented = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    return {*found, *given, *documented}


def broken(path: Path) -> list[str]:
    """Returns the relative links of a page that lead nowhere: no such file, or no such heading in it."""
    found = []
    for link in links(path.read_text()):
        file, _, fragment = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists():
            found.append(link)
        elif fragment and target.suffix == ".md":
            known = anchors(target.read_text())
            if fragment not in known and not any("." in name and fragment.startswith(f"{name}.") for name in known):
                found.append(link)
    return found
