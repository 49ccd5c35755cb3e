"""Plain text tables."""

from collections.abc import Sequence


def render(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table: columns padded to their widest cell, two spaces apart, a rule under the header."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    head = "  ".join(cell.ljust(width) for cell, width in zip(header, widths, strict=True)).rstrip()
    return "\n".join([head, "  ".join("-" * width for width in widths), *lines])
