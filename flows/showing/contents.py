"""The contents of a run's artifacts in Prefect, from the facts that its report is made from."""

import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from statistics import fmean

from cosmos_rl_core.errors import counted, visible
from cosmos_rl_core.estimates.estimate import Sums, mean_of_estimates, mean_of_sums
from flows.library.collected import Collected
from flows.planning.base import AnyRun
from flows.running.step_means import MEASURED, means_of
from stages.reporting.book import Piece
from stages.reporting.choosing import evenly
from stages.reporting.excerpt import Picture
from stages.reporting.pictures import References, Thumb

NEWEST, BLOCKS = 50, 50
"""Number of newest iterations that have a row each, and most rows of all older ones, a row for each block of them."""
ROWS, PROMPTS = 5, (4, 3, 2, 1)
"""Policies or iterations that the grid of pictures shows, and samples of each: the most that fit. The page of an
artifact has room for four pictures side by side."""
LARGEST = 400_000
"""Characters of the grid. Prefect drops the event of an artifact above 1.5 MB."""


def key_of(run_id: str, what: str) -> str:
    """Return the key of an artifact: small letters, digits and dashes, all that Prefect takes."""
    return f"{re.sub(r'[^a-z0-9]+', '-', run_id.lower()).strip('-')}-{what}"


def roles_of(run: AnyRun) -> dict[str, str]:
    """Return the role of every reward of rollouts by its label, the rewards that train first."""
    ordered = sorted(run.scored, key=lambda reward: reward.role != "train")
    return {reward.fn.label: reward.role for reward in ordered}


def table(collected: Collected, roles: Mapping[str, str], seconds: Mapping[int, float]) -> str:
    """Return rows of iterations, the newest first: rewards ± standard errors, means of optimizer steps, seconds.

    Only numbers that the algorithm measures have a column. Old iterations share rows, so that the table of a long run
    stays small. ``roles`` of rewards are by label, the headline reward's first, ``seconds`` by iteration.
    """
    numbers = sorted({*collected.iterations, *collected.trained})
    means = {k: means_of(one.steps) for k, one in collected.trained.items()}
    rows = [row(collected, roles, seconds, means, span) for span in spans(numbers)]
    return json.dumps(rows[::-1], ensure_ascii=False)


