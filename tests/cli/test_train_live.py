"""`octavo train --every N`: the page is rewritten as the run goes, and has a time axis."""

import pytest

from octavo.cli import main
from octavo.inspection import page_file
from tests.support.page_reader import PageReader

COMMAND = ["train", "--size", "32,1,2,16", "--steps", "5", "--batch", "1", "--device", "cpu", "--recipe", "nvfp4"]


@pytest.fixture
def written(monkeypatch):
    """The texts of all files that are written."""
    found, write = [], page_file.write

    def record(path, text):
        found.append(text)
        write(path, text)

    monkeypatch.setattr(page_file, "write", record)
    return found


def test_the_page_is_rewritten_and_says_what_still_runs(tmp_path, written, capsys):
    page = tmp_path / "page.html"
    assert main([*COMMAND, "--every", "2", "--html", str(page)]) == 0
    pages = [PageReader(text) for text in written]
    heads = [found.headings[0] for found in pages]
    assert heads[:3] == ["bf16 still trains"] * 3 and heads[3:6] == ["nvfp4 still trains"] * 3
    assert len(heads) == 7 and "still" not in heads[6]
    assert all(("refresh" in text) == (place < 6) for place, text in enumerate(written))
    steps = {len(found.points) for found in pages[3:6]}
    assert len(steps) == 2, "two losses and a gap, and the lines of the layers from the second sample on"
    text = page.read_text()
    assert text == written[-1] and "By step: nvfp4" in text and "steps 2, 4, 5" in text
    assert "worst tensors in their formats" in text and "<code>octavo train --size" in text
    assert capsys.readouterr().out.rstrip().endswith(f"{heads[6]}. The page of this report is {page}.")


def test_without_every_the_page_is_written_once(tmp_path, written):
    assert main([*COMMAND, "--html", str(tmp_path / "page.html")]) == 0
    assert len(written) == 1 and "By step" not in written[0]


def test_every_needs_a_page(capsys):
    assert main([*COMMAND, "--every", "2"]) == 2
    assert "Pass --html FILE too." in capsys.readouterr().err
