"""Sphinx extension: a Markdown table of the rewards, in place of a comment in a page. The plugins declare its facts."""

from collections.abc import Iterator

from sphinx.application import Sphinx

from cosmos_rl_core import plugins
from cosmos_rl_core.config.reward_facts import Facts

MARK = "<!-- table of rewards -->"
COLUMNS = ("reward", "input", "runs in", "scores and their scales", "source", "ran on", "names checked")
REFERENCES = {"ignored": "", "taken": ", with references or without", "needed": ", with references"}
EVIDENCE = {
    "real weights": "what it needs: real weights, or none",
    "tiny weights": "tiny random weights of its architecture",
    "protocol": "nothing: its protocol and its loading code are tested",
    None: "not stated",
}


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension, which replaces :data:`MARK` before a page is parsed."""
    app.connect("source-read", _fill_in)
    return {"parallel_read_safe": True}


def _fill_in(_app: Sphinx, _docname: str, source: list[str]) -> None:
    if MARK in source[0]:
        source[0] = source[0].replace(MARK, markdown())


def markdown() -> str:
    """Return the table as Markdown, with one row per reward of the package."""
    lines = [_row(COLUMNS), _row(["---"] * len(COLUMNS))]
    lines += [_row(_cells(name, plugins.load("rewards", name).Options.facts)) for name in plugins.own("rewards")]
    return "\n".join(lines)


def _cells(name: str, facts: Facts) -> Iterator[str]:
    served = f" (served also as {', '.join(map(_code, facts.also))})" if facts.also else ""
    yield f"[{_code(name)}](recipe-fields.md#rewards){served}"
    yield ("images and videos" if facts.input == "any" else f"{facts.input}s") + REFERENCES[facts.references]
    yield "`judge`" if facts.torch else "`reward`"
    told = [f"{_code(score)}{_wired(score, facts)}: {scale}" for score, scale in facts.scores.items()]
    yield "; ".join(told) or "the service's"
    yield facts.source or "the service"
    yield EVIDENCE[facts.evidence]
    yield ("yes" if facts.names_checked else "no") if facts.torch else "no weights of ours"


def _wired(score: str, facts: Facts) -> str:
    return f" (served as {_code(facts.wire[score])})" if score in facts.wire else ""


def _code(name: str) -> str:
    return f"`{name}`"


def _row(cells: Iterator[str] | list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
