"""A parser of the HTML pages with which web servers list a directory."""

from __future__ import annotations

import calendar
import datetime
import html
import re
from urllib.parse import quote, unquote, unquote_to_bytes, urljoin, urlsplit

from zarrfs.net.responses import Entry

# The text that follows a link in a listing by nginx: the time in UTC, to the minute, and the size in bytes. A rounded
# size (12K) does not match.
_BESIDE = re.compile(r"\s+(\d\d-[A-Z][a-z]{2}-\d{4} \d\d:\d\d)\s+(\d{1,18})\s*")
_TAG = re.compile(r"<(/?)([A-Za-z][^\s/>]*+)")
_ATTRIBUTE = re.compile(r"""[\s/]*+([^\s/>][^\s/>=]*+)(?:\s*+=\s*+("[^"]*+"|'[^']*+'|[^\s>"'][^\s>]*+))?+""")
_CLOSE = re.compile(r"[\s/]*+>")
_RAW = {tag: re.compile(f"</{tag}", re.IGNORECASE) for tag in ("script", "style")}  # elements without tags in them
_HEAD = 16 << 10  # characters at the beginning of a page in which to look for its title
_TITLE = re.compile(r"index of|directory|listing", re.IGNORECASE)


def listed(text: str, base: str) -> list[Entry] | None:
    """Return the entries that a page at the URL `base` lists; None for another kind of page, such as an index.html.

    A page is a listing if its title says so and it has links to names in the directory. If only one of these is true,
    it is a listing if it also links to the parent directory, or has no links to other places. (Without names, links to
    other places may be those of the entries, if a proxy has changed the path; and a page that a server shows for every
    name may have a link to its home page.)
    """
    page = _LinkParser(text)
    found: dict[str, Entry] = {}
    here = urlsplit(base)
    prefix = in_one_spelling(here.path if here.path.endswith("/") else here.path + "/")
    above = prefix[: prefix.rstrip("/").rfind("/") + 1]
    up = elsewhere = False
    for link, beside in page.links:
        there = urlsplit(urljoin(base, link))
        path = in_one_spelling(there.path)
        inside = there.netloc == here.netloc and path.startswith(prefix)
        name, slash, rest = path[len(prefix) :].partition("/") if inside else ("", "", "")
        if name and not rest and not there.query:
            text = unquote(name, errors="surrogateescape")
            found.setdefault(text, Entry(text, True) if slash else _value(text, beside))
        elif there.netloc == here.netloc and prefix.startswith(path) and not there.query:
            up = up or path in (above, above.rstrip("/"))
        else:
            elsewhere = elsewhere or not inside or bool(rest)  # but not links that sort the listing: ?C=N
    titled = _TITLE.search(page.title) is not None
    listing = (titled and found) or ((titled or found) and (up or not elsewhere))
    return list(found.values()) if listing else None


def in_one_spelling(path: str) -> str:
    """Return the path of a URL in a form to be compared: reserved characters are percent-encoded ("%2F" stays so)."""
    if path.isascii() and path.replace("/", "").replace(".", "").isalnum():
        return path
    parts = (unquote_to_bytes(part.encode("utf-8", "surrogateescape")) for part in path.split("/"))
    return "/".join(quote(part, safe="") for part in parts)


def is_titled(text: str) -> bool:
    """Return whether the title of a page says that it is a listing."""
    return _TITLE.search(_LinkParser(text[:_HEAD]).title) is not None


class _LinkParser:
    """The targets of the <a> elements of a page, and its title.

    Tags are recognised as by the HTML tokeniser (html.spec.whatwg.org, 13.2.5). An unfinished tag or comment is not
    scanned again from its second character: html.parser does so, and takes quadratic time for a hostile page.
    """

    def __init__(self, text: str) -> None:
        self.links: list[tuple[str, str]] = []  # (link, text that follows it)
        self._title: list[str] = []
        self._in_title = False
        self._link = ""
        self._text: list[str] | None = None  # the text that follows the last link
        at = 0
        while at >= 0:
            begin = text.find("<", at)
            self._data(text[at:begin] if begin >= 0 else text[at:])
            at = begin if begin < 0 else self._markup(text, begin)
        self._end()

    @property
    def title(self) -> str:
        """Return the text of the title."""
        return "".join(self._title)

    def _markup(self, text: str, begin: int) -> int:
        """Read the tag or comment, or the text, that begins with the "<" at `begin`.

        Return the offset of its end, -1 for the end of the page.
        """
        if text.startswith("<!--", begin):
            last = text.find("-->", begin + 2)
            return last if last < 0 else last + 3
        name = _TAG.match(text, begin)
        if name is None:
            if text[begin + 1 : begin + 2] in ("!", "?", "/"):
                return text.find(">", begin) + 1 or -1
            self._data("<")
            return begin + 1
        tag = name[2].lower()
        if name[1]:
            self._end_tag(tag)
            return text.find(">", name.end()) + 1 or -1
        at, link = name.end(), ""
        while attribute := _ATTRIBUTE.match(text, at):
            at = attribute.end()
            if tag == "a" and not link and attribute[1].lower() == "href":
                value = attribute[2] or ""
                link = html.unescape(value[1:-1] if value[:1] in ("'", '"') else value).strip()
        end = _CLOSE.match(text, at)
        if end is None:
            return -1  # the page ends within a tag
        self._start_tag(tag, link)
        if end[0].endswith("/>"):
            self._end_tag(tag)
        elif tag in _RAW:
            raw = _RAW[tag].search(text, end.end())
            return raw.start() if raw else -1
        return end.end()

    def _start_tag(self, tag: str, link: str) -> None:
        self._in_title = tag == "title"
        if tag == "a":
            self._end()
            self._link = link
        elif self._text is not None:
            self._text.append("<")  # not the text of a listing by nginx

    def _end_tag(self, tag: str) -> None:
        self._in_title = False
        if tag == "a":
            self._text = []
        elif tag == "pre":
            self._end()

    def _data(self, data: str) -> None:
        if self._in_title:
            self._title.append(html.unescape(data).strip())
        elif self._text is not None:
            self._text.append(html.unescape(data))

    def _end(self) -> None:
        """Finish the last link and store it."""
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
    except ValueError:  # months are not in English in this locale, or there is no such day
        return Entry(name, False)
    return Entry(name, False, int(match[2]), calendar.timegm(when.timetuple()) * 1_000_000_000, rough=True)
