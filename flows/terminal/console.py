"""The console that every command prints on: no width where nobody looks at a terminal, and no hidden characters."""

import shutil
import sys
from typing import Any

from rich.console import Console, ConsoleDimensions
from rich.text import Text

from cosmos_rl_core.errors import visible

UNLIMITED = 1_000_000
"""Columns of a pipe or a file: names are never broken, so that other programs find them."""


class VisibleConsole(Console):
    """A console that shows control characters of names and prompts instead of sending them to the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text of a line, a cell or a title with its control characters escaped."""
        return super().render_str(visible(text), **options)


def console() -> VisibleConsole:
    """Return a console for stdout that prints text without colours and markup.

    On a terminal it has the terminal's width, also if that can only print (``TERM=dumb``).
    """
    # Variables that ask for colours do not make a terminal of a file.
    shown = VisibleConsole(highlight=False, markup=False, emoji=False, force_terminal=sys.stdout.isatty())
    if not shown.is_terminal:
        shown.width = UNLIMITED
    elif shown.is_dumb_terminal:
        # Rich assumes 80 columns for dumb terminals. It asks others at each print, because they may be resized.
        shown.size = ConsoleDimensions(*shutil.get_terminal_size())
    return shown


def can_redraw(shown: Console) -> bool:
    """Return whether lines can be drawn over."""
    return shown.is_terminal and not shown.is_dumb_terminal
