"""Reports as one HTML file that needs nothing else: no script, nothing loaded. All pages have the same order: a
headline that answers, how it was measured, a card for each recipe, figures, a heat map, what to try next, and numbers
to unfold.

Colours follow the reader's light or dark setting, a print shows what is folded, and wide tables scroll by themselves in
a narrow window. Text is escaped here and nowhere else: what is HTML already is a `Markup`."""

import re
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from octavo.text import printable

EXAMPLE = "mymodule:example"  # in commands to paste, where the page knows no function

STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --soft: #5b6270; --line: #d9dde3; --ground: #fff; --panel: #f5f7fa;
  --first: #2f6fde; --bad: 194 65 12; --ok: #2a8a5f; --link: #1f5fc4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaee; --soft: #a3abb8; --line: #333943; --ground: #15181d; --panel: #1c2027; --first: #6ea0f5;
    --bad: 226 96 36; --ok: #43b581; --link: #8ab4ff; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); margin: 0; }
header, main { max-width: 74rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2rem; } main { padding-bottom: 3rem; } section { margin: 0; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .5rem; overflow-wrap: break-word; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .1rem 1rem; margin: .5rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.skip { position: absolute; left: -99rem; } .skip:focus { left: 1rem; top: .5rem; background: var(--ground); }
h2 { font-size: 1.2rem; margin: 2.25rem 0 .5rem; } h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p, li { max-width: 52rem; overflow-wrap: anywhere; } p { margin: .5rem 0; } .soft { color: var(--soft); }
a { color: var(--link); } summary { cursor: pointer; color: var(--link); padding: .25rem 0; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 17rem), 1fr)); gap: 1rem; }
.cards { margin: 1rem 0; }
.card { border: 1px solid var(--line); border-left: 6px solid var(--line); border-radius: 8px; padding: .75rem 1rem; }
.card h2 { font-size: 1rem; margin: 0; overflow-wrap: anywhere; } .card .big { font-size: 2rem; font-weight: 700; }
.card p { margin: .2rem 0; overflow-wrap: anywhere; }
.card:only-child { max-width: 36rem; } .card.ok { border-left-color: var(--ok); }
.card.look { border-left-color: rgb(var(--bad)); }
figure { margin: 1rem 0; background: var(--panel); border: 1px solid var(--line); border-radius: 8px; }
figure { padding: .75rem; }
figcaption { color: var(--soft); font-size: .875rem; padding: 0 .25rem; } figcaption span { margin-right: .75rem; }
figcaption svg { display: inline-block; vertical-align: middle; margin-right: .35rem; }
svg { display: block; } figure > svg { width: 100%; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem; }
.pictures figure { margin: 0; } .charts { display: grid; gap: .5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 17rem), 1fr)); }
.charts svg { width: 100%; height: auto; background: var(--panel); border-radius: 6px; }
.step { fill: transparent; } .step:hover { fill: var(--soft); fill-opacity: .25; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding: .25rem 0; }
th, td { text-align: right; padding: .35rem .75rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
thead th { color: var(--soft); } th { font-weight: 600; } tbody th { font-weight: 400; }
tr > :first-child { text-align: left; padding-left: 0; }
.left th, .left td { text-align: left; } .words td { white-space: normal; overflow-wrap: anywhere; }
.heat table { border-collapse: separate; border-spacing: 3px; min-width: 100%; } .heat th, .heat td { border: 0; }
.heat td { text-align: center; border-radius: 4px; background: var(--panel); padding: .3rem .4rem; }
.heat thead th { text-align: center; white-space: normal; font-size: .8rem; vertical-align: bottom; }
.unbroken { white-space: nowrap; }
.heat td.shade { --mix: rgb(var(--bad) / calc(var(--shade) * 55%)); print-color-adjust: exact;
  background: linear-gradient(var(--mix), var(--mix)), var(--panel); }
.heat tr:target > * { outline: 2px solid var(--link); } wbr { display: none; }
.bars table { width: 100%; } .bars th { white-space: normal; } 
.bars th:nth-child(2) { text-align: left; padding-left: 0; } .bars tbody th { min-width: 11rem; max-width: 22rem; }
td.bar { width: 34%; min-width: 6rem; padding-left: 0; } .bar i { display: block; height: .9rem; border-radius: 2px;
  background: var(--soft); print-color-adjust: exact; } .bar i.ours { background: var(--first); }
.scale { display: inline-block; width: 8rem; height: .7rem; border-radius: 4px; margin: 0 .4rem; vertical-align: middle;
  background: linear-gradient(to right, var(--panel), rgb(var(--bad) / 55%)); border: 1px solid var(--line); }
.next { background: var(--panel); border-radius: 8px; padding: .5rem 1rem; }
pre { margin: .35rem 0; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; } code { font-size: .9rem; }
pre.plain { white-space: pre; overflow-wrap: normal; font-size: .8rem; }
.key { display: inline-block; width: .75rem; height: .75rem; border-radius: 2px; margin-right: .5rem; }
@media (max-width: 40rem) { figure > svg text { font-size: 22px; } header, main { padding: 0 .75rem; }
  header { padding-top: 1.25rem; } dl { grid-template-columns: minmax(0, 1fr); } dd { margin-bottom: .3rem; }
  h1 { font-size: 1.35rem; } .pictures figure > svg text { font-size: 15px; } th, td { padding: .3rem .5rem; }
  wbr { display: inline; } .bars tbody th { min-width: 7rem; } td.bar { min-width: 3rem; }
  .heat tbody th { white-space: normal; overflow-wrap: anywhere; min-width: 7rem; font-size: .85rem; } }
@media print { header, main { max-width: none; padding: 0; } .next { border: 1px solid var(--line); }
  .scroll { overflow: visible; } th, td { white-space: normal; }
  figure, .card, tr { break-inside: avoid; }
  details::details-content { content-visibility: visible; display: block; height: auto; } }
"""


class Markup(str):
    """HTML, which stays as it is where text would be escaped."""

    __slots__ = ()


class Card(NamedTuple):
    """The summary of one recipe at the top of a page."""

    name: str
    big: str
    small: str  # what the big number is
    lines: Sequence[str]
    status: str = ""  # "ok", "look" or ""


class Cell(NamedTuple):
    """A cell of a heat map."""

    text: str
    shade: float = 0.0  # 1 is the worst
    title: str = ""


class HeatRow(NamedTuple):
    """A row of a heat map."""

    name: str
    cells: Sequence[Cell]
    anchor: str = ""

    @property
    def shade(self) -> float:
        return max((cell.shade for cell in self.cells), default=0.0)


class Bar(NamedTuple):
    """A row of a table with a bar."""

    name: str
    share: float  # of the longest bar
    cells: Sequence[str]
    kind: str = ""  # "ours", "look" or ""


def markup(text: str) -> Markup:
    """Return text as HTML."""
    return text if isinstance(text, Markup) else Markup(escape(text))


def joined(*parts: str) -> Markup:
    return Markup("".join(markup(part) for part in parts))


def document(headline: str, made: Markup, parts: Sequence[Markup], *, reload: int = 0) -> str:
    """Return the page: the headline, `made`, which is its provenance, and the parts. A page that is rewritten while a
    program runs reloads itself every so many seconds; 0 is for one that is done."""
    body = "\n".join(parts)
    again = f'<meta http-equiv="refresh" content="{reload}">\n' if reload else ""
    return printable(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n{again}'
        f"<title>{escape(headline)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<a class="skip" href="#results">Skip to the results</a>\n<header>\n<h1>{_breakable(headline)}</h1>\n{made}\n'
        f'</header>\n<main id="results">\n{body}\n</main>\n</body>\n</html>\n'
    )


def facts(rows: Sequence[tuple[str, str]]) -> Markup:
    """Return names and values, one under the other; those without a value are left out."""
    return Markup(f"<dl>{''.join(f'<dt>{markup(name)}</dt><dd>{markup(v)}</dd>' for name, v in rows if v)}</dl>")


def code(text: str) -> Markup:
    return Markup(f"<code>{escape(text)}</code>")


def section(title: str, *parts: Markup) -> Markup:
    """Return parts under a heading, as a landmark of its name; nothing if there is no part."""
    found = [part for part in parts if part]
    if not found:
        return Markup("")
    name = re.sub("<[^>]*>", "", markup(title))
    return Markup(f'<section aria-label="{name}">{heading(title)}\n' + "\n".join(found) + "</section>")


def heading(text: str, level: int = 2) -> Markup:
    return Markup(f"<h{level}>{markup(text)}</h{level}>")


def paragraph(text: str, *, soft: bool = False) -> Markup:
    return Markup(f"<p{' class=soft' if soft else ''}>{markup(text)}</p>")


def bullets(sentences: Sequence[str]) -> Markup:
    return Markup(f"<ul>{''.join(f'<li>{markup(sentence)}</li>' for sentence in sentences)}</ul>")


def link(text: str, anchor: str) -> Markup:
    """Return a link to a row of the same page; text alone if the row has no anchor."""
    said = text if isinstance(text, Markup) else Markup(_breakable(text))
    return Markup(f'<a href="#{escape(anchor)}">{said}</a>') if anchor else said


def folded(summary: str, *parts: Markup) -> Markup:
    """Return parts that the reader unfolds."""
    return Markup(f"<details><summary>{markup(summary)}</summary>\n{''.join(parts)}</details>")


def cards(found: Sequence[Card]) -> Markup:
    """Return the cards side by side, as far as the window is wide; nothing if there is none."""
    if not found:
        return Markup("")
    body = "\n".join(
        f'<section class="card {card.status}" aria-label="{escape(card.name)}"><h2>{markup(card.name)}</h2>'
        f'<p class="big">{markup(card.big)}</p>'
        f'<p class="soft">{markup(card.small)}</p>{"".join(paragraph(line) for line in card.lines)}</section>'
        for card in found
    )
    return Markup(f'<div class="cards">{body}</div>')


def try_next(said: str, commands: Sequence[str]) -> Markup:
    """Return commands to paste, and what for."""
    if any(EXAMPLE in command for command in commands):
        said += f" {EXAMPLE} stands for a function of yours that returns the model and a batch."
    body = "".join(f'<pre tabindex="0">{code(command)}</pre>' for command in commands)
    return section("Try next", Markup(f'<div class="next">{paragraph(said)}{body}</div>'))


def plain_text(text: str) -> Markup:
    """Return text whose columns are aligned by spaces."""
    return Markup(f'<pre class="plain" tabindex="0">{escape(text)}</pre>')


def table(
    name: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, left: bool = False, words: bool = False
) -> Markup:
    """Return a table; the first cell of a row is its header. A screen reader says its name. `left` is for a table of
    names, `words` for one whose cells break into lines."""
    kind = (" left" if left or words else "") + (" words" if words else "")
    body = [_row(row[0], "".join(f"<td>{markup(cell)}</td>" for cell in row[1:])) for row in rows]
    return _table(kind, f"{name}, table", header, body)


def heat_map(caption: str, header: Sequence[str], rows: Sequence[HeatRow]) -> Markup:
    """Return a table whose cells are shaded, in the order of the rows."""
    body = [_row(_path(row.name), "".join(map(_heat_cell, row.cells)), row.anchor) for row in rows]
    return _table(" heat", caption, header, body, caption)


def bars(name: str, header: Sequence[str], rows: Sequence[Bar]) -> Markup:
    """Return a table with a bar in each row, and its numbers beside it."""
    body = [
        _row(
            row.name,
            f'<td class="bar"><i class="{row.kind}" style="width:{100 * row.share:.1f}%"></i></td>'
            + "".join(f"<td>{markup(cell)}</td>" for cell in row.cells),
        )
        for row in rows
    ]
    return _table(" bars", name, header, body, name)


def shading(said: str) -> Markup:
    """Return the scale of a heat map's colours in words, beside its gradient."""
    return paragraph(Markup(f'fine<span class="scale" aria-hidden="true"></span>bad. {escape(said)}'), soft=True)


def unbroken(text: str) -> Markup:
    """Return a name that no line breaks, such as a recipe's at its hyphen."""
    return Markup(f'<span class="unbroken">{escape(text)}</span>')


def named(colour: str, name: str) -> Markup:
    """Return a name after a patch of the colour that stands for it."""
    return Markup(f'<span class="key" style="background:{colour}"></span>{markup(name)}')


def _table(kind: str, name: str, header: Sequence[str], rows: Sequence[str], caption: str = "") -> Markup:
    """Return a table that scrolls by itself, by keyboard too, from its rows as HTML."""
    above = f"<caption>{markup(caption)}</caption>" if caption else ""
    names = "".join(f'<th scope="col">{markup(title)}</th>' for title in header)
    above += f"<thead><tr>{names}</tr></thead>" if header else ""
    body = f"<table>{above}<tbody>{chr(10).join(rows)}</tbody></table>"
    return Markup(f'<div class="scroll{kind}" role="region" aria-label="{escape(name)}" tabindex="0">{body}</div>')


def _breakable(text: str) -> str:
    """Return text whose paths may break after a dot."""
    return re.sub(r"(?<=\w)\.(?=[^\W\d])", ".<wbr>", escape(text))


def _row(name: str, cells: str, anchor: str = "") -> str:
    target = f' id="{escape(anchor)}"' if anchor else ""
    return f'<tr{target}><th scope="row">{markup(name)}</th>{cells}</tr>'


def _path(name: str) -> Markup:
    """Return a layer's path, which a narrow window breaks after a dot."""
    return Markup(markup(name).replace(".", ".<wbr>"))


def _heat_cell(cell: Cell) -> str:
    title = f' title="{escape(cell.title)}"' if cell.title else ""
    shade = f' class="shade" style="--shade:{cell.shade:.2f}"' if cell.shade > 0 else ""
    return f"<td{shade}{title}>{markup(cell.text)}</td>"
