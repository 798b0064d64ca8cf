"""The page of a run whose rollouts are made by an earlier policy than the one that they train."""

import re

import pytest

from stages.reporting.book import Book, Piece
from stages.reporting.curves import spark
from stages.reporting.excerpt import Excerpt, Score, Tripped
from stages.reporting.page import report_page
from stages.reporting.scores import moved

TRIPPED = Tripped(words="jpeg rose", reward="jpeg", score="jpeg", samples=())


def iteration(k: int) -> Piece:
    """Iteration k, whose mean reward is k policy-0 deviations above 0. A limit trips in iteration 3."""
    score = Score(reward="jpeg", score="jpeg", n=8, mean=float(k), deviation=1.0, error=0.1, clusters=8)
    return Piece(Excerpt(k=k, scores=(score,), tripped=(TRIPPED,) * (k == 3)))


@pytest.mark.parametrize(("staleness", "places"), [(0, [0, 1, 2, 3]), (1, [0, 0, 1, 2]), (2, [0, 0, 0, 1])])
def test_means_and_z_scores_are_drawn_at_the_policy_that_made_the_samples(staleness: int, places: list[int]):
    book = Book(title="stale", reward="jpeg", staleness=staleness, iterations=[iteration(k) for k in range(4)])
    page = report_page(book).decode()
    table = page[page.index("<th>training, mean") :].partition("</table>")[0]
    assert [int(place) for place in re.findall(r"<tr><td>(.*?)</td>", table)] == places
    (row,) = moved(book)
    assert row.curve == spark([*zip(places, [0.0, 1.0, 2.0, 3.0], strict=True)], places[3:])
    # Limits are judged by iteration, and so is the z-score that is furthest from 0.
    assert (row.tripped, row.furthest) == ([3], (3, 3.0))
