"""Commands made of functions, with help from their docstrings and exit codes from their errors."""

import functools
import gc
import inspect
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import typer

from cosmos_rl_core.errors import ConfigError, CosmosRLError, misplaced, no_space
from flows.cli.base.printing import say

PROGRAM = "cosmos-flows"
"""Program name in usage messages, also with ``python -m flows``."""
WRONG_DATA = 65
"""Exit code of a command that found damage and went on with the rest."""
INTERRUPTED = 130
"""Exit code after Ctrl-C. Shells report 143 for a process that SIGTERM ended."""
EXAMPLES = "Examples:"
"""Line of a docstring after which its examples come."""


class OwnExitCode(SystemExit):
    """The exit code of a command that has codes of its own."""


def command_of(body: Callable[..., None], name: str, panel: str | None) -> Any:
    """Return the command of a function. Its docstring is the help; its errors go to stderr and set the exit code."""

    @functools.wraps(body)
    def with_exit_code(*args: Any, **kwargs: Any) -> None:
        # The program disables garbage collection for its imports, whose objects live until the end.
        gc.freeze()
        gc.enable()
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

    words, title, examples = (inspect.getdoc(body) or "").partition(EXAMPLES)
    # A paragraph for each example, because typer keeps no other line breaks.
    epilog = "\n\n".join([title, *map(str.strip, examples.strip().splitlines())])
    alone = typer.Typer(add_completion=False)
    alone.command(name, help=words, epilog=epilog, rich_help_panel=panel)(with_exit_code)
    return typer.main.get_command(alone)


def _known(error: Exception) -> CosmosRLError | None:
    """Return the error with a message for people; None for an unexpected error, which is shown with a traceback."""
    if isinstance(error, CosmosRLError):
        return error
    # Imported here, because only a failure needs the client of HTTP.
    found = import_module("flows.running.server").not_answering(error) or no_space(error)
    return found or (_at_a_path(error) if isinstance(error, OSError) and error.filename else None)


def _at_a_path(error: OSError) -> CosmosRLError | None:
    """Return the error of a path without permission, or with a file in place of a folder; None for other errors."""
    if isinstance(error, FileExistsError):
        return ConfigError(f"{error.filename} exists, and is no folder; name another place")
    return misplaced(error, "use", str(error.filename))
