"""The verdict of the report on reward hacking, made from only the fragments on which it depends."""

from collections.abc import Sequence

from flows.planning import facts
from flows.planning.base import AnyRun
from flows.planning.ranking import ranked_by
from flows.warning.warnings import Warned
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.slots import input_of
from stages.reporting.book import Book, Piece
from stages.reporting.excerpt import Excerpt, Tripped
from stages.reporting.numbers import words
from stages.reporting.scores import moved, signs


def verdict(run: AnyRun, made: Sequence[Manifest]) -> str:
    """Return in a few sentences whether a run has signs of reward hacking; "" without scores of rollouts.

    ``made`` are its artifacts, in order. Raises :class:`ArtifactError` if a fragment or evidence is damaged.
    """
    fragments = [one for one in made if one.stage == "fragment"]
    judged = _ends([one for one in fragments if one.config["held_out"]])
    first_and_last = _ends([one for one in fragments if not one.config["held_out"]])
    if not first_and_last:
        return ""
    # Between the first and the last iteration, only limits count.
    pieces = {one.iteration or 0: _limits(one) for one in made if one.stage == "warn"}
    pieces |= {piece.k: piece for piece in first_and_last}
    book = Book(
        title=run.plan.run_id,
        reward=run.headline_reward,
        ranked_by=ranked_by(run),
        roles=facts.roles(run.plan),
        staleness=run.staleness,
        iterations=[piece for _, piece in sorted(pieces.items())],
        judged=judged,
    )
    found = [*signs(book, moved(book))]
    if bad := [said for kind, said in found if kind == "bad"]:
        return f"perhaps: {' '.join(bad)}"
    return f"no sign of it: {found[0][1][0].lower()}{found[0][1][1:]}"


def _ends(fragments: Sequence[Manifest]) -> list[Piece]:
    """Return the first and the last of ``fragments``, read; one if they are the same."""
    ends = {one.digest: one for one in (*fragments[:1], *fragments[-1:])}
    return [Piece.read(Artifact(input_of(one.slot))) for one in ends.values()]


def _limits(made: Manifest) -> Piece:
    """Return an iteration with nothing but its limits that tripped."""
    rows = [] if (found := Warned.of(made)) is None else found.rows
    tripped = (Tripped(words=words(row), reward=row["reward"], score=row["score"], samples=()) for row in rows)
    return Piece(
        Excerpt(k=made.iteration or 0, tripped=tuple(tripped), undecided=int(made.summary.get("undecided") or 0))
    )
