"""Pages with links that web servers show of a directory."""

from __future__ import annotations

import html.parser
import re
from urllib.parse import unquote, urljoin, urlsplit

from zarrfs.transfer.answers import Entry

_TITLE = re.compile(r"index of|directory|listing", re.IGNORECASE)


def listed(text: str, base: str) -> list[Entry] | None:
    """What a page at the URL `base` lists; None where it is a page of another kind, such as an index.html.

    A listing has a title that says so, or a link to the directory above, or no links but to what is in it.
    """
    page = _Links()
    page.feed(text)
    found: dict[str, Entry] = {}
    here = urlsplit(base)
    prefix = here.path if here.path.endswith("/") else here.path + "/"
    up = elsewhere = False
    for link in page.links:
        there = urlsplit(urljoin(base, link))
        inside = there.netloc == here.netloc and there.path.startswith(prefix)
        name, slash, rest = there.path[len(prefix) :].partition("/") if inside else ("", "", "")
        if name and not rest and not there.query:
            text = unquote(name, errors="surrogateescape")
            found.setdefault(text, Entry(text, bool(slash)))
        elif there.netloc == here.netloc and prefix.startswith(there.path) and not there.query:
            up = up or there.path != prefix
        else:
            elsewhere = elsewhere or not inside or bool(rest)  # not what sorts the same listing: ?C=N
    listing = _TITLE.search(page.title) or up or (found and not elsewhere)
    return list(found.values()) if listing else None


class _Links(html.parser.HTMLParser):
    """The targets of the <a> elements of a page, and its title."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.title = ""
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_title = tag == "title"
        if tag == "a":
            self.links += [value.strip() for name, value in attrs if name == "href" and value]

    def handle_endtag(self, tag: str) -> None:
        self._in_title = False

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data.strip()
