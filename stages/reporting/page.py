"""The page of a report, and other HTML pages, from the templates of this folder."""

import base64
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from cosmos_rl_core.errors import visible
from cosmos_rl_core.estimates.digits import number, signed
from cosmos_rl_core.estimates.estimate import Estimate
from cosmos_rl_core.weights.parts import CURRENT
from stages.reporting.book import LOSS, Book, Piece, Trained
from stages.reporting.choosing import evenly
from stages.reporting.contracts import WEIGHTED
from stages.reporting.curves import WIDE, Series, curve
from stages.reporting.excerpt import HELD_OUT_LOSS, Answered, Picture
from stages.reporting.pictures import References
from stages.reporting.scores import NAMES, change_of, distributions, moved, signs
from stages.reporting.training import drawn, losses

PICTURE_BYTES = 24_000_000
"""Most characters of small pictures of iterations in a page. A longer run shows evenly spaced iterations."""
STRIP = 24
"""Most iterations or policy versions in a row of pictures."""
TRIPPED = 24
"""Most iterations whose limits are shown with their samples."""
LISTED = 200
"""Most rows of a table of prompts, failures or weights."""
HEADLINES = 4
"""Most numbers in large digits."""


def report_page(book: Book) -> bytes:
    """Return the page as HTML. Without ``now`` it has no links and no script, and equal artifacts give equal bytes."""
    references = _references(book)
    rows, held_out = moved(book), _held_out(book)
    evidence = list(signs(book, rows))
    limited = [piece for piece in book.iterations if piece.excerpt.tripped]
    last = book.judged[-1] if len(book.judged) > 1 else None
    return render(
        "report.html",
        book=book,
        now=book.now,
        script=_script() if book.now else "",
        held_out=held_out,
        headlines=_headlines(book, held_out),
        weighted=WEIGHTED,
        of_answers=any(piece.of_answers for piece in book.judged),
        curves=list(_curves(book)),
        signs=evidence,
        suspected=any(kind == "bad" for kind, _ in evidence),
        score_names=NAMES,
        scores=[row.cells for row in rows],
        limited=len(limited),
        tripped=evenly(limited, TRIPPED),
        distributions=distributions(book),
        worst=[(piece, piece.excerpt.chosen("worst")[0]) for piece in _strip(book.iterations, "worst")],
        film=_film(book),
        answers=[(title, some) for title, some in _answers(book) if some],
        newest=last if last and last.excerpt.first else None,
        prompts=_prompts(book),
        training=drawn(book),
        failures=_failures(book),
        generated=_generated(book),
        failed=_failed(book),
        lineage=_lineage(book.trained)[-LISTED:],
        lineage_names=LINEAGE,
        iterations=_with_pictures(book, references),
        references=references,
    )


@dataclass(frozen=True)
class HeldOut:
    """A reward or a loss on held-out data, of the first and of the last judged policy version."""

    name: str
    before: Estimate
    after: Estimate | None
    change: Estimate | None
    better: str
    """The direction that is good: ``rose`` or ``fell``."""


def _held_out(book: Book) -> list[HeldOut]:
    """Return the numbers measured on held-out data: the headline, the headline reward, the loss, other rewards."""
    if not book.judged:
        return []
    first, last = book.judged[0], book.judged[-1] if len(book.judged) > 1 else None
    loss = None if last is None else last.loss
    change = None if last is None else change_of(last, HELD_OUT_LOSS)
    measured = HeldOut(LOSS, first.loss, loss, change, "fell")
    names = dict.fromkeys([book.headline, book.reward, LOSS, *(one.reward for one in first.excerpt.scores)])
    found = [
        measured if name == LOSS else HeldOut(name, first.estimate(name), *_after(last, name), "rose")
        for name in names
        if name
    ]
    return [one for one in found if one.before.n]


def _headlines(book: Book, held_out: Sequence[HeldOut]) -> list[HeldOut]:
    """Return the held-out numbers in large digits: the headline, and the loss or, if that is it, the headline reward.

    A run without rewards shows its first :data:`HEADLINES` held-out numbers.
    """
    second = book.reward if book.headline == LOSS else LOSS
    shown = {book.headline, second} if book.reward else {one.name for one in held_out}
    return [one for one in held_out if one.name in shown][:HEADLINES]


def _after(last: Piece | None, name: str) -> tuple[Estimate | None, Estimate | None]:
    return (None, None) if last is None else (last.estimate(name), change_of(last, name))


