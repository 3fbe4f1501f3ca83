"""zarrfs archive verify: read every byte of an archive, and check all hashes and rules."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from zarrfs.cli import common
from zarrfs.cli.archive import opening
from zarrfs.cli.check import watched, write_report
from zarrfs.config.options import Parsed

if TYPE_CHECKING:
    from zarrfs.documents.plan import Plan
    from zarrfs.store.api import Store

EPILOG = """\b
Examples:
  zarrfs archive verify job.json --blobs /srv/blobs
  zarrfs archive verify --json job.json --blobs /srv/blobs | jq .bad
\b
Every bad file is named, with the place where its bytes should be, or the blobref. The exit status is 1 if there is
one, or if ARCHIVE breaks a rule, else 0."""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("archive")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@click.option(
    "-n", "--first", type=click.IntRange(0), default=100_000, metavar="N", show_default=True,
    help="Name the first N bad files.",
)  # fmt: skip
@common.source_options("source", "fetch", log_level="warning")
def verify(archive: str, as_json: bool, first: int, parsed: Parsed) -> None:
    """Check ARCHIVE against all rules, read every byte of it, and compare every blob with its length and its hash."""
    from zarrfs.copying.check import check
    from zarrfs.copying.check_report import CheckReport
    from zarrfs.system.memory import memory_limit

    report = CheckReport(keep=first)

    async def body(store: Store, plan: Plan) -> None:
        with watched(report, parsed.options.log_level == "error"):
            await check(store, "", report, memory_limit(parsed.options))

    opening.run_on_archive(archive, parsed, body)
    sys.exit(write_report(report, as_json))
