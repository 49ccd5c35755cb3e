"""Pages for readers: their code runs, their links resolve, no paragraph is long, and the site has them all."""

import json
import re

import pytest
from torch import nn

import octavo
from octavo import values
from octavo.recipes.ambient import process
from tests.support.pages import DOCS, GPU, ROOT, anchors, blocks, broken, examples, links, paragraphs, prose, run
from tests.support.state_tensors import named_state

LONGEST = 100  # words of a paragraph
LONGEST_PAGE = 3000  # words of a page, code included; of CONTRIBUTING.md, which is followed with an editor, without it
README = ROOT / "README.md"
WRITTEN = [README, *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"))]
WRITTEN += sorted(DOCS.rglob("*.md"))
SHOWN = [page for page in WRITTEN if page.name != "CONTRIBUTING.md"]  # whose examples are run by a test of their own
PYTHON = [page for page in SHOWN if "```python" in page.read_text()]
ON_GPU = [page for page in PYTHON if GPU in page.read_text()]


def name(page):
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch):
    """A page registers names for itself alone, and finds none of a page that ran before it."""
    kept = {name: cls for name, cls in values._BY_NAME.items() if cls.__module__.split(".")[0] in ("octavo", "tests")}
    monkeypatch.setattr(values, "_BY_NAME", kept)


