"""A reader of pages: it checks their structure, and lists what they refer to and say."""

from html.parser import HTMLParser
from itertools import pairwise

EMPTY = ("meta", "wbr", "br")


class PageReader(HTMLParser):
    """Checks that every element is closed in its turn, that links lead to a row, that what scrolls can be reached by
    keyboard and has a name, that every picture and every column has one, that no two regions have the same, and that no
    level of headings is left out."""

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.points, self.cells = [], [], [], []
        self.anchors, self.tags, self.headings = set(), [], []
        self.titles, self.regions = [], []
        self.feed(text)
        assert self.open == []
        assert all(title.strip() for title in self.titles), self.titles
        assert len(self.regions) == len(set(self.regions)), self.regions
        levels = [int(tag[1]) for tag in self.tags if tag in ("h1", "h2", "h3", "h4")]
        assert all(deeper <= level + 1 for level, deeper in pairwise(levels)), levels
        assert [tag for tag in self.tags if tag in ("main", "header", "h1")] == ["header", "h1", "main"]
        assert all(link.removeprefix("#") in self.anchors for link in self.links), self.links
        assert "<script" not in text and "@import" not in text and "url(" not in text
        assert len(text) < 2**20

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        self.links += [given[name] for name in ("src", "href") if name in given]
        assert given.get("id") not in self.anchors, given
        self.anchors |= {given["id"]} if "id" in given else set()
        if tag == "th":
            assert given["scope"] in ("col", "row")
            self.titles.append("")
        if tag == "polyline":
            self.points.append(given["points"])
        if "scroll" in given.get("class", "").split():
            assert given.get("role") == "region" and given["aria-label"] and given["tabindex"] == "0"
        if tag == "svg":
            assert given.get("aria-hidden") or (given["role"] == "img" and given["aria-label"])
        if tag == "section" or given.get("role") == "region":
            assert given["aria-label"]
            self.regions.append(given["aria-label"])
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in EMPTY:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "th" in self.open:
            self.titles[-1] += data
        if self.open and self.open[-1] == "td":
            self.cells.append(data)
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)
