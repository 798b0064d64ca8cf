"""Code shared by the commands: registration, errors, options, printing."""

import functools
import inspect
import io
import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from typing import Annotated, Any

import typer
from typer import Option

from cosmos_rl_core.errors import CosmosRLError, no_space, visible
from flows.defaults import STORE_VARIABLE

PROGRAM = "cosmos-flows"
"""Program name in usage messages, also with ``python -m flows``."""
Command = Callable[..., None]
WRONG_DATA = 65
"""Exit code of a command that found damage and went on with the rest."""
INTERRUPTED = 130
"""Exit code after Ctrl-C. Shells report 143 for a process that SIGTERM ended."""


class OwnExitCode(SystemExit):
    """The exit code of a command that has codes of its own."""


StoreOption = Annotated[str, Option(envvar=STORE_VARIABLE, help="Directory or URL (s3://bucket/prefix) of all runs")]
ClusterOption = Annotated[str | None, Option(help="Cluster profile: a TOML file, or package:local")]
JsonOption = Annotated[bool, Option("--json", help="Print only JSON; notes go to stderr")]


MAKE, LOOK, PROVE = "Make and end runs", "Look at runs", "Prove and compare"
DATA, KEEP, TAKE = "Data and rewards", "Keep the house", "Take over from elsewhere"
"""Titles that `cosmos-flows --help` lists the commands under."""


def command(group: typer.Typer, name: str | None = None, panel: str | None = None) -> Callable[[Command], Command]:
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
                # The output may be on a full disk; the exit code still tells the kind.
                with suppress(OSError):
                    say(known, err=True)
                raise typer.Exit(known.exit_code) from error

        words, title, examples = (inspect.getdoc(body) or "").partition("Examples:")
        # A paragraph for each example, because typer keeps no other line breaks.
        epilog = "\n\n".join([title, *map(str.strip, examples.strip().splitlines())])
        return group.command(name, help=words, epilog=epilog, rich_help_panel=panel)(with_exit_code)

    return register


def _known(error: Exception) -> CosmosRLError | None:
    """Return the error with a message for people; None for an unexpected error, which is shown with a traceback."""
    if isinstance(error, CosmosRLError):
        return error
    return import_module("flows.running.server").not_answering(error) or no_space(error)


def store_named_by(context: typer.Context) -> str:
    """Return what the store of a command was taken from: ``--store``, the environment variable or ``the default``."""
    source = context.get_parameter_source("store")
    names = {"COMMANDLINE": "--store", "ENVIRONMENT": STORE_VARIABLE}
    return names.get("" if source is None else source.name, "the default")


def console() -> Any:
    """Return the console that tables and lines are printed on."""
    return import_module("flows.terminal.console").console()


def print_parts(*parts: object) -> None:
    """Print strings and tables of rich."""
    printer = console()
    for part in parts:
        printer.print(part, soft_wrap=isinstance(part, str))


def say(message: object, *, err: bool = False) -> None:
    """Print a line on stdout or stderr, its control characters escaped."""
    typer.echo(visible(str(message)), err=err)


def print_json(value: Any) -> None:
    """Print a value, which may have dataclasses in it, as indented JSON, with the characters that stdout can encode.

    Control characters are escaped, so that a terminal shows them and a reader of JSON gets the same value.
    """
    text = _NOT_ASCII.sub(_escaped, json.dumps(value, indent=1, ensure_ascii=False, default=asdict))
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=1, default=asdict)
    typer.echo(text)


_NOT_ASCII = re.compile(r"[^\n -~]")


def _escaped(found: re.Match[str]) -> str:
    char = found[0]
    return char if visible(char) == char else f"\\u{ord(char):04x}"


def accept_all_characters() -> None:
    """Let stdout and stderr escape what their encoding has no character for, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
