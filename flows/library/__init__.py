"""Runs from Python: ``from flows.library import open_run``. Reads only, and checks every byte that it reads."""

from flows.library.lines import RunLine, all_runs
from flows.library.opened_run import OpenedRun, open_run

__all__ = ["OpenedRun", "RunLine", "all_runs", "open_run"]
