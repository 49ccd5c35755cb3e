"""Reports as one HTML file that needs nothing else: no script, nothing loaded. Colours follow the reader's light or
dark setting, and wide tables scroll by themselves in a narrow window. Text is escaped here and nowhere else: what is
HTML already is a `Markup`."""

from collections.abc import Sequence
from html import escape

from octavo.text import printable

STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --soft: #5f6672; --line: #d9dde3; --ground: #fff; --panel: #f6f7f9;
  --first: #2f7ed8; --second: #d9822b; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaee; --soft: #9aa2ae; --line: #333943; --ground: #15181d; --panel: #1c2026; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); margin: 0; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; } main.wide { max-width: 96rem; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; } h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p { margin: .5rem 0; max-width: 46rem; } .soft { color: var(--soft); }
figure { margin: 1rem 0; max-width: 60rem; }
figure { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .75rem; }
figcaption { color: var(--soft); font-size: .875rem; padding: 0 .25rem; } figcaption span { white-space: nowrap; }
svg { display: block; } figure svg { width: 100%; height: auto; } svg text { fill: var(--soft); font: 12px system-ui; }
td svg { background: var(--panel); } td svg rect { fill: var(--first); } td svg rect.second { fill: var(--second); }
td svg line { stroke: var(--soft); stroke-dasharray: 2; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; min-width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .35rem .75rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; color: var(--soft); } th:first-child, td:first-child { text-align: left; padding-left: 0; }
.left th, .left td { text-align: left; } .left table { min-width: 0; }
.shade { padding: .1rem .35rem; border-radius: 4px; background: rgb(217 130 43 / calc(var(--shade) * 60%)); }
@media (max-width: 40rem) { figure svg text { font-size: 20px; } }
.key { display: inline-block; width: .75rem; height: .75rem; border-radius: 2px; margin-right: .5rem; }
"""


class Markup(str):
    """HTML, which stays as it is where text would be escaped."""

    __slots__ = ()


def markup(text: str) -> Markup:
    """Return text as HTML."""
    return text if isinstance(text, Markup) else Markup(escape(text))


def document(title: str, parts: Sequence[Markup], *, wide: bool = False) -> str:
    """Return the page."""
    body = "\n".join(parts)
    return printable(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<main{' class=wide' if wide else ''}>\n<h1>{escape(title)}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )


def heading(text: str, level: int = 2) -> Markup:
    return Markup(f"<h{level}>{markup(text)}</h{level}>")


def paragraph(text: str, *, soft: bool = False) -> Markup:
    return Markup(f"<p{' class=soft' if soft else ''}>{markup(text)}</p>")


def bullets(sentences: Sequence[str]) -> Markup:
    return Markup(f"<ul>{''.join(f'<li>{markup(sentence)}</li>' for sentence in sentences)}</ul>")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: bool = False) -> Markup:
    """Return a table; `left` is for a table of words."""
    head = f"<tr>{''.join(f'<th>{markup(name)}</th>' for name in header)}</tr>" if header else ""
    body = "\n".join(f"<tr>{''.join(f'<td>{markup(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return Markup(f'<div class="scroll{" left" if left else ""}"><table>{head}\n{body}</table></div>')


def named(colour: str, name: str) -> Markup:
    """Return a name after a patch of the colour that stands for it."""
    return Markup(f'<span class="key" style="background:{colour}"></span>{markup(name)}')


def shaded(text: str, shade: float, title: str) -> Markup:
    """Return a text on a ground that is the more orange the nearer its shade is to 1, with a title."""
    return Markup(f'<span class="shade" style="--shade:{shade:.2f}" title="{escape(title)}">{markup(text)}</span>')
