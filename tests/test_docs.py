"""Pages for users: their examples run, and no paragraph is long."""

import re
from pathlib import Path

import octavo

DOCS = Path(octavo.__file__).parents[1] / "docs"
LONGEST = 100  # words


def examples(page):
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def paragraphs(page):
    """Blocks of prose: no code, no tables, no headings."""
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    return [p for p in re.split(r"\n\s*\n", prose) if p.strip() and not p.lstrip().startswith(("|", "#"))]


def test_the_page_about_fp16(capsys):
    """Its loop skips steps until the scale fits, trains then, and its second example counts what was skipped."""
    page, names = (DOCS / "fp16.md").read_text(), {}
    for example in examples(page):
        exec(example, names)
    assert names["scaler"].get_scale() < 2.0**32
    assert any(state["step"] > 0 for state in names["optimizer"].state.values())
    assert names["loss"].isfinite()
    assert names["counts"]["2.scaling.backward.nonfinite"] != [0]
    assert "scaling.forward.nonfinite" in capsys.readouterr().out
    assert max(len(p.split()) for p in paragraphs(page)) <= LONGEST


def test_the_weight_cache_of_a_model_whose_forward_takes_no_flag():
    """Its loop fills the caches of the layers that it calls."""
    (example,) = [e for e in examples((DOCS / "linear.md").read_text()) if "octavo.microbatch" in e]
    names = {}
    exec(example, names)
    assert names["loss"].isfinite()
    caches = [name for name, _ in names["model"].named_buffers() if name.endswith("weight_row_codes")]
    assert caches == ["up.weight_row_codes", "down.weight_row_codes"]


def test_the_readme_links_every_page():
    readme = (DOCS.parent / "README.md").read_text()
    for page in DOCS.glob("*.md"):
        assert f"(docs/{page.name})" in readme, page.name
