"""Hooks of mkdocs: pages may include and link to files of the repository that are not below docs/.

    --8<-- "CHANGELOG.md"               a line of its own: that file's text, as part of the page
    --8<-- "recipes"                    a line of its own: the reference of every recipe's class
    [raw](../benchmarks/results/x.json) the site gets a copy of that file

Links that resolve in a checkout therefore resolve in the site as well. A link to a file that does not exist is left as
it is, and mkdocs refuses it.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
PAGES["README.md"] = "index.md"
INCLUDE = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)")


def on_files(files, config):
    """Adds a copy of every file outside of docs/ that a page links to."""
    for page in list(files.documentation_pages()):
        for target in LINK.findall(_included(Path(page.abs_src_path).read_text())):
            outside = _outside(target, page.src_uri)
            if outside and outside not in PAGES and files.get_file_from_path(f"files/{outside}") is None:
                files.append(File.generated(config, f"files/{outside}", abs_src_path=str(ROOT / outside)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Inserts included files, and points links out of docs/ to the pages and copies inside of the site."""
    here = posixpath.dirname(page.file.src_uri)

    def inside(link):
        outside = _outside(link[1], page.file.src_uri)
        if not outside:
            return link[1]
        return posixpath.relpath(PAGES.get(outside, f"files/{outside}"), here or ".")

    return LINK.sub(inside, _included(markdown))


def _included(markdown):
    """Returns the text with included files in it; their links are relative to the root, so they lose `docs/`."""

    def text(include):
        if include[1] == "recipes":
            return "\n".join(f"::: octavo.recipes.{name}\n    options:\n      members: false\n" for name in _recipes())
        found = (ROOT / include[1]).read_text()
        return LINK.sub(lambda link: posixpath.relpath(link[1], "docs"), found)

    return INCLUDE.sub(text, markdown)


def _recipes():
    """Returns the classes of recipes, read from their files, so that a new one needs no line on a page."""
    files = sorted((ROOT / "octavo" / "recipes").glob("*.py"))
    return [name for file in files for name in re.findall(r'^@register\(".+"\)\nclass (\w+)', file.read_text(), re.M)]


def _outside(target, page):
    """Returns the path of an existing file of the repository outside of docs/, and "" for any other target."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return path if not path.startswith(("docs/", "..")) and (ROOT / path).is_file() else ""