def spans(numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yield the iterations of each row: the newest alone, older ones in blocks of 10, 20, 30, ..., aligned to them."""
    old, new = numbers[:-NEWEST], numbers[-NEWEST:]
    size = 10 * math.ceil(len(old) / (10 * BLOCKS))
    blocks: dict[int, list[int]] = {}
    for k in old:
        blocks.setdefault(k // size, []).append(k)
    yield from blocks.values()
    for k in new:
        yield [k]


def row(
    collected: Collected,
    roles: Mapping[str, str],
    seconds: Mapping[int, float],
    means: Mapping[int, Mapping[str, float]],
    span: Sequence[int],
) -> dict[str, str]:
    """Return the cells of one row: means over some iterations, empty for numbers that only other iterations have.

    ``means`` of optimizer steps and ``seconds`` are by iteration.
    """
    pieces = [collected.iterations[k] for k in span if k in collected.iterations]
    cells = {"iteration": str(span[0]) if len(span) == 1 else f"{span[0]}–{span[-1]}"}
    for label, role in roles.items():
        name = label if role == "train" else f"{label} ({role})"
        cells[name] = _mean(pieces, label, next(iter(roles)))
    for name in MEASURED:
        if any(name in one for one in means.values()):
            known = [means[k][name] for k in span if name in means.get(k, {})]
            cells[name] = f"{fmean(known):.4g}" if known else ""
    cells["tripped"] = _tripped(pieces)
    cells["seconds"] = f"{fmean(seconds.get(k, 0.0) for k in span):.1f}"
    return cells


def _mean(pieces: Sequence[Piece], label: str, headline: str) -> str:
    """Return the mean of a reward over iterations and its standard error over prompts.

    Iterations may have prompts in common, which fragments list for the headline reward alone. So for other rewards, the
    mean of several iterations has an error only if their prompts differ.
    """
    known = [piece for piece in pieces if math.isfinite(piece.estimate(label).mean)]
    found = mean_of_estimates([piece.estimate(label) for piece in known])
    if len(known) > 1:
        sums = [_by_prompt(piece) for piece in known]
        names = [name for one in sums if one is not None for name in one.names]
        listed = None not in sums
        if listed and label == headline:
            found = mean_of_sums([one for one in sums if one is not None])
        elif not listed or len({*names}) < len(names):
            found = replace(found, error=math.nan)
    if not found.n:
        return ""
    return f"{found.mean:.4g} ± {found.error:.2g}" if math.isfinite(found.error) else f"{found.mean:.4g}"


def _by_prompt(piece: Piece) -> Sums | None:
    """Return the scores of the headline reward by prompt; None if its fragment does not list every prompt."""
    listed = piece.excerpt.by_prompt
    if not listed or len(listed) < piece.excerpt.prompts:
        return None
    counts = [one.n for one in listed]
    totals = [one.mean * one.n for one in listed]
    return Sums.of(totals, [one.prompt_id for one in listed], counts)


def _tripped(pieces: Sequence[Piece]) -> str:
    words = [one.words for piece in pieces for one in piece.excerpt.tripped]
    return ", ".join(words) if len(pieces) == 1 else counted(len(words), "limit") * bool(words)


def pictures(collected: Collected) -> str:
    """Return a Markdown grid: a row for each evaluated policy, a column for each fixed prompt and seed; "" if empty.

    In a run that evaluates nothing, rows are iterations, whose prompts differ: each has typical samples of its own.
    """
    judged = _with_pictures(collected.judged, "fixed")
    rows = evenly(judged or _with_pictures(collected.iterations, "typical"), ROWS)
    kind, row_of = ("fixed", "policy") if judged else ("typical", "iteration")
    for most in PROMPTS:
        shown = ((f"{row_of} {piece.k}", piece.excerpt.chosen(kind)[:most]) for piece in rows)
        text = "\n".join(_grid(title, some, collected.references) for title, some in shown)
        if len(text) <= LARGEST:
            return text
    return ""


def _with_pictures(pieces: Mapping[int, Piece], kind: str) -> list[Piece]:
    return [piece for _, piece in sorted(pieces.items()) if piece.excerpt.chosen(kind)]


def _grid(title: str, shown: Sequence[Picture], references: References) -> str:
    """Return a small table with a title: references of prompts, pictures, and below them prompts and scores."""
    scores = [_plain(one.prompt) + ("" if one.score is None else f" **{one.score:.3f}**") for one in shown]
    images = [f"![{_plain(one.prompt)}]({one.thumb})" if one.thumb else _plain(one.missing) for one in shown]
    given = zip_longest(*(references.of(one.references) for one in shown))
    rows = [[_reference(one, number) for one in some] for number, some in enumerate(given, 1)]
    first, *others = (f"| {' | '.join(row)} |" for row in (*rows, images, scores))
    return "\n".join([f"**{title}**", "", first, "|" + " --- |" * len(shown), *others, ""])


def _reference(thumb: Thumb | None, number: int) -> str:
    if thumb is None:
        return ""
    return f"reference {number} " + (
        f"![reference {number}]({thumb.source})" if thumb.source else _plain(thumb.missing)
    )


def _plain(text: str) -> str:
    """Return at most 60 characters of a prompt, without control characters and without marks of Markdown or HTML."""
    return html.escape(visible(re.sub(r"[\s|`*_\[\]()<>!\\]+", " ", text).strip()[:60]))


def report_link(address: str, served: str = "") -> str:
    """Return a Markdown link to the report: to the address where it is ``served``, else to its file.

    Below a link to a local file is its path, because few browsers follow such a link from the page of a server.
    """
    if served:
        return f"[report]({served})\n\n`{address}`"
    if "://" in address:
        return f"[report]({address})"
    return f"[report]({Path(address).as_uri()})\n\n`{address}`: for browsers that follow no link to a file"
