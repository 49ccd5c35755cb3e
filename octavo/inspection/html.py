"""An inspection's report as one HTML page without other files: the histograms are SVG inside it."""

from collections.abc import Sequence
from html import escape

from octavo.inspection.statistics import BINS, LOWEST
from octavo.inspection.tensor_rows import HEADER, TensorRow, cells
from octavo.webpage import document, paragraph, table

WIDTH, HEIGHT = 192, 24  # of a histogram
NOTE = (
    f"Histograms have a bar for each power of two, from 2^{LOWEST} on; the dashed line is 1. Amaxes are counted by "
    "call, scales by value. SQNR of y, dx and dw, and the cosines, compare with the same layer in float32."
)


def page(title: str, findings: Sequence[str], rows: Sequence[TensorRow]) -> str:
    found = "".join(f"<li>{escape(text)}</li>" for text in findings)
    return document(
        "octavo.inspect",
        [
            paragraph(title),
            f"<h2>Findings</h2>\n<ul>{found}</ul>\n<h2>Tensors</h2>",
            paragraph(NOTE, soft=True),
            table((*HEADER, "amaxes", "scales"), [_row(row) for row in rows], left=True),
        ],
        wide=True,
    )


def _row(row: TensorRow) -> list[str]:
    return [*map(escape, cells(row)), _histogram(row.amaxes), _histogram(row.scales)]


def _histogram(counts: Sequence[float]) -> str:
    """Bars as high as their share of the largest, which the title states in numbers."""
    highest = max(counts, default=0)
    if not highest:
        return ""
    step, zero = WIDTH / BINS, -LOWEST * WIDTH / BINS
    bars = "".join(
        f'<rect x="{i * step:.1f}" y="{HEIGHT - HEIGHT * n / highest:.1f}" width="{step:.1f}" '
        f'height="{HEIGHT * n / highest:.1f}"><title>{n / sum(counts):.1%} from 2^{LOWEST + i}</title></rect>'
        for i, n in enumerate(counts)
        if n
    )
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{bars}'
        f'<line x1="{zero:.1f}" x2="{zero:.1f}" y1="0" y2="{HEIGHT}"/></svg>'
    )
