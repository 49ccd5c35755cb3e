"""Plain text tables."""

from collections.abc import Sequence

from octavo.text import columns, one_line


def render(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table: columns padded to their widest cell, two spaces apart, a rule under the header."""
    rule = ["-" * max(len(one_line(row[i])) for row in [header, *rows]) for i in range(len(header))]
    return "\n".join(columns([header, rule, *rows]))
