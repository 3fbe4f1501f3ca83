"""Findings of checks, and a time limit for each check."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from zarrfs.config.options import Options
from zarrfs.config.redaction import redact_text
from zarrfs.errors import ZarrfsError, message_line

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_LIMIT = 3.0  # seconds: a directory on a dead server, or a mount whose daemon is stopped, never answers


class Finding(NamedTuple):
    """One line of the output: the name of a check, the state (OK, WARNING or PROBLEM), the fact found, and advice."""

    check: str
    state: str
    fact: str
    advice: str = ""


def problem_finding(check: str, problem: str) -> Finding:
    """Return a PROBLEM from the text "fact: advice"."""
    fact, _, advice = problem.partition(": ")
    return Finding(check, PROBLEM, fact, advice)


Check = Callable[[Options], Iterable[Finding]]


def run_check(check: Check, options: Options, limit: float = _LIMIT, otherwise: str = WARNING) -> list[Finding]:
    """Run `check` for at most `limit` seconds; a timeout or an exception is a finding in the state `otherwise`.

    The docstring of a check begins with its name, followed by a colon.
    """
    name = (check.__doc__ or check.__name__).partition(":")[0]
    found: list[Finding] = []

    def look() -> None:
        try:
            for one in check(options):
                found.append(one)
        except (ZarrfsError, OSError, ValueError) as exc:
            found.append(Finding(name, otherwise, redact_text(str(exc))))
        except BaseException as exc:
            fact = f"cannot be looked at: {type(exc).__name__}: {redact_text(str(exc))}"
            found.append(Finding(name, otherwise, fact))

    thread = threading.Thread(target=look, daemon=True)  # a daemon thread that hangs does not block the exit
    thread.start()
    thread.join(limit)
    if thread.is_alive():
        return [*found, Finding(name, otherwise, f"no answer within {limit:g} s", "a server or a daemon may be down")]
    return found


def format_finding(one: Finding) -> str:
    """Format a finding as one line of valid UTF-8 without control characters."""
    advice = f": {one.advice}" if one.advice else ""
    return message_line(f"{one.state:<8} {one.check + ':':<15} {one.fact}{advice}")


def size_text(count: int) -> str:
    """Format bytes with at most four digits and a unit."""
    number, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.0f} {unit}" if number >= 10 or unit == "B" else f"{number:.1f} {unit}"
