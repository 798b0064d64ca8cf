"""Agreement of a judge with labels of people, on files that it was not trained on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from pydantic import Field, ValidationError

from cosmos_rl_core.canonical import from_json
from cosmos_rl_core.config.base import Section
from cosmos_rl_core.errors import ConfigError, first_line
from cosmos_rl_core.rewards._judge.service import number

FEWEST = 20
"""Smallest number of labelled files with a score: with fewer, a reward may not train."""


class Agreement(Section):
    """Scores of a judge compared with labels of the same files."""

    format: Literal[1] = 1
    reward: str
    """Label of the reward."""
    scorer: str
    """Version of the reward's scorer: packages, digest of the weights, question."""
    files: int = Field(ge=1)
    """Number of labelled files."""
    failed: int = Field(ge=0)
    """Number of labelled files without a score. They are in none of the other numbers."""
    rank_correlation: float | None
    """Spearman's, -1 to 1; None if all scores or all labels are equal."""
    ordered: float | None
    """Share of the pairs with different labels that the scores put in the same order, an equal score counting half;
    None without such a pair. Chance is 0.5."""
    equal: float
    """Share of the scored files whose score equals their label."""

    def words(self) -> str:
        """Return all numbers as one line of text."""
        parts = [f"{self.files} labelled files", f"{self.failed} without a score"]
        parts += [
            "no rank correlation" if self.rank_correlation is None else f"rank correlation {self.rank_correlation:.3f}"
        ]
        parts += [] if self.ordered is None else [f"{self.ordered:.3f} of pairs in the order of their labels"]
        return ", ".join([*parts, f"{self.equal:.3f} equal"])


def agreement(reward: str, scorer: str, scores: Sequence[float | None], labels: Sequence[float]) -> Agreement:
    """Return how far scores agree with labels. A score is None where the judge failed."""
    table = pd.DataFrame({"score": pd.Series(scores, dtype="float64"), "label": pd.Series(labels, dtype="float64")})
    known = table.dropna()
    scored, wanted = known["score"].to_numpy("float64"), known["label"].to_numpy("float64")
    ranks = known.rank()
    varied = len(known) > 1 and bool((ranks.nunique() > 1).all())
    return Agreement(
        reward=reward,
        scorer=scorer,
        files=len(table),
        failed=len(table) - len(known),
        rank_correlation=float(np.corrcoef(ranks["score"], ranks["label"])[0, 1]) if varied else None,
        ordered=_ordered(scored, wanted),
        equal=float(np.mean(scored == wanted)) if len(known) else 0.0,
    )


def _ordered(scores: np.ndarray, labels: np.ndarray) -> float | None:
    first, second = np.triu_indices(len(scores), 1)
    wanted = np.sign(labels[first] - labels[second])
    agree = np.sign(scores[first] - scores[second])[wanted != 0] * wanted[wanted != 0]
    return float(((agree + 1) / 2).mean()) if len(agree) else None


def lines_of(file: Path) -> list[str]:
    """Return the lines of a text file, empty ones too, without a mark of the byte order before the first.

    Only line breaks end a line, not separators that texts may contain. Raises :class:`ConfigError` for other files.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    return lines[:-1] if lines[-1] == "" else lines


def labels_of(file: Path, count: int) -> list[float]:
    """Return the label of each of ``count`` files, a number on each line of ``file``.

    Raises :class:`ConfigError` if there are fewer or more lines, and for lines that are no finite number.
    """
    lines = lines_of(file)
    if len(lines) != count:
        raise ConfigError(f"{file} has {len(lines)} lines for {count} files; give a line, its label, for each file")
    found = [number(line) for line in lines]
    if wrong := [place for place, value in enumerate(found) if value is None]:
        line = wrong[0]
        raise ConfigError(f"{file}, line {line + 1}: {lines[line]!r} is no number; {len(wrong)} lines hold none")
    return [value for value in found if value is not None]


def read(path: str, reward: str, scorer: str) -> Agreement:
    """Return the agreement in a file.

    Raises :class:`ConfigError` for a file of another reward or version of the scorer, and for too few scored files.
    """
    write = (
        f"write it with `cosmos-flows score FILES --reward {reward.partition('-')[0]} --labels ... --agreement {path}`"
    )
    try:
        found = Agreement.model_validate(from_json(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"agreement = {path!r} cannot be read ({error}); {write}") from error
    except (ValueError, ValidationError) as error:
        raise ConfigError(f"agreement = {path!r} holds no agreement: {first_line(error)}; {write}") from error
    if (found.reward, found.scorer) != (reward, scorer):
        raise ConfigError(
            f"agreement = {path!r} belongs to {found.reward}, {found.scorer}; this is {reward}, {scorer}; {write}"
        )
    if found.files - found.failed < FEWEST:
        raise ConfigError(
            f"agreement = {path!r} has {found.files - found.failed} files with a score, expected at least {FEWEST}"
        )
    return found
