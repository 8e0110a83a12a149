"""The command line. Importing it loads neither torch nor transformers, so that `--help` answers at once."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from chairlift.cli.generate import command as generate_command
from chairlift.cli.report import CliError, print_error

app = typer.Typer(
    name="chairlift",
    help="Continuous batching for unmodified transformers models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("generate", no_args_is_help=True)(generate_command)


@app.command()
def env() -> None:
    """Versions, devices, memory and attention backends of this installation."""
    from chairlift.cli import environment

    environment.env()


def _print_version(asked: bool) -> None:
    if asked:
        from chairlift.cli.environment import installed_version

        typer.echo(f"chairlift {installed_version('chairlift')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """The console entry. What the user can put right is one line and exit code 2."""
    try:
        app()
    except CliError as error:
        print_error(str(error))
        sys.exit(2)
