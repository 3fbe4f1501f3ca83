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
_ATTRIBUTE = r"""[\s/]*+([^\s/>][^\s/>=]*+)(?:\s*+=\s*+("[^"]*+"|'[^']*+'|[^\s>"'][^\s>]*+))?+"""
# Comments; elements without tags in them; tags; declarations. It follows the HTML tokeniser
# (html.spec.whatwg.org, 13.2.5). One that does not end extends to the end of the page: html.parser looks for its end
# again and again, which takes quadratic time for a hostile page.
_MARKUP = re.compile(
    r"<!--(?:-?>|.*?(?:-->|\Z))"
    r"|<(script|style)(?=[\s/>]).*?(?:</\1[^>]*+>?|\Z)"
    rf"|<(?P<closing>/?)(?P<tag>[a-z][^\s/>]*+)(?P<attributes>(?:{_ATTRIBUTE})*+)[\s/]*+(?P<end>>?)"
    r"|<[!?/][^>]*+>?",
    re.IGNORECASE | re.DOTALL,
)
_ATTRIBUTES = re.compile(_ATTRIBUTE)
_TITLE = re.compile(r"index of|directory|listing", re.IGNORECASE)


def listed(text: str, base: str) -> tuple[list[Entry], bool] | None:
    """Return (the entries that a page at the URL `base` lists, whether it is a listing for certain).

    Return None for another kind of page, such as an index.html.

    A page is a listing if its title says so and it has links to names in the directory. If only one of these is true,
    it may be a listing if it also links to the parent directory, or has no links to other places. (Without names,
    links to other places may be those of the entries, if a proxy has changed the path; and a page that a server shows
    for every name may have a link to its home page.)
    """
    title, links = _parsed(text)
    found: dict[str, Entry] = {}
    here = urlsplit(base)
    prefix = in_one_spelling(here.path if here.path.endswith("/") else here.path + "/")
    above = prefix[: prefix.rstrip("/").rfind("/") + 1]
    up = elsewhere = False
    for link, beside in links:
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
    titled = _TITLE.search(title) is not None
    certain = titled and bool(found)
    listing = certain or ((titled or found) and (up or not elsewhere))
    return (list(found.values()), certain) if listing else None


def in_one_spelling(path: str) -> str:
    """Return the path of a URL in a form to be compared: reserved characters are percent-encoded ("%2F" stays so)."""
    if path.isascii() and path.replace("/", "").replace(".", "").isalnum():
        return path
    parts = (unquote_to_bytes(part.encode("utf-8", "surrogateescape")) for part in path.split("/"))
    return "/".join(quote(part, safe="") for part in parts)


def _parsed(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the title of a page, and the targets of its <a> elements, each with the text between it and the next."""
    title, before, at = "", "", 0  # the tag before, and where it ends
    links: list[tuple[str, str]] = []
    for markup in _MARKUP.finditer(text):
        if markup["tag"] is None:
            continue
        if not markup["end"]:
            break  # the page ends within a tag
        tag = markup["closing"] + markup["tag"].lower()
        if before == "title":
            title += html.unescape(text[at : markup.start()]).strip()
        elif before == "/a" and links and tag in ("a", "/pre"):
            links[-1] = links[-1][0], html.unescape(text[at : markup.start()])
        if tag == "a":
            found = (match[2] for match in _ATTRIBUTES.finditer(markup["attributes"]) if match[1].lower() == "href")
            value = next(found, None) or ""
            links.append((html.unescape(value[1:-1] if value[:1] in ("'", '"') else value).strip(), ""))
        before, at = tag, markup.end()
    return title, [(link, beside) for link, beside in links if link]


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
