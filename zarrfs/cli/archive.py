"""zarrfs archive create: write files and directories to a file archive."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from zarrfs.cli import common
from zarrfs.errors import UsageError, reason_of

EPILOG = """\b
Examples:
  zarrfs archive create -C /data -O job.json --blobs /srv/blobs input config.toml
  zarrfs archive create -O job.json.zst --inline --exclude '*.tmp' --exclude .git .
  find . -name '*.nc' -print0 | zarrfs archive create -0 --files-from - --blobs /srv/blobs -O nc.json
\b
PATHs are relative to DIR; a directory is taken with all that is in it. A GLOB without "/" is compared with names at
any depth, one with "/" with whole paths, in which "*" stands for "/" as well. SIZEs are bytes, or have a unit (KiB,
MiB, KB). What is in the document itself is UTF-8, or base64 if it is not text. FILE appears once it is complete."""


@click.group(context_settings=common.SETTINGS)
@common.process_options
def archive() -> None:
    """Create file archives (RFC 37)."""


@archive.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option("-C", "--directory", "base", default=".", metavar="DIR", help="Change to DIR first.")
@click.option(
    "-O", "--output", default="-", metavar="FILE",
    help='Write the document here; compressed if the name ends in .gz, .zst, .xz or .bz2; "-" '
    '(the default) is standard output.',
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("--blobs", metavar="DIR", help="Write blobs to this directory, which is created if needed.")
@click.option("--inline", "all_inline", is_flag=True, help="Store all data in the document, none in blobs.")
@click.option(
    "--inline-threshold", "inline", callback=common.size, default="1KiB", show_default=True, metavar="SIZE",
    help="Store files of up to SIZE in the document.",
)  # fmt: skip
@click.option(
    "--region-size", "region", callback=common.size, default="1MiB", show_default=True, metavar="SIZE",
    help="Split files into blobs of up to SIZE, at most 64 MiB.",
)  # fmt: skip
@click.option(
    "--hash", "algorithm", type=click.Choice(("sha1", "sha256")), default="sha1", show_default=True,
    help="Hash that names blobs.",
)  # fmt: skip
@click.option("--dictionary", is_flag=True, help="Write an object of entries by path, not a list.")
@click.option("--exclude", "excludes", multiple=True, metavar="GLOB", help="Leave out what matches GLOB.")
@click.option("--files-from", "listed", metavar="FILE", help='Take PATHs from FILE, one a line; "-": standard input.')
@click.option("-0", "--null", is_flag=True, help="PATHs in that FILE are separated by NUL, not by line feeds.")
@click.option(
    "--skip-unsupported", is_flag=True,
    help="Leave out what no archive can hold, with a warning: fifos, sockets, devices, names that are not UTF-8.",
)  # fmt: skip
@click.option("--sync", is_flag=True, help="Sync all files to the disk before the command ends.")
@common.process_options
def create(
    paths: tuple[str, ...], output: str, force: bool, listed: str | None, null: bool, **given: Any
) -> None:
    """Write the files, directories and symbolic links PATH to an archive.

    Files that are small are in the document, larger ones in blobs, which are shared with those that Flux makes. Holes
    stay holes. Times are kept in whole seconds; owners, hard links and extended attributes are not kept.
    """
    from zarrfs.archives.source_kinds import directory_of

    level = common.verbosity()
    with common.report_errors(debug=level == "debug"):
        if given["blobs"]:
            given["blobs"] = directory_of(given["blobs"])
        _create([*paths, *(_listed(listed, null) if listed else ())], output, force, level == "error", **given)


def _create(
    paths: list[str], output: str, force: bool, quiet: bool, base: str, blobs: str | None, all_inline: bool,
    inline: int, region: int, algorithm: str, dictionary: bool, excludes: tuple[str, ...], skip_unsupported: bool,
    sync: bool,
) -> None:  # fmt: skip
    from zarrfs.archives.local_tree import LocalTree
    from zarrfs.archives.writer import MAX_INLINE, MAX_REGION, BlobDirectory, write_archive
    from zarrfs.cli import meter
    from zarrfs.concurrency import tasks

    if not paths:
        raise UsageError("nothing to archive: give PATHs or --files-from ('.' archives all that is in DIR)")
    if not 1 <= region <= MAX_REGION:
        raise UsageError(f"a region of {region:,} bytes: it has 1 to {MAX_REGION:,}")
    if all_inline and blobs is not None:
        raise UsageError("--blobs cannot be combined with --inline, which puts all data into the document")

    def warn(text: str) -> None:
        if not quiet:
            meter.say(f"warning: {text}")

    async def write() -> None:
        with contextlib.ExitStack() as stack:
            put = stack.enter_context(BlobDirectory(blobs, algorithm)) if blobs is not None else None
            put_out = stack.enter_context(_opened(output, force))
            own = [os.path.realpath("/dev/stdout" if output == "-" else output)]
            own += [os.path.realpath(blobs)] if blobs is not None else []
            tree = stack.enter_context(LocalTree(base, warn, excludes, skip_unsupported, own))
            stack.enter_context(meter.displayed(tree, quiet))
            most = MAX_INLINE if all_inline else min(inline, MAX_INLINE)
            async with contextlib.aclosing(tree.entries(paths)) as entries:
                await write_archive(entries, tree, put_out, put, most, region, dictionary)
            if put is not None and sync:
                put.finish()

    tasks.run(write)


def _listed(path: str, null: bool) -> Iterator[str]:
    """Yield the paths listed in a file: ended by NUL if `null`, else one a line, ended by LF or CR LF."""
    try:
        with sys.stdin.buffer if path == "-" else open(path, "rb") as file:
            for name in file.read().split(b"\0" if null else b"\n"):
                if not null:
                    name = name.removesuffix(b"\r")
                if name:
                    yield os.fsdecode(name)
    except OSError as exc:
        raise UsageError(f"--files-from {path}: {reason_of(exc)}") from exc


@contextlib.contextmanager
def _opened(output: str, force: bool) -> Iterator[Callable[[bytes], object]]:
    """Yield a function that writes to the output."""
    from zarrfs.references.output import STDOUT, archive_form, compressor
    from zarrfs.store.destination import placed

    if output == STDOUT:
        yield sys.stdout.buffer.write
        return
    form = archive_form(output)
    with placed(output, "archive", force) as raw, compressor(raw, form) as file:
        yield file.write
