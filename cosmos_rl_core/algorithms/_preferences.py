"""Files of human preferences: pairs of samples by their ids, as JSON lines or CSV."""

import csv
import io
import json
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.config.base import Section
from cosmos_rl_core.errors import ArtifactError, ConfigError, first_line


class Preference(Section):
    """A sample that somebody preferred to another one of the same prompt."""

    winner: str = Field(min_length=1)
    """Id of the preferred sample, as in ``advantages.parquet``."""
    loser: str = Field(min_length=1)
    """Id of the other one."""

    @model_validator(mode="after")
    def _of_two(self) -> Self:
        if self.winner == self.loser:
            raise ValueError(f"{self.winner} cannot win against itself")
        return self


def read(path: str, planned: str = "") -> tuple[list[Preference], str]:
    """Return the preferences in a file, and its sha256 (hex). A name that ends in ``.csv`` is a table with a header.

    Raises :class:`ConfigError` that shows the first lines which are not preferences. If ``planned`` is the digest of an
    earlier read, a missing or changed file raises :class:`ArtifactError` instead.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        kind = ArtifactError if planned else ConfigError
        raise kind(f"preferences = {path!r} cannot be read: {error}") from error
    found = sha256(data)
    if planned and found != planned:
        raise ArtifactError(
            f"preferences = {path!r} has changed: found sha256 {found[:12]}, planned {planned[:12]}; restore "
            "the file, or begin another run"
        )
    return _parsed(path, data), found


def _parsed(path: str, data: bytes) -> list[Preference]:
    found: list[Preference] = []
    wrong: list[str] = []
    try:
        # Spreadsheets write a byte order mark first.
        lines = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"preferences = {path!r} is no text in UTF-8: {error}") from error
    rows: list[Any] = (
        [*csv.DictReader(io.StringIO(lines, newline=""))]
        if path.endswith(".csv")
        else [line for line in lines.splitlines() if line.strip()]
    )
    for number, row in enumerate(rows, 1):
        try:
            found.append(Preference.model_validate(json.loads(row) if isinstance(row, str) else row))
        except (ValidationError, ValueError) as error:
            wrong.append(f"pair {number}: {_reason(error)}")
    if wrong or not found:
        told = "; ".join(wrong[:3]) or "it is empty"
        raise ConfigError(
            f"preferences = {path!r}: {told}; expected the sample ids `winner` and `loser` in each line, as JSON, "
            f"or as columns of a .csv with a header; {len(wrong)} of {len(rows)} rows are no preferences"
        )
    return found


def _reason(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return first_line(error)
    return ", ".join(f"{'.'.join(map(str, one['loc']))} {one['msg']}".strip() for one in error.errors())
