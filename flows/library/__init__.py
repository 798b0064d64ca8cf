"""Runs from Python: ``from flows.library import open_run``. Reads only, and checks every byte that it reads."""

from flows.library.opened_run import OpenedRun, open_run

__all__ = ["OpenedRun", "open_run"]
