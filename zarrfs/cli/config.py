"""zarrfs config [SOURCE]: the effective options and where each comes from."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from zarrfs.cli import common
from zarrfs.config import options
from zarrfs.config.redaction import redacted_storage, without_secrets
from zarrfs.errors import printable

if TYPE_CHECKING:
    from zarrfs.config.effective import Layer

EPILOG = """\b
Examples:
  zarrfs config
  zarrfs config s3://bucket/refs.json
  zarrfs config era5 --json
\b
Files: /etc/zarrfs/zarrfs.toml, and $XDG_CONFIG_HOME/zarrfs/zarrfs.toml or the one of --config; zarrfs.toml(5)."""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source", required=False)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@click.option("--config", metavar="FILE", help=options.TABLE["config"].metadata["help"])
@click.option(
    "-o", "--option", "items", multiple=True, metavar="NAME[=VALUE],...", help="Options, as other commands take them."
)
@common.process_options
def config(source: str | None, as_json: bool, config: str | None, items: tuple[str, ...]) -> None:
    """Show the options that files, variables and -o set, for all sources or for SOURCE.

    Each option is one line: its name, its value and where it is set; values of storage options are hidden. Others
    have their defaults.
    """
    from zarrfs.config import effective as configuration

    with common.report_errors(common.verbosity() == "debug"):
        said = [part for item in items for part in options.split_commas(item)]
        said += [f"config={config}"] if config else []
        found = configuration.settings(said, [] if source is None else [source])
        report: dict[str, Any] = {
            "files": [one._asdict() for one in found.files],
            "source": without_secrets(found.sources[0]) if found.sources else None,
            "options": _rows(found.layers),
            "unknown_variables": configuration.unknown_variables(),
        }
        if as_json:
            sys.stdout.write(json.dumps(report) + "\n")
        else:
            _write(report)


def _rows(layers: list[Layer]) -> list[dict[str, Any]]:
    """Return an object for each option that is set: name, redacted value, origin; in the table's order."""
    rows: dict[str, dict[str, Any]] = {}
    for layer in layers:  # a later layer overrides an earlier one
        for name, value in layer.assignments.values.items():
            if name != "storage_options":
                rows[name] = {"option": name, "value": options.written(name, value), "origin": layer.origin}
        for place, storage in layer.assignments.storage.items():
            for key, value in storage.items():
                name, shown = f"{place}.{key}", redacted_storage(key, value)
                origin = layer.origin.replace(" [options]", " [storage]")
                rows[name] = {"option": name, "value": shown, "origin": origin}
    order = {name: number for number, name in enumerate(options.TABLE)}
    return sorted(rows.values(), key=lambda row: order.get(row["option"], len(order)))


def _write(report: dict[str, Any]) -> None:
    """Write the report as text: a line for each option, after comments that begin with #."""
    lines = [f"# {one['path']}: {one['outcome']}" for one in report["files"]]
    if report["source"] is not None:
        lines.append(f"# {report['source']}")
    lines += [f"# ${name}: no option of zarrfs" for name in report["unknown_variables"]]
    rows = [
        (row["option"], value if isinstance(value := row["value"], str) else json.dumps(value), row["origin"])
        for row in report["options"]
    ]
    wide, wider = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    lines += [f"{name:<{wide}}  {value:<{wider}}  {origin}" for name, value, origin in rows]
    sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