def _curves(book: Book) -> Iterator[tuple[str, str, Sequence[Series], Markup]]:
    """Yield title, label of the x axis, series and drawing of each curve that shows whether the policy learned."""
    marks = [book.sampled_by(piece.k) for piece in book.iterations if piece.excerpt.tripped]
    names = [name for name in dict.fromkeys([book.headline, book.reward]) if name not in ("", LOSS)]
    titles = ["Reward"] if names == [book.reward] else [f"Reward: {n}" if book.reward else n for n in names]
    made_by = "policy version that made the samples" if book.reward else "policy version"
    found = [(title, made_by, _rewards(book, name), marks) for title, name in zip(titles, names, strict=True)]
    if book.trained and not book.iterations:
        found.append(("Training loss", "optimizer steps done", [losses(book.trained)], []))
    steps = book.steps_of
    points = [(steps[piece.k], piece.loss) for piece in book.judged if piece.k in steps]
    by_step = Series("held-out loss ± 1 standard error", points, line=False, ink="held")
    found.append(("Held-out loss", "optimizer steps done", [by_step], []))
    for title, x_label, series, places in found:
        known = [one for one in series if one.rows]
        if known:
            yield title, x_label, known, curve(known, x_label, WIDE, places)


def _rewards(book: Book, name: str) -> list[Series]:
    """Return the curves of a reward on training samples and on held-out samples, empty where it was not measured."""
    training = [(book.sampled_by(piece.k), piece.estimate(name)) for piece in book.iterations]
    held_out = [(piece.k, piece.estimate(name)) for piece in book.judged]
    return [
        Series("training, mean of each iteration ± 1 standard error", training, line=True),
        Series("held-out ± 1 standard error", held_out, line=False, ink="held"),
    ]


def _strip(pieces: Sequence[Piece], why: str) -> list[Piece]:
    """Return evenly spaced pieces that show samples for the reason ``why``."""
    return evenly([piece for piece in pieces if piece.excerpt.chosen(why)], STRIP)


def _film(book: Book) -> list[tuple[str, list[tuple[Piece, Picture]]]]:
    """Return rows with a prompt and the pictures of one held-out sample at several policy versions."""
    shown = _strip(book.judged, "fixed")
    if not shown:
        return []
    ids = [one for one in shown[0].excerpt.shown["fixed"] if all(one in p.excerpt.pictures for p in shown)]
    return [(shown[0].excerpt.pictures[i].prompt, [(p, p.excerpt.pictures[i]) for p in shown]) for i in ids]


def _answers(book: Book) -> Iterator[tuple[str, list[Answered]]]:
    """Yield titles, each with answers of the newest judged policy."""
    shown = book.judged[-1].answers if book.judged else ()
    yield "The same questions for every judged policy", [one for one in shown if one.question.fixed]
    yield "More wrong answers", [one for one in shown if not one.question.fixed]


@dataclass(frozen=True)
class PromptRow:
    """The mean reward of a prompt, when it was first and when it was last measured."""

    prompt: str
    before: float
    after: float
    where: str

    @property
    def change(self) -> float:
        """Return the change of the mean reward."""
        return self.after - self.before


def _prompts(book: Book) -> list[PromptRow]:
    """Return prompts by their change, the most improved first: held-out prompts, or training prompts without any.

    Each training prompt is taken from the first and the last iteration that sampled it.
    """
    judged = [piece for piece in book.judged if piece.excerpt.by_prompt]
    pieces, word = (judged, "policy") if len(judged) > 1 else (book.iterations, "iteration")
    seen: dict[str, list[tuple[int, float, str]]] = {}
    for piece in pieces:
        for one in piece.excerpt.by_prompt:
            seen.setdefault(one.prompt_id, []).append((piece.k, one.mean, one.prompt))
    rows = [
        PromptRow(found[0][2], found[0][1], found[-1][1], f"{word} {found[0][0]} to {found[-1][0]}")
        for found in seen.values()
        if len(found) > 1
    ]
    return sorted(rows, key=lambda row: -row.change)


def _failures(book: Book) -> list[tuple[str, str, str, int, str]]:
    """Return rows of failures, the most frequent first: kind, reward, reason, count, and iterations."""
    found: dict[tuple[str, str, str], list[tuple[int, str]]] = {}
    for word, pieces in (("", book.iterations), ("policy ", book.judged)):
        for piece in pieces:
            for one in piece.excerpt.failures:
                key = one.what, one.reward or "–", one.reason
                found.setdefault(key, []).append((one.count, f"{word}{piece.k}"))
    rows = [(*key, sum(n for n, _ in each), _places([k for _, k in each])) for key, each in found.items()]
    return sorted(rows, key=lambda row: -row[3])[:LISTED]


