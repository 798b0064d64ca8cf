"""Runs from Python: ``from flows.library import open_run``. Reads only, and checks every byte that it reads."""

from flows.library.opened_run import OpenedRun, open_run
from flows.library.picture import Picture
from flows.library.policy import Policy

__all__ = ["OpenedRun", "Picture", "Policy", "open_run"]
