"""Everything that the page of a report is made from: fragments, optimizer steps, and facts of the run now."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cosmos_rl_core.estimates.estimate import Estimate
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.contracts import METRICS, Update
from stages.registry import reader_of
from stages.reporting.contracts import Fragment
from stages.reporting.excerpt import Answered, Excerpt, Score

if TYPE_CHECKING:
    from stages.reporting.pictures import References

LOSS = "loss"
"""Name of the held-out loss among the rewards."""
Rows = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Piece:
    """One excerpt and where its full pictures are."""

    excerpt: Excerpt
    folder: str = ""
    """Address of the fragment's folder, relative to the page; "" if the page has no links."""
    of_answers: bool = False
    """Whether the excerpt was made from answers to questions."""
    answers: Sequence[Answered] = ()
    """The answers that the page shows."""

    @classmethod
    def read(cls, artifact: Artifact, folder: str = "", first: Artifact | None = None) -> "Piece":
        """Read a fragment, or answers to questions. ``first`` has the answers of version 0, to compare them with."""
        if (reader := reader_of(artifact.manifest.stage)) is not None:
            return cls(reader.excerpt_of(artifact, first), of_answers=True, answers=reader.answers_of(artifact, first))
        return cls(Excerpt.read(artifact.read(Fragment.FRAGMENT), artifact.url), folder)

    @property
    def k(self) -> int:
        """Return the iteration, or the policy version."""
        return self.excerpt.k

    def estimate(self, reward: str, score: str | None = None) -> Estimate:
        """Return the mean of a score over samples, with its error over prompts; NaN if the piece lacks the score."""
        return estimate(self.excerpt.score(reward, score))

    @property
    def loss(self) -> Estimate:
        """Return the held-out loss; NaN if it was not measured."""
        return estimate(self.excerpt.loss)


def estimate(found: Any) -> Estimate:
    """Return the estimate of a score, a change or a loss, whose numbers may be None."""
    if found is None or found.mean is None:
        return Estimate.missing()
    return Estimate(found.mean, math.nan if found.error is None else found.error, found.n, found.clusters)


@dataclass(frozen=True)
class Trained:
    """The optimizer steps of an iteration."""

    made: Manifest
    steps: Any
    """One row per optimizer step."""

    @classmethod
    def read(cls, artifact: Artifact) -> "Trained":
        """Read the numbers of an update."""
        # Imported on use because it needs pandas, and a status does not.
        return cls(artifact.manifest, import_module("stages.formats.tables").read_table(artifact, METRICS))

    @property
    def k(self) -> int:
        """Return the iteration."""
        return self.made.iteration or 0

    @property
    def excluded(self) -> int:
        """Return the number of samples that were not trained on."""
        return int(self.made.summary.get("excluded") or 0)

    @property
    def held_back_prompts(self) -> int:
        """Return the number of prompts without a sample that passed the gates."""
        return int(self.made.summary.get(Update.HELD_BACK) or 0)

    @property
    def last_step(self) -> int:
        """Return the total number of optimizer steps behind the policy that this iteration made."""
        steps = self.made.config["steps"]
        return steps["first_step"] + len(steps["lrs"])


@dataclass(frozen=True)
class Now:
    """Facts that no artifact holds: how the run goes, when, where, at what cost."""

    state: str
    """``running``, ``finished``, ``failed``, ``stopped``, ``suspended``, ``limited``, ``interrupted`` or ``idle``."""
    words: str
    """One sentence on the state."""
    written: str
    """Time in UTC at which the page was written: ``2025-01-31 12:00``."""
    left: str = ""
    """Time that the run still needs, in words; "" if it has ended or nothing tells."""
    weights: Rows = ()
    """The policy version to use, how far it moved, and the command that exports it."""
    error: str = ""
    """The whole message of a failure."""
    command: str = ""
    """The command that began or continues the run."""
    versions: Rows = ()
    """Packages and devices."""
    dates: Rows = ()
    troubles: Sequence[tuple[str, str, str]] = ()
    """Attempts that left no artifact, and artifacts that were made again: stage, how many attempts, why."""
    all_left_artifacts: bool = True
    """Whether every attempt that has ended left an artifact."""
    decisions: Sequence[tuple[int, str]] = ()
    """Decisions on warnings: iteration, words."""
    costs: Sequence[tuple[str, ...]] = ()
    """Rows of the table of costs, one for each stage, with the columns :attr:`cost_names`."""
    cost_names: Sequence[str] = ()
    links: Rows = ()
    """Names and addresses of files of the run next to the page."""


@dataclass(frozen=True)
class Book:
    """A run as its report shows it."""

    title: str
    reward: str
    """The headline reward; "" without rewards."""
    ranked_by: str = ""
    """Name of the number that ranks policies; "" if nothing ranks them."""
    init: str = ""
    about: Rows = ()
    settings: Rows = ()
    roles: dict[str, str] = field(default_factory=dict[str, str])
    staleness: int = 0
    """Number of updates by which a rollout's policy is behind."""
    iterations: Sequence[Piece] = ()
    judged: Sequence[Piece] = ()
    trained: Sequence[Trained] = ()
    now: Now | None = None
    references: "References | None" = None
    """The pictures and clips that prompts refer to."""

    @property
    def num_iterations(self) -> int:
        """Return the number of finished iterations."""
        return len(self.trained)

    @property
    def first(self) -> Piece | None:
        """Return iteration 0, with which the scores of all iterations are compared; None if it has no fragment."""
        return next((piece for piece in self.iterations if piece.k == 0), None)

    @property
    def steps_of(self) -> dict[int, int]:
        """Return the number of optimizer steps behind each policy version."""
        return {0: 0} | {one.k + 1: one.last_step for one in self.trained}

    @property
    def best_loss(self) -> Piece | None:
        """Return the judged version with the lowest held-out loss, the earliest of equal ones; None without any."""
        known = [piece for piece in self.judged if math.isfinite(piece.loss.mean)]
        return min(known, key=lambda piece: piece.loss.mean, default=None)

    @property
    def headline(self) -> str:
        """Return the name of the number that tells whether the policy learned.

        It is the number that ranks policies if that was measured, and otherwise the headline reward.
        """
        measured = self.judged and self._of(self.judged[0], self.ranked_by).n
        return self.ranked_by if measured else self.reward

    def ranking(self, piece: Piece) -> Estimate:
        """Return the headline number of a judged policy version."""
        return self._of(piece, self.headline)

    def _of(self, piece: Piece, name: str) -> Estimate:
        return piece.loss if name == LOSS else piece.estimate(name)

    def sampled_by(self, k: int) -> int:
        """Return the policy version that made the samples of an iteration."""
        return max(0, k - self.staleness)

    def role(self, score: Score) -> str:
        """Return the role of a score: ``trains``, ``gates``, or ``watched``."""
        role = self.roles.get(score.reward) if score.score == score.reward else None
        return {"train": "trains", "gate": "gates"}.get(role or "", "watched")
