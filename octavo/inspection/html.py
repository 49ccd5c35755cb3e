"""An inspection's report as one HTML page without other files: the histograms are SVG inside it."""

from collections.abc import Sequence
from html import escape

from octavo.inspection.statistics import BINS, LOWEST
from octavo.inspection.tensor_rows import HEADER, TensorRow, cells

STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em; color: #222; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: left; white-space: nowrap; }
svg { background: #f6f6f6; } rect { fill: #3a6ea5; } line { stroke: #999; stroke-dasharray: 2; }
"""
WIDTH, HEIGHT = 192, 24  # of a histogram
NOTE = (
    f"Histograms have a bar for each power of two, from 2^{LOWEST} on; the dashed line is 1. Amaxes are counted by "
    "call, scales by value. SQNR of y, dx and dw, and the cosines, compare with the same layer in float32."
)


def page(title: str, findings: Sequence[str], rows: Sequence[TensorRow]) -> str:
    found = "".join(f"<li>{escape(text)}</li>" for text in findings) or "<li>Nothing stands out.</li>"
    head = "".join(f"<th>{escape(name)}</th>" for name in (*HEADER, "amaxes", "scales"))
    body = "\n".join(_row(row) for row in rows)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>octavo.inspect</title>'
        f"<style>{STYLE}</style></head><body>\n<h1>octavo.inspect</h1>\n<p>{escape(title)}</p>\n"
        f"<h2>Findings</h2>\n<ul>{found}</ul>\n<h2>Tensors</h2>\n<p>{NOTE}</p>\n"
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>\n</body></html>\n"
    )


def _row(row: TensorRow) -> str:
    text = "".join(f"<td>{escape(cell)}</td>" for cell in cells(row))
    return f"<tr>{text}<td>{_histogram(row.amaxes)}</td><td>{_histogram(row.scales)}</td></tr>"


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
