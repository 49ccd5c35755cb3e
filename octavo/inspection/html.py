"""An inspection's report as one HTML page without other files: the histograms are SVG inside it."""

from collections.abc import Sequence
from html import escape

from octavo.inspection.statistics import LOWEST
from octavo.inspection.tensor_rows import HEADER, TensorRow, cells
from octavo.inspection.webpage import document, paragraph, table

WIDTH, HEIGHT = 96, 24  # of a histogram
NOTE = (
    "Histograms have a bar for each power of two, all from 2^{} to 2^{}; the dashed line is 1. Amaxes are counted by "
    "call, scales by value. SQNR of y, dx and dw, and the cosines, compare with the same layer in float32."
)


def page(title: str, findings: Sequence[str], rows: Sequence[TensorRow]) -> str:
    shown = _occupied(rows)
    found = "".join(f"<li>{escape(text)}</li>" for text in findings)
    return document(
        "octavo.inspect",
        [
            paragraph(title),
            f"<h2>Findings</h2>\n<ul>{found}</ul>\n<h2>Tensors</h2>",
            paragraph(NOTE.format(LOWEST + shown.start, LOWEST + shown.stop), soft=True),
            table((*HEADER, "amaxes", "scales"), [_row(row, shown) for row in rows], left=True),
        ],
        wide=True,
    )


def _occupied(rows: Sequence[TensorRow]) -> range:
    """The bins from the first to the last that has a count in any histogram, and both beside 1."""
    counted = {i for row in rows for counts in (row.amaxes, row.scales) for i, n in enumerate(counts) if n}
    return range(min(counted | {-LOWEST - 1}), max(counted | {-LOWEST}) + 1)


def _row(row: TensorRow, shown: range) -> list[str]:
    return [*map(escape, cells(row)), _histogram(row.amaxes, shown), _histogram(row.scales, shown)]


def _histogram(counts: Sequence[float], shown: range) -> str:
    """Bars as high as their share of the largest, which the title states in numbers."""
    highest = max(counts, default=0)
    if not highest:
        return ""
    step = WIDTH / len(shown)
    one = (-LOWEST - shown.start) * step
    bars = "".join(
        f'<rect x="{(i - shown.start) * step:.1f}" y="{HEIGHT - HEIGHT * n / highest:.1f}" width="{step:.1f}" '
        f'height="{HEIGHT * n / highest:.1f}"><title>{n / sum(counts):.1%} from 2^{LOWEST + i}</title></rect>'
        for i, n in enumerate(counts)
        if n
    )
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{bars}'
        f'<line x1="{one:.1f}" x2="{one:.1f}" y1="0" y2="{HEIGHT}"/></svg>'
    )
