"""A memory of permanent redirects: later requests for the same names go to the new place directly.

Source: RFC 9110, sections 15.4.2 and 15.4.9 (301 and 308). A redirect of one name is applied to all names that it
would change in the same way: all names of the server if the path stays the same, else those below the prefix that it
replaces. Both are guesses, so a name that is denied or not found at the new place is requested at its original place.
"""

from __future__ import annotations

from urllib.parse import urljoin, urlsplit

from zarrfs.concurrency.lru import LRU

PERMANENT = (301, 308)
_HOPS = 4  # remembered redirects that are applied to a URL one after the other
_MOST = 64  # prefixes that are remembered
_EXCEPTIONS = 65_536  # URLs that are requested at their original place


class PermanentRedirects:
    """The permanent redirects that a mount has seen."""

    def __init__(self) -> None:
        self._prefixes: LRU[str, str] = LRU(_MOST)  # without the "/" at the end
        self._exceptions: set[str] = set()

    def learn(self, url: str, location: str) -> None:
        """Note that `url` is permanently redirected to `location`."""
        try:
            here, there = urlsplit(url), urlsplit(urljoin(url, location))
        except ValueError:
            return
        if there.scheme not in ("http", "https") or "@" in here.netloc + there.netloc:
            return
        if here.query or here.fragment or there.query or there.fragment:
            return
        path, path_there = here.path, there.path
        if path != path_there:
            names, names_there = path.split("/"), path_there.split("/")
            same = 0
            while same < min(len(names), len(names_there)) - 1 and names[-1 - same] == names_there[-1 - same] != "":
                same += 1
            if not same:
                return
            path, path_there = "/".join(names[:-same]), "/".join(names_there[:-same])
        else:
            path = path_there = ""
        prefix, there_prefix = f"{here.scheme}://{here.netloc}{path}", f"{there.scheme}://{there.netloc}{path_there}"
        if prefix != there_prefix:
            self._prefixes.put(prefix, there_prefix)

    def onward(self, url: str) -> str:
        """Return the URL at which to request `url`. It is a guess, unless it is `url` itself."""
        found = url
        for _ in range(_HOPS):
            prefix = self._prefix(found)
            if not prefix or url in self._exceptions:
                break
            found = self._prefixes[prefix] + found[len(prefix) :]
        return found

    def exclude(self, url: str) -> None:
        """Request `url` at its original place from now on."""
        if len(self._exceptions) >= _EXCEPTIONS:
            self._exceptions.clear()
        self._exceptions.add(url)

    def _prefix(self, url: str) -> str:
        if not self._prefixes or "?" in url:
            return ""
        at = len(url)
        while (at := url.rfind("/", 0, at)) > 7:
            if url[:at] in self._prefixes:
                return url[:at]
        return ""
