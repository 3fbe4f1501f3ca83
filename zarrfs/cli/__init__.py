"""The command line: one module per command, imported when the command runs.

`zarrfs --help` and `zarrfs mount` import only the modules that they need, so that they start quickly.
"""

from __future__ import annotations

import gc
import importlib
import sys
from typing import Any

import click

from zarrfs.cli.common import SETTINGS, process_options, report_errors

# name: (module, its help in a line); the function has the command's name
COMMANDS = {
    "mount": ("zarrfs.cli.mount", "Mount SOURCE as a directory."),
    "umount": ("zarrfs.cli.umount", "Unmount a directory, or name the processes that use it."),
    "stats": ("zarrfs.cli.stats", "Print statistics of a mount: reads, cache hits, requests, bytes."),
    "refresh": ("zarrfs.cli.refresh", "Make a mount show the present content of its source."),
    "ls": ("zarrfs.cli.ls", "List a directory of SOURCE."),
    "cat": ("zarrfs.cli.cat", "Write files of SOURCE to standard output."),
    "info": ("zarrfs.cli.info", "Describe SOURCE, or one of its files and where its bytes are."),
    "check": ("zarrfs.cli.check", "Read all of SOURCE, and report what cannot be read."),
    "doctor": ("zarrfs.cli.doctor", "Diagnose what prevents a mount on this machine."),
    "diff": ("zarrfs.cli.diff", "List the changes that an upper directory makes to SOURCE."),
    "commit": ("zarrfs.cli.commit", "Write SOURCE with the changes of an upper directory to a new source."),
    "copy": ("zarrfs.cli.copy", "Copy SOURCE, or a part of it, to a directory."),
    "archive": ("zarrfs.cli.archive", "Create file archives."),
    "run": ("zarrfs.cli.run", "Run a command with SOURCE mounted for it."),
}

EPILOG = """\b
Examples:
  zarrfs ls -l s3://bucket/refs.json
  zarrfs mount s3://bucket/refs.json /mnt/data
  zarrfs umount /mnt/data
\b
SOURCE is the path or URL of a Zarr store, a reference set, an Icechunk repository or a file archive.
See `zarrfs COMMAND --help`."""


class LazyGroup(click.Group):
    """The group of all commands, which imports the module of a command when the command is looked up."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the group after reopening closed standard streams and hiding secrets in the command line."""
        from zarrfs.cli import streams
        from zarrfs.cli.command_line import hide_secrets

        if None in (sys.stdin, sys.stdout, sys.stderr):
            streams.open_closed()
        if not args and extra.get("args") is None:  # called with the arguments of the process
            hide_secrets()
            streams.name_output()
            gc.set_threshold(50_000, 20, 20)  # by default, collections take a tenth of the import time
        return super().main(*args, **extra)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the command line; report errors, such as Ctrl-C or a full disk, as commands do."""
        with report_errors():
            return super().make_context(*args, **extra)
        raise AssertionError("not reached")

    def invoke(self, ctx: click.Context) -> Any:
        """Import and run the command; report errors as commands do."""
        with report_errors():
            try:
                return super().invoke(ctx)
            except click.NoSuchOption as exc:
                from zarrfs.config.options import TABLE, spelled

                name = exc.option_name.lstrip("-").replace("-", "_")
                if name in TABLE:
                    told = f"no such option: {exc.option_name}: write -o {spelled(name)}"
                    raise click.UsageError(told, exc.ctx) from None
                raise

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command named by the first of `args`; the error for an unknown name suggests the nearest one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as exc:
            from zarrfs.config.values import did_you_mean

            raise click.UsageError(exc.message.removesuffix(".") + did_you_mean(args[0], COMMANDS), ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_module, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings=SETTINGS, epilog=EPILOG)
@process_options
@click.version_option(None, "-V", "--version", package_name="zarrfs", message="zarrfs %(version)s")
def main() -> None:
    """Mount Zarr stores, reference sets, Icechunk repositories and file archives as directories of files."""
