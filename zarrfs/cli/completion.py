"""zarrfs completion SHELL: write the completion script of a shell."""

from __future__ import annotations

import click

from zarrfs.cli.common import SETTINGS, Choice

EPILOG = """\b
Examples:
  eval "$(zarrfs completion bash)"                             (in ~/.bashrc)
  zarrfs completion zsh > ~/.zfunc/_zarrfs                     (in a directory of $fpath)
  zarrfs completion fish > ~/.config/fish/completions/zarrfs.fish
\b
The Debian package installs all three."""


@click.command(epilog=EPILOG, context_settings=SETTINGS)
@click.argument("shell", type=Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Write the script that makes SHELL complete commands, options, their values, and mount points."""
    from zarrfs.cli.shell_completion import script

    click.echo(script(shell))
