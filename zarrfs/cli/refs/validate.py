"""zarrfs refs validate: list all errors of a reference set."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

import click

from zarrfs.cli import common
from zarrfs.config.options import Parsed
from zarrfs.config.redaction import without_secrets
from zarrfs.config.shares import WHOLE
from zarrfs.errors import SourceError, printable

if TYPE_CHECKING:
    from zarrfs.documents.plan import Plan
    from zarrfs.store.api import Fault, Store

EPILOG = """\b
Examples:
  zarrfs refs validate set.json
  zarrfs refs validate --strict --json combined.parq | jq .errors
  zarrfs refs validate --shard 0/4 combined.parq
\b
A line for each fault, with its place in the document, and a count at the end. The exit status is 1 if there are
errors, with --strict also if there are warnings, else 0. Targets are not read: zarrfs check does that.
--shard divides the record files of a set in Parquet. A set in JSON is one document: the share 0 has all its faults."""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source", metavar="SRC")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@common.shard_option
@common.source_options("source", "fetch", log_level="warning")
def validate(source: str, as_json: bool, shard: str | None, parsed: Parsed) -> None:
    """Check the reference set SRC against the specification and the rules of zarrfs, and list all errors."""
    from zarrfs.store.api import Fault

    report, share = _Report(as_json, parsed.options.strict), common.share(shard) or WHOLE
    options = dataclasses.replace(parsed.options, type=parsed.options.type or "references", strict=False, collect=True)

    async def body(store: Store, plan: Plan) -> None:
        if not store.is_reference_set or plan.kind == "archive":
            raise SourceError(plan.source, "is no reference set")
        async for fault in store.faults(share):
            report.add(fault)
        if plan.index is not None and not share.index:  # the warnings of a Parquet set are among its faults
            for warning in plan.warnings:
                report.add(Fault("", warning, True))

    try:
        common.run_on_store(source, dataclasses.replace(parsed, options=options), body)
    except SourceError as exc:  # no share can examine anything after this error
        report.add(Fault(exc.entry or "", exc.rule))
    report.end(without_secrets(source))
    sys.exit(0 if report.valid else 1)


class _Report:
    """A report that writes each fault as it is found; as JSON, all of them at the end."""

    def __init__(self, as_json: bool, strict: bool) -> None:
        self.counts = [0, 0]  # errors, warnings
        self._strict = strict
        self._kept: tuple[list[dict[str, Any]], list[dict[str, Any]]] | None = ([], []) if as_json else None

    @property
    def valid(self) -> bool:
        """True if no error was found; with --strict, no warning either."""
        return not (self.counts[0] or (self._strict and self.counts[1]))

    def add(self, fault: Fault) -> None:
        """Count a fault; write it now, or keep it for JSON."""
        self.counts[fault.warning] += 1
        if self._kept is not None:
            self._kept[fault.warning].append({"entry": fault.entry, "rule": fault.rule})
            return
        line = f"{fault.entry}: {fault.rule}" if fault.entry else fault.rule
        sys.stdout.write(printable(f"warning: {line}" if fault.warning else line) + "\n")

    def end(self, source: str) -> None:
        """Write the number of errors and warnings, or the JSON object."""
        errors, warnings = self.counts
        if self._kept is not None:
            found = {"source": source, "valid": self.valid, "errors": self._kept[0], "warnings": self._kept[1]}
            sys.stdout.write(json.dumps(found) + "\n")
            return
        sys.stdout.write(
            f"{errors:,} error{'' if errors == 1 else 's'}, {warnings:,} warning{'' if warnings == 1 else 's'}\n"
        )
