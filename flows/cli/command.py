"""Code shared by the commands: registration, errors, options, printing."""

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from typing import Annotated, Any

import typer
from typer import Option

from cosmos_rl_core.errors import CosmosRLError, no_space

PROGRAM = "cosmos-flows"
"""Program name in usage messages, also with ``python -m flows``."""
Command = Callable[..., None]
INTERRUPTED = 130
"""Exit code after Ctrl-C. Shells report 143 for a process that SIGTERM ended."""


class OwnExitCode(SystemExit):
    """The exit code of a command that has codes of its own."""


StoreOption = Annotated[str, Option(help="Directory or URL (s3://bucket/prefix) of all runs")]
ClusterOption = Annotated[str | None, Option(help="Cluster profile: a TOML file, or package:local")]
JsonOption = Annotated[bool, Option("--json", help="Print only JSON; notes go to stderr")]


def command(group: typer.Typer, name: str | None = None) -> Callable[[Command], Command]:
    """Register a command. Its docstring is its help; its errors go to stderr and set the exit code."""

    def register(body: Command) -> Command:
        @functools.wraps(body)
        def with_exit_code(*args: Any, **kwargs: Any) -> None:
            try:
                body(*args, **kwargs)
            except KeyboardInterrupt as stopped:
                raise typer.Exit(INTERRUPTED) from stopped
            except Exception as error:
                known = _known(error)
                if known is None:
                    raise
                typer.echo(str(known), err=True)
                raise typer.Exit(known.exit_code) from error

        words, title, examples = (inspect.getdoc(body) or "").partition("Examples:")
        # A paragraph for each example, because typer keeps no other line breaks.
        epilog = "\n\n".join([title, *map(str.strip, examples.strip().splitlines())])
        return group.command(name, help=words, epilog=epilog)(with_exit_code)

    return register


def _known(error: Exception) -> CosmosRLError | None:
    """Return the error with a message for people; None for an unexpected error, which is shown with a traceback."""
    if isinstance(error, CosmosRLError):
        return error
    return import_module("flows.running.server").not_answering(error) or no_space(error)


def console() -> Any:
    """Return a console that prints text without colours and markup."""
    return import_module("rich.console").Console(highlight=False, markup=False, emoji=False)


def print_parts(*parts: object) -> None:
    """Print strings and tables of rich."""
    printer = console()
    for part in parts:
        printer.print(part, soft_wrap=isinstance(part, str))


def print_json(value: Any) -> None:
    """Print a value, which may have dataclasses in it, as indented JSON."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False, default=asdict))
