"""Faults that an audit found, and parts that it could not look at."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.table import Column, Table

from cosmos_rl_core.errors import ArtifactError, CosmosRLError, counted, first_line

SHOWN = 50
"""Faults that are listed one by one."""


@dataclass(frozen=True)
class Fault:
    """One thing that is not as it was committed."""

    file: str
    """The file, relative to the store where it lies in it."""
    field: str
    """The field or the row that is wrong; ``bytes`` for a file as a whole."""
    what: str
    """What was found and what was expected."""


@dataclass
class Findings:
    """The faults that an audit found, and counts of the artifacts, files and bytes that it looked at."""

    root: str
    """The store."""
    faults: list[Fault] = field(default_factory=list[Fault])
    gone: list[str] = field(default_factory=list[str])
    """Parts that retention deleted, of which nothing can be proved any more."""
    unchecked: list[str] = field(default_factory=list[str])
    """Contents that were not computed again and compared, and why: by another version, or of another moment."""
    pending: list[str] = field(default_factory=list[str])
    """Files that are not there yet, because a process works on the run."""
    unknown: list[str] = field(default_factory=list[str])
    """Files of the run that nothing names, and that pass for no part of it."""
    head: str = ""
    """Number and digest of the newest head; "" without one."""
    signed: str = ""
    """Up to which head the run is signed, and by which key; "" if no key was given."""
    artifacts: int = 0
    files: int = 0
    size: int = 0
    """Bytes that were hashed."""
    _known: set[Fault] = field(default_factory=set[Fault])
    """The faults, to look them up: a run that lost a folder has one for each file in it."""

    def add(self, url: str, name: str, what: str) -> None:
        """Add a fault, once."""
        fault = Fault(self.place(url), name, what)
        if fault not in self._known:
            self._known.add(fault)
            self.faults.append(fault)

    def place(self, url: str) -> str:
        """Return a URL relative to the store."""
        return url.removeprefix(f"{self.root}/")

    @contextmanager
    def catching(self, url: str, name: str) -> Iterator[None]:
        """Add an :class:`ArtifactError` of the block as a fault of ``url``."""
        try:
            yield
        except ArtifactError as error:
            self.add(url, name, first_line(error))

    @contextmanager
    def checking(self, url: str, name: str) -> Iterator[None]:
        """Add an error of the block as a fault of the file ``url``, whose bytes are right and contents are not."""
        try:
            yield
        except (CosmosRLError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self.add(url, name, f"cannot be checked: {' '.join(str(error).split())}")

    def lines(self) -> list[str | Table]:
        """Return the lines to print: a table of faults, or a line that says there are none."""
        seen = f"{counted(self.artifacts, 'artifact')}, {counted(self.files, 'file')}, {self.size / 1e6:.1f} MB"
        lines: list[str | Table] = []
        if self.faults:
            # Folded, because a path that is cut off names no file.
            table = Table(*(Column(title, overflow="fold") for title in ("file", "field", "what")), box=None)
            for fault in self.faults[:SHOWN]:
                table.add_row(fault.file, fault.field, fault.what)
            lines.append(table)
        if (more := len(self.faults) - SHOWN) > 0:
            lines.append(f"and {more} more; --json lists all")
        lines += [f"newest head {self.head}"] * bool(self.head)
        lines += [self.signed] * bool(self.signed)
        lines += [f"deleted by retention, so not provable: {name}" for name in self.gone]
        lines += [f"not there yet: {name}" for name in self.pending]
        lines += [f"not computed again: {name}" for name in self.unchecked]
        lines += [f"nothing names: {name}" for name in self.unknown[:SHOWN]]
        if (more := len(self.unknown) - SHOWN) > 0:
            lines.append(f"and {more} more that nothing names; --json lists all")
        lines.append(f"{counted(len(self.faults), 'fault')} in {seen}" if self.faults else f"nothing is wrong: {seen}")
        return lines

    def as_json(self) -> dict[str, Any]:
        """Return all findings as JSON, for scripts."""
        faults = [vars(fault) for fault in self.faults]
        counts = {"artifacts": self.artifacts, "files": self.files, "bytes": self.size}
        return {
            "faults": faults,
            "gone": self.gone,
            "unchecked": self.unchecked,
            "pending": self.pending,
            "unknown": self.unknown,
            "head": self.head,
            "signed": self.signed,
        } | counts
