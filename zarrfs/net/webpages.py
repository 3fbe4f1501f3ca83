"""Pages with links that web servers show of a directory."""

from __future__ import annotations

import calendar
import datetime
import html.parser
import re
from urllib.parse import unquote, urljoin, urlsplit

from zarrfs.net.responses import Entry

# What nginx shows beside a name: the time in UTC, to the minute, and the size, unless that is rounded (12K).
_BESIDE = re.compile(r"\s+(\d\d-[A-Z][a-z]{2}-\d{4} \d\d:\d\d)\s+(\d{1,18})\s*")
_HEAD = 16 << 10  # characters of a page in which its title is
_TITLE = re.compile(r"index of|directory|listing", re.IGNORECASE)


def listed(text: str, base: str) -> list[Entry] | None:
    """Return the entries that a page at the URL `base` lists; None for another kind of page, such as an index.html.

    A listing has a title that says so; or it names something, and has a link to the directory above, or no links
    but to what is in it. A page that a server shows for every name may have a link to its home, and lists nothing.
    """
    page = _LinkParser()
    page.feed(text)
    page.close()
    found: dict[str, Entry] = {}
    here = urlsplit(base)
    prefix = here.path if here.path.endswith("/") else here.path + "/"
    above = prefix[: prefix.rstrip("/").rfind("/") + 1]
    up = elsewhere = False
    for link, beside in page.links:
        there = urlsplit(urljoin(base, link))
        inside = there.netloc == here.netloc and there.path.startswith(prefix)
        name, slash, rest = there.path[len(prefix) :].partition("/") if inside else ("", "", "")
        if name and not rest and not there.query:
            text = unquote(name, errors="surrogateescape")
            found.setdefault(text, Entry(text, True) if slash else _value(text, beside))
        elif there.netloc == here.netloc and prefix.startswith(there.path) and not there.query:
            up = up or there.path in (above, above.rstrip("/"))
        else:
            elsewhere = elsewhere or not inside or bool(rest)  # not what sorts the same listing: ?C=N
    listing = _TITLE.search(page.title) or (found and (up or not elsewhere))
    return list(found.values()) if listing else None


def is_titled(text: str) -> bool:
    """Return whether a page says in its title that it is a listing."""
    page = _LinkParser()
    page.feed(text[:_HEAD])
    page.close()
    return _TITLE.search(page.title) is not None


class _LinkParser(html.parser.HTMLParser):
    """The targets of the <a> elements of a page, and its title."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []  # and the text that follows each
        self.title = ""
        self._in_title = False
        self._link = ""
        self._text: list[str] | None = None  # what follows the last link

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_title = tag == "title"
        if tag == "a":
            self._end()
            self._link = next((value.strip() for name, value in attrs if name == "href" and value), "")
        elif self._text is not None:
            self._text.append("<")  # a page of another kind

    def handle_endtag(self, tag: str) -> None:
        self._in_title = False
        if tag == "a":
            self._text = []
        elif tag == "pre":
            self._end()

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data.strip()
        elif self._text is not None:
            self._text.append(data)

    def close(self) -> None:
        super().close()
        self._end()

    def _end(self) -> None:
        """Finish the last link."""
        if self._link:
            self.links.append((self._link, "".join(self._text or ())))
        self._link, self._text = "", None


def _value(name: str, beside: str) -> Entry:
    """Make the entry of a value, with size and time if the page has them."""
    match = _BESIDE.fullmatch(beside)
    if match is None:
        return Entry(name, False)
    try:
        when = datetime.datetime.strptime(f"{match[1]} +0000", "%d-%b-%Y %H:%M %z")
    except ValueError:  # months are not in English here, or there is no such day
        return Entry(name, False)
    return Entry(name, False, int(match[2]), calendar.timegm(when.timetuple()) * 1_000_000_000, rough=True)
