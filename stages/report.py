"""One HTML file about a run: did it learn, is it hacking its reward, what do samples look like, what failed.

It is made from fragments, so its cost does not grow with the number of samples. It holds no time, host or path, so
equal inputs give equal bytes, and it needs no scripts, other files or addresses.
"""

from collections.abc import Callable
from typing import Any

from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.execution.context import Context, Ranks
from stages.reporting.book import Book, Piece, Trained
from stages.reporting.contracts import Report
from stages.reporting.page import report_page
from stages.reporting.pictures import References


def run(request: Request, context: Context[Ranks]) -> dict[str, Any]:
    """Write ``index.html``. Return its summary.

    The summary has the number of ``iterations``, and the mean that ranks policies: ``before`` of the first and
    ``after`` of the last judged version.
    """
    book = book_of(request, context.progress)
    context.attempt.put(Report.PAGE, report_page(book))
    ends = [book.ranking(piece) for piece in (*book.judged[:1], *book.judged[1:][-1:])]
    means = {name: one.mean for name, one in zip(("before", "after"), ends, strict=False) if one.n}
    return {"iterations": book.num_iterations} | means


def book_of(request: Request, progress: Callable[[str, int, int], None] = lambda *_: None) -> Book:
    """Return the book that the page shows, read from the inputs of the Request."""
    config = request.settings(Report)
    total = sum(map(len, request.inputs.values())) + 1
    done = 0

    def artifacts(role: str) -> list[Artifact]:
        nonlocal done
        found: list[Artifact] = []
        for source in request.inputs.get(role, ()):
            progress("reading", done, total)
            found.append(Artifact(source))
            done += 1
        return found

    judged = artifacts("judged")
    book = Book(
        title=config.title,
        reward=config.reward,
        ranked_by=config.ranked_by,
        init=config.init,
        about=config.about,
        settings=config.settings,
        roles=config.roles,
        staleness=config.staleness,
        iterations=[Piece.read(artifact) for artifact in artifacts("fragments")],
        judged=[Piece.read(artifact, first=judged[0] if place else None) for place, artifact in enumerate(judged)],
        trained=[Trained.read(artifact) for artifact in artifacts("updates")],
        references=References(request.home),
    )
    progress("writing", total, total)
    return book