# -- examples ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("page", PYTHON, ids=name)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    """In order, in one namespace; a text block after an example is what it prints."""
    monkeypatch.chdir(tmp_path)
    shipped = [each for each in values.names(octavo.recipes.Recipe) if each in octavo.recipes.SHIPPED]
    monkeypatch.setattr(octavo.recipes, "_names", lambda: ", ".join(shipped))  # other tests register recipes
    monkeypatch.setattr(process, "has_traced", False)  # a page is read alone
    assert run(page, folder=tmp_path)


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("page", ON_GPU, ids=name)
def test_the_examples_of_a_page_run_on_a_gpu(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(page, folder=tmp_path, gpu=True, compiler="inductor")


@pytest.mark.parametrize("page", SHOWN, ids=name)
def test_every_block_says_its_language(page):
    """So that no example escapes the test above."""
    languages = {block.language for block in blocks(page.read_text())}
    assert not languages & {"", "py", "python3", "pycon"}


def test_the_page_about_fp16(tmp_path):
    """Its loop skips steps until the scale fits, trains then, and its second example counts what was skipped."""
    names = run(DOCS / "fp16.md", folder=tmp_path)
    assert names["scaler"].get_scale() < 2.0**32
    assert any(state["step"] > 0 for state in names["optimizer"].state.values())
    assert names["loss"].isfinite()
    assert names["counts"]["2.scaling.backward.nonfinite"] != [0]


def test_the_weight_cache_of_a_model_whose_forward_takes_no_flag(tmp_path):
    """Its loop fills the caches of the layers that it calls."""
    names = run(DOCS / "training.md", folder=tmp_path, until="octavo.microbatch")
    assert names["loss"].isfinite()
    filled = [model for model in names.values() if isinstance(model, nn.Module) and caches(model)]
    assert filled
    for model in filled:
        assert caches(model) == sum(isinstance(layer, octavo.Linear) for layer in model.modules())


def caches(model):
    return sum(name.endswith("weight_row_codes") for name, _ in named_state(model))


PAGE = """
1. An item:

   ```python
   print("one  two", 1 / 3)
   assert __name__ == "page"
   ```

   ```text
   one two 0.33...
   ```

<!-- gpu -->
```python
import nothing_of_this_name
```
```text
what a GPU prints
```
Text between them.

```python
x = [1,
     2]
```

And here.

```text
an output of nothing
```
"""


def test_examples_and_outputs_are_found_and_compared(tmp_path):
    first, second, third = examples(PAGE)
    assert (first[1], second[1], third[1]) == ("one two 0.33...\n", "what a GPU prints\n", None)
    assert (first[0].gpu, second[0].gpu, third[0].gpu) == (False, True, False)
    page = tmp_path / "shown.md"
    page.write_text(PAGE)
    assert run(page, folder=tmp_path)["x"] == [1, 2]
    with pytest.raises(ModuleNotFoundError):
        run(page, folder=tmp_path, gpu=True)
    page.write_text(PAGE.replace("0.33...", "0.34"))
    with pytest.raises(AssertionError, match=r"shown.md:\d+ shows another output"):
        run(page, folder=tmp_path)
    page.write_text(PAGE.replace("import nothing_of_this_name", "import nothing of this name"))
    with pytest.raises(SyntaxError):
        run(page, folder=tmp_path)


# -- figures -----------------------------------------------------------------------------------------------------------


def figures(value):
    """Every number of a result."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from figures(each)
    elif isinstance(value, int | float):
        yield value


@pytest.mark.parametrize(
    ("page", "least"),
    [("benchmarks.md", 40), ("benchmarks-experts.md", 60), ("benchmarks-log.md", 40)],
)
def test_the_times_of_the_benchmarks_are_on_file(page, least):
    """Times have three digits after the point."""
    page = DOCS / page
    files = {link: ROOT / "docs" / link for link in links(page.read_text()) if link.endswith(".json")}
    assert {file.resolve() for file in files.values()} <= set((ROOT / "benchmarks" / "results").glob("*.json"))
    known = {f"{figure:.3f}" for file in files.values() for figure in figures(json.loads(file.read_text()))}
    shown = set(re.findall(r"(?<![\d.])\d+\.\d{3}(?![\d.])", prose(page.read_text())))
    assert len(shown) > least
    assert shown - known == set()


# -- prose and links ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_no_paragraph_is_long(page):
    found = paragraphs(page.read_text())
    assert [p for p in found if len(p.split()) > LONGEST] == []


LISTS = ("CHANGELOG.md", "promises.md")  # looked up in, not read; tests check the second against its sources


@pytest.mark.parametrize("page", [page for page in WRITTEN if page.name not in LISTS], ids=name)
def test_no_page_is_long(page):
    text = page.read_text()
    assert len((prose(text) if page.name == "CONTRIBUTING.md" else text).split()) <= LONGEST_PAGE


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_every_relative_link_resolves(page):
    assert broken(page) == []


def test_paragraphs_links_and_anchors_are_found(tmp_path):
    text = "# A `b` (c)\nOne [two](x.md)\nthree.\n- four `[five](six)`\n  more\n- seven\n"
    text += "| eight | nine |\n\n::: octavo.Linear\n"
    parts = ["One [two](x.md) three.", "- four `[five](six)` more", "- seven", "eight", "nine", "::: octavo.Linear"]
    assert paragraphs(text) == parts
    assert links(text) == ["x.md"]
    assert anchors(text) == {"a-b-c", "octavo.Linear"}
    page = tmp_path / "page.md"
    page.write_text("[a](#a) [b](#b) [c](page.md) [d](page.md#a) [e](none.md) [f](https://example.org/none)\n\n# A\n")
    assert broken(page) == ["#b", "none.md"]


# -- the site ----------------------------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation():
    """Read without yaml, which the tests do not need."""
    navigation = re.search(r"^nav:\n(.*?)\n\n", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE | re.DOTALL)[1]
    listed = re.findall(r"(\S+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def public():
    """Every public name with its path. A module's own names stand for the module."""
    for module, prefix in (
        (octavo, "octavo"),
        *((getattr(octavo, m), f"octavo.{m}") for m in ("moe", "ops", "recipes", "quant")),
    ):
        for each in module.__all__:
            if each != "__version__" and not isinstance(getattr(module, each), type(octavo)):
                yield f"{prefix}.{each}", getattr(module, each)
    for each, value in vars(octavo.errors).items():
        if isinstance(value, type) and issubclass(value, octavo.errors.Unsupported):
            yield f"octavo.errors.{each}", value


def test_pictures_are_small_and_shown():
    """A clone and a page on a slow line carry them all."""
    images = sorted((DOCS / "images").iterdir())
    assert {path.suffix for path in images} == {".png", ".svg"} and len(images) > 10
    assert {path.name: path.stat().st_size for path in images if path.stat().st_size >= 60_000} == {}
    texts = "".join(path.read_text() for path in (README, *DOCS.glob("*.md")))
    assert [path.name for path in images if f"images/{path.name}" not in texts] == []


def test_the_api_reference_has_every_public_name():
    shown = re.findall(
        r"^::: (\S+)$", "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md")), re.MULTILINE
    )
    assert len(shown) == len(set(shown))
    assert '\n--8<-- "recipes"\n' in (DOCS / "api" / "recipes.md").read_text()  # docs/site_hooks.py lists the classes
    shown += [f"octavo.recipes.{type(octavo.recipe(each)).__name__}" for each in octavo.recipes.SHIPPED]
    objects = {id(value) for path, value in public() if path in shown}
    missing = [path for path, value in public() if path not in shown and id(value) not in objects]
    assert missing == []


def test_the_scripts_of_the_page_about_moving_are_what_their_edits_give():
    """Each edit is followed by the script that it leads to."""
    shown = blocks((DOCS / "migrating.md").read_text())
    edits = [i for i, block in enumerate(shown) if block.language == "diff"]
    assert len(edits) == 2
    for i in edits:
        lines = shown[i].text.splitlines()
        after = [line[1:] for line in lines if not line.startswith("-")]
        assert "\n".join(after).strip() == shown[i + 1].text.strip()
        compile("\n".join(line[1:] for line in lines if not line.startswith("+")), "before", "exec")
