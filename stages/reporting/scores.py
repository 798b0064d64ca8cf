"""All scores of a run since policy 0: how far each has moved, and signs of reward hacking."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup

from cosmos_rl_core.estimates.digits import number, signed
from cosmos_rl_core.estimates.estimate import FEWEST, Estimate, scaled
from stages.reporting.book import Book, Piece, estimate
from stages.reporting.curves import histogram, spark
from stages.reporting.excerpt import Score
from stages.reporting.numbers import z_score

MOVED = 4.0
"""Number of standard errors beyond which a watched score counts as moved."""
NAMED = 4
"""Most watched scores that are named."""
DIVERSITY = "group_diversity"
"""The score that tells how much samples of one prompt differ."""


@dataclass(frozen=True)
class Moved:
    """One score over the iterations."""

    score: Score
    """Score in iteration 0."""
    role: str
    now: Score
    by_iteration: list[tuple[int, float]]
    """Iterations with their z-scores: how far the mean has moved, in standard deviations of policy 0's samples."""
    tripped: list[int]
    """Iterations in which a limit on it tripped."""
    curve: Markup
    """A small curve of the z-scores over the policies that made the samples, with dots where limits tripped."""

    @property
    def z(self) -> float:
        """Return the z-score: how far the mean has moved, in standard deviations of policy 0's samples."""
        return scaled(self.change, self.score.deviation)

    @property
    def drift(self) -> float:
        """Return how far the mean has moved, in standard errors of the difference; NaN with too few prompts."""
        return estimate(self.now).minus(estimate(self.score)).in_errors

    @property
    def change(self) -> float:
        """Return the change of the mean since iteration 0; NaN if one is missing."""
        ends = self.score.mean, self.now.mean
        return math.nan if ends[0] is None or ends[1] is None else ends[1] - ends[0]

    @property
    def furthest(self) -> tuple[int, float]:
        """Return the iteration whose z-score is furthest from 0, and that z-score."""
        return max(self.by_iteration, key=lambda row: abs(row[1]), default=(0, 0.0))

    @property
    def cells(self) -> list[str | Markup]:
        """Return the cells of the score's row in the table, in the order of :data:`NAMES`."""
        k, z = self.furthest
        first, now = (
            Markup("{}<i>{}</i>").format(one.shown, one.error_shown) for one in map(estimate, (self.score, self.now))
        )
        tripped = f"tripped {len(self.tripped)} times" if len(self.tripped) > 1 else "tripped" * len(self.tripped)
        furthest = f"{z_score(_shown(z))} in {k}"
        return [
            self.score.name.replace(": ", " \u203a "), self.role, self.curve, first, now,
            z_score(_shown(self.z)), z_score(_shown(self.drift)), furthest, tripped,
        ]  # fmt: skip


NAMES = ["score", "role", "z over policies", "iteration 0", "newest", "z", "drift", "furthest z", "limit"]


def moved(book: Book) -> list[Moved]:
    """Return every score of iteration 0 with its movement since then; scores that train come first."""
    if (first := book.first) is None:
        return []
    rows = [_moved(book, score) for score in first.excerpt.scores if score.n]
    order = ["trains", "gates", "watched"]
    return sorted(rows, key=lambda row: order.index(row.role))


def _moved(book: Book, score: Score) -> Moved:
    names = score.reward, score.score
    found = [(piece.k, one) for piece in book.iterations if (one := piece.excerpt.score(*names)) is not None]
    means = [(k, one.mean) for k, one in found if one.mean is not None]
    z = [(k, scaled(mean - score.mean, score.deviation)) for k, mean in means if score.mean is not None]
    tripped = [p.k for p in book.iterations if any((t.reward, t.score) == names for t in p.excerpt.tripped)]
    curve = spark([(book.sampled_by(k), value) for k, value in z], map(book.sampled_by, tripped))
    return Moved(score, book.role(score), found[-1][1], z, tripped, curve)


