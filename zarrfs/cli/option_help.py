"""Help for options of the table: --help shows the common ones, --help-all shows all of them in groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

OPTION = "option_"  # prefix of parameter names of table options, so that they never collide with a command's own


_FEW = 8  # --help of a command with at most this many options of the table shows all of them


class TableOption(click.Option):
    """The long option of a row of the table. --help omits it unless it is common or the command has few of them."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return (name and metavar, help), or None for an option that only --help-all shows."""
        from zarrfs.config.options import COMMON

        few = sum(isinstance(one, TableOption) for one in ctx.command.params) <= _FEW
        return self.full_record(ctx) if few or (self.name or "").removeprefix(OPTION) in COMMON else None

    def full_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return (name and metavar, help)."""
        return super().get_help_record(ctx)


def help_all(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --help-all to a command."""
    return click.option(
        "--help-all", is_flag=True, is_eager=True, expose_value=False, callback=_show,
        help="Show all options, in groups, and exit.",
    )(function)  # fmt: skip


def _show(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from zarrfs.config.options import GROUPS, TABLE

    own: list[tuple[str, str]] = []
    groups: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
    for one in (one for one in ctx.command.get_params(ctx) if isinstance(one, click.Option)):
        table = isinstance(one, TableOption)
        record = one.full_record(ctx) if isinstance(one, TableOption) else one.get_help_record(ctx)
        if record:
            found = groups[TABLE[(one.name or "").removeprefix(OPTION)].metadata["group"]] if table else own
            found.append(record)
    formatter = ctx.make_formatter()
    ctx.command.format_usage(ctx, formatter)
    ctx.command.format_help_text(ctx, formatter)
    for title, records in {"Options": own, **groups}.items():
        if records:
            with formatter.section(title):
                formatter.write_dl(records)
    ctx.command.format_epilog(ctx, formatter)
    click.echo(formatter.getvalue().rstrip("\n"))
    ctx.exit()
