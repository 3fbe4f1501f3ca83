"""zarrfs doctor: check each requirement of a mount, and advise what to do if one is not met."""

from __future__ import annotations

import json
import sys

import click

from zarrfs.cli import common
from zarrfs.cli.doctor.findings import PROBLEM, Finding, format_finding, run_check
from zarrfs.config.options import Parsed

EPILOG = """\b
Examples:
  zarrfs doctor
  zarrfs doctor s3://bucket/refs.json -o s3.anon=true
  zarrfs doctor --json | jq '.findings[] | select(.state != "ok")'
\b
Nothing is mounted and nothing is changed. No check takes longer than a few seconds, that of SOURCE no longer than
--timeout."""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source", required=False)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@click.option("--timeout", default="30s", metavar="TIME", show_default=True, callback=common.time_given,
              help="How long opening SOURCE may take.")  # fmt: skip
@common.source_options("source", "fetch", log_level="error")
def doctor(source: str | None, as_json: bool, timeout: float, parsed: Parsed) -> None:
    """Diagnose what prevents a mount by this user on this machine; with SOURCE, open it and read a little.

    Prints a line for each check: ok, warning or problem, what was found, and what to do. The exit status is 1 if
    a problem would keep a mount from working, else 0.
    """
    from zarrfs.cli.doctor.machine import CHECKS as OF_MACHINE
    from zarrfs.cli.doctor.places import CHECKS as OF_PLACES

    found: list[Finding] = []
    for check in (*OF_MACHINE, *OF_PLACES):
        found += run_check(check, parsed.options)
    if source is not None:
        from zarrfs.cli.doctor.sources import open_and_read
        from zarrfs.jobs import processes

        found += run_check(open_and_read(source), parsed.options, timeout, PROBLEM)
        for child in processes.children():  # one that reads a document may still wait for a server
            processes.kill(child)
    failed = any(one.state == PROBLEM for one in found)
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [one._asdict() for one in found]}))
    else:
        for one in found:
            print(format_finding(one))
    sys.exit(1 if failed else 0)
