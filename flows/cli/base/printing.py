"""Lines, tables and JSON on stdout, notes on stderr."""

import io
import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict
from typing import Any

import typer

from cosmos_rl_core.errors import visible
from flows.terminal.console import console

_NOT_ASCII = re.compile(r"[^\n -~]")


def print_parts(*parts: object) -> None:
    """Print strings and tables of rich."""
    printer = console()
    for part in parts:
        printer.print(part, soft_wrap=isinstance(part, str))


def print_found(found: Any, parts: Iterable[object], *, as_json: bool) -> None:
    """Print the result of a command: as the only JSON document of stdout, or as strings and tables for people."""
    if as_json:
        print_json(found)
    else:
        print_parts(*parts)


@contextmanager
def notes_on_stderr(as_json: bool) -> Iterator[None]:
    """Send to stderr what the block prints, if stdout is for JSON alone."""
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        yield


def say(message: object, *, err: bool = False) -> None:
    """Print a line on stdout or stderr, its control characters escaped."""
    typer.echo(visible(str(message)), err=err)


def print_json(value: Any) -> None:
    """Print a value as indented JSON, with the characters that stdout can encode.

    It may have dataclasses in it, and objects with a method ``as_json``. Control
    characters are escaped, so that a terminal shows them and a reader of JSON gets the same value.
    """
    text = _NOT_ASCII.sub(_escaped, json.dumps(value, indent=1, ensure_ascii=False, default=_plain))
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=1, default=_plain)
    typer.echo(text)


def _plain(value: Any) -> Any:
    return value.as_json() if hasattr(value, "as_json") else asdict(value)


def _escaped(found: re.Match[str]) -> str:
    char = found[0]
    return char if visible(char) == char else f"\\u{ord(char):04x}"


def accept_all_characters() -> None:
    """Let stdout and stderr escape characters that their encoding lacks, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