def _shown(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None


def signs(book: Book, rows: list[Moved]) -> Iterator[tuple[str, str]]:
    """Yield sentences that speak for or against reward hacking, each with ``good``, ``bad`` or ``""``."""
    limits = _limits(book)
    yield limits
    yield from _training_and_held_out(book, rows, tripped=limits[0] == "bad")
    watched = [row for row in rows if row.role == "watched" and abs(row.drift) > MOVED]
    if watched:
        watched.sort(key=lambda row: -abs(row.z) if math.isfinite(row.z) else -math.inf)
        names = ", ".join(f"{row.score.name} {z_score(_shown(row.z))}" for row in watched[:NAMED])
        more = f" and {len(watched) - NAMED} more" if len(watched) > NAMED else ""
        yield "", f"Scores that nobody trains on have moved with the policy (z-scores of policy 0): {names}{more}."
    elif any(row.role == "watched" and math.isfinite(row.drift) for row in rows):
        yield "good", f"No score that is only watched has moved by more than {MOVED:g} standard errors."
    diversity = next((row for row in rows if row.score.score == DIVERSITY), None)
    if diversity is not None and not math.isnan(diversity.drift):
        fell = diversity.drift < -MOVED
        how = "fell" if fell else "did not clearly fall"
        values = f"{number(diversity.score.mean)} to {number(diversity.now.mean)}"
        yield (
            "bad" if fell else "good",
            f"The diversity within prompts {how}: {values}, z-score {z_score(_shown(diversity.z))}.",
        )
    if book.iterations and (newest := book.iterations[-1].excerpt).alike:
        share = f"{newest.alike} of {newest.prompts} prompts"
        yield "", f"In iteration {newest.k}, {share} gave all their samples one reward, from which nothing is learned."


def _limits(book: Book) -> tuple[str, str]:
    tripped = [piece for piece in book.iterations if piece.excerpt.tripped]
    undecided = [piece for piece in book.iterations if piece.excerpt.undecided]
    if not tripped and undecided:
        few = f"an iteration or iteration 0 has fewer than {FEWEST} prompts"
        return "", f"Limits of early warning on drift gave no verdict in {len(undecided)} iterations: {few}."
    if not tripped:
        return "good", "No limit of early warning tripped."
    count = sum(len(piece.excerpt.tripped) for piece in tripped)
    first = tripped[0]
    times = "once" if count == 1 else f"{count} times"
    places = f"{len(tripped)} iteration{'s' * (len(tripped) > 1)}, first in iteration {first.k}"
    return "bad", f"Limits of early warning tripped {times} in {places}: {first.excerpt.tripped[0].words}."


def _training_and_held_out(book: Book, rows: list[Moved], *, tripped: bool) -> Iterator[tuple[str, str]]:
    """Yield whether the headline reward moved in the same direction on training and on held-out prompts.

    A hacked reward rises on held-out prompts too, so this is no good sign if a limit tripped. The reward is named if
    another number ranks policies.
    """
    own = next((row for row in rows if row.score.name == book.reward), None)
    held_out = headline_change(book)
    if own is None or held_out is None:
        return
    rose, named = own.drift > 2, "" if book.headline == book.reward else f" {book.reward}"
    if rose and held_out.direction == "rose":
        words = f"The training reward{named} and the held-out one both rose (held out {signed(held_out.mean)})"
        yield ("", f"{words}, as they do when a reward is hacked.") if tripped else ("good", f"{words}.")
    elif rose:
        words = f"The training reward{named} rose, the held-out one"
        yield "bad", f"{words} {held_out.direction}: the policy may have learned its prompts or the scorer."


def headline_change(book: Book) -> Estimate | None:
    """Return the change of the headline reward on held-out samples since version 0; None without two versions."""
    return change_of(book.judged[-1], book.reward) if len(book.judged) > 1 else None


def change_of(piece: Piece, name: str) -> Estimate | None:
    """Return the change of a reward, or of the held-out loss, since version 0; None if it was not measured."""
    found = next((one for one in piece.excerpt.changes if one.of == name), None)
    return None if found is None or found.mean is None else estimate(found)


def distributions(book: Book) -> list[tuple[str, int, Markup]]:
    """Return name, newest iteration and histogram of each reward; the histogram shows iteration 0 and the newest."""
    if (first := book.first) is None:
        return []
    last = book.iterations[-1]
    found: list[tuple[str, int, Markup]] = []
    for score in first.excerpt.scores:
        now = last.excerpt.score(score.reward, score.score)
        if score.score == score.reward and score.quantiles and now is not None and now.quantiles:
            pair = [("soft", score.quantiles), ("train", now.quantiles)][: 1 + (last.k > 0)]
            found.append((score.name, last.k, histogram(pair, score.name)))
    return found