def _places(places: Sequence[str]) -> str:
    shown = ", ".join(places[:6])
    return f"{shown} and {len(places) - 6} more" if len(places) > 6 else shown


FAILED = {
    "not finite": "were not finite",
    "refused": "were refused by the guardrail",
    "no score": "got no score by one of the rewards",
    "gated": "were held back by gates",
}
"""Words for a sentence on failed training samples, by the excerpt's ``Failure.what``."""


def _generated(book: Book) -> int:
    """Return the number of samples of all rollouts."""
    return sum(piece.excerpt.samples for piece in book.iterations)


def _failed(book: Book) -> str:
    """Return sentences that count the failed samples of all rollouts and the held-back prompts; "" without iterations.

    Few models have a guardrail, so refused samples are named only if there are any.
    """
    if not book.iterations:
        return ""
    failures = [one for piece in book.iterations for one in piece.excerpt.failures]
    counts = {what: sum(one.count for one in failures if one.what == what) for what in FAILED}
    parts = [f"{counts[what]} {words}" for what, words in FAILED.items() if counts[what] or what != "refused"]
    parts.append(f"and {sum(one.excluded for one in book.trained)} were not trained on")
    said = f"Of {_generated(book):,} training samples {', '.join(parts)}."
    if prompts := sum(one.held_back_prompts for one in book.trained):
        said += f" Of {prompts} prompts no sample passed the gates: nothing was learned from them."
    return said


DATA = ("rollouts", "scores", "data")
"""Roles of an update's inputs that the policy is trained on."""
LINEAGE = ["policy", "weights", "made from policy", *DATA, "generation"]


def _lineage(trained: Sequence[Trained]) -> list[list[str]]:
    """Return the lineage of each policy version: digests of its weights, of the policy before, and of its data."""
    weights = {one.made.digest: one.made.part_content(CURRENT)[:12] for one in trained}

    def row(one: Trained) -> list[str]:
        inputs = one.made.inputs
        (before,) = inputs["policy"]
        data = [", ".join(source.content[:12] for source in inputs.get(role, ())) or "–" for role in DATA]
        made_from = f"{one.k}: {weights.get(before.manifest, before.content[:12])}"
        return [str(one.k + 1), weights[one.made.digest], made_from, *data, str(one.made.generation)]

    return [row(one) for one in trained]


def _references(book: Book) -> References | None:
    """Return the reader of the references of the book's samples; None if no prompt has any."""
    pictures = (one for piece in (*book.iterations, *book.judged) for one in piece.excerpt.pictures.values())
    return book.references if any(one.references for one in pictures) else None


def _with_pictures(book: Book, references: References | None) -> list[tuple[Piece, bool]]:
    """Return the iterations, the newest first, each with whether its pictures are in the page."""
    pieces = book.iterations

    def size(picture: Picture) -> int:
        given = () if references is None else references.of(picture.references)
        return len(picture.thumb) + sum(len(one.source) for one in given)

    sizes = [sum(map(size, piece.excerpt.pictures.values())) for piece in pieces]
    mean = max(1.0, sum(sizes) / max(1, len(sizes)))
    shown = set(evenly(range(len(pieces)), max(2, math.floor(PICTURE_BYTES / mean))))
    return [(piece, i in shown) for i, piece in reversed([*enumerate(pieces)])]


def shown(value: Any) -> Any:
    """Return a value for a page, with control characters of a text escaped. Markup stays as it is."""
    return visible(value) if type(value) is str else value


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("stages.reporting"),
        autoescape=True,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {"number": number, "signed": signed, "digest": _digest}
    return environment


def _script() -> Markup:
    source, _, _ = _environment().loader.get_source(_environment(), "report.js")  # pyright: ignore[reportOptionalMemberAccess]
    return Markup(source)


def _digest(script: str) -> str:
    """Return the SHA-256 digest (base64) by which a page allows its own script and no other."""
    return base64.b64encode(hashlib.sha256(str(script).encode()).digest()).decode("ascii")


def render(template: str, **values: Any) -> bytes:
    """Fill in a template and return its bytes, UTF-8. Every value is escaped."""
    return _environment().get_template(template).render(values).encode()
