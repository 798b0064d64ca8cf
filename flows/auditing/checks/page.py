"""Check that the page at a run's address shows what its artifacts, logs and ledger hold.

A run writes its page last, so the page of an ended run is made again and compared line by line. Before the end, the
page may show an earlier moment, and the findings say so. Not compared are the time of writing; the store's address,
which changes when the store is moved; and settings that decide no result, which each command may change.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import zip_longest
from time import strftime, strptime

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.errors import ArtifactError, first_line
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.lease import PATIENCE_S
from flows.auditing.checks.faults import Findings
from flows.library.collected import Collected
from flows.planning import facts
from flows.planning.base import AnyRun
from flows.planning.steps import Step
from flows.post_train import post_train
from flows.reporting.writing import address, page
from flows.terminal import commands
from stages import registry, report
from stages.artifacts.slots import current_of
from stages.reporting.contracts import Report
from stages.reporting.page import report_page

Part = tuple[str, list[str]]
"""The name of a part of a page, and its lines."""
PROGRAM = "cosmos-rl-flows"
ENDINGS = ("running", "failed", "stopped", "suspended", "limited", "interrupted", "idle")
"""States of runs whose page was written before their end."""
ON_DEMAND = ("idle", "interrupted")
"""States in the page of a finished run that is made on demand after its ``progress.json`` was lost."""
TOLD = ("header", "failed", "cost", "run")
"""Parts that show logs and ledger. The other parts show artifacts alone."""
REMADE = "what it shows was made again, or will be when the run goes on"
SHOWN = 120
"""Characters of a line that are shown."""
_STATE = re.compile(r'<span class="state (\w+)">(\w+)</span>')
_WRITTEN = re.compile(r"\bWritten (\d{4}-\d\d-\d\d \d\d:\d\d) UTC(?: from|\.)")
_VERSION = re.compile(rf"<dt>{PROGRAM}</dt><dd>([^<]*)</dd>")
_STORE = re.compile(r"(<dt>(?:more|export it)</dt><dd>[^<]*? --store )[^<]*(?=</dd>)")
_SECTION = re.compile(r'<section id="(\w+)">')


def check(run: AnyRun, every: Sequence[Step], findings: Findings) -> None:
    """Compare the page with the one that a run writes at its end.

    A missing page is a fault only of a run that the command `run` made: stages that are made alone write no page.
    """
    url, again = address(run), f"`{commands.about(run.store_url, 'report', run.plan.run_id)}` writes it anew"
    try:
        found = _look(run, every, url)
    except Exception as error:  # an artifact, a log or the ledger is damaged, and its own check says so
        found = f"what it shows cannot be read: {first_line(error)}", ""
    reason, fault = found
    if fault and run.holder(PATIENCE_S) is not None:
        reason, fault = "a process works on the run", ""
    if reason:
        findings.unchecked.append(f"{findings.place(url)}: {reason}")
    elif fault:
        findings.add(url, "page", f"{fault}; {again}")


def _look(run: AnyRun, every: Sequence[Step], url: str) -> tuple[str, str]:
    """Return a reason why the page cannot be compared, and else its fault; both are "" if the page is right."""
    data = store.read_if_exists(url)
    if data is None:
        return "", "missing" * (run.is_made and commands.kept(run) != "")
    if not run.is_made:
        return "the run has not ended", ""
    planned = [step for wave in post_train(run) for step in wave.steps]
    if reason := _outdated(planned):
        return reason, ""
    told = data.decode(errors="replace")
    said = _STATE.search(told)
    state = said[1] if said and said[1] in ON_DEMAND else "finished"
    # Evaluations at ends of shorter runs, which a longer run leaves out, are in the page that is made on demand.
    pages = [_page(run, steps, state) for steps in (planned, every) if steps is planned or len(every) > len(planned)]
    if any(_lines(run, told) == _lines(run, expected) for expected, _ in pages):
        return "", ""
    expected, newest_log = pages[0]
    reason = _of_another_moment(told, expected, newest_log) or _of_other_code(every)
    return (reason, "") if reason else _difference(run, told, expected)


def _page(run: AnyRun, steps: Iterable[Step], state: str) -> tuple[str, str]:
    """Return the page of the current artifacts, and the name of the newest log."""
    found = Collected(run)
    for step in steps:
        if (made := current_of(step.slot)[1]) is not None:
            found.add(step.slot, made)
    drawn = page(found, state).decode()
    for name, why in found.damaged.items():
        raise ArtifactError(f"{name}: {why}")
    return drawn, found.logs[1]


def _outdated(every: Iterable[Step]) -> str:
    """Return a sentence on the first artifact that another version made, or that the run will make again; else ""."""
    for step in every:
        made = current_of(step.slot)[1]
        if made is None:
            return REMADE
        if step.kind not in ("fragment", "report"):
            continue
        newest = registry.STAGES[made.stage].version
        if made.version != newest:
            return f"version {made.version} of {made.stage} made {step.name}, this is version {newest}"
        if step.kind == "report" and made.why_not(step.request()) is not None:
            return REMADE
    return ""


def _of_another_moment(told: str, expected: str, newest_log: str) -> str:
    """Return why a page that differs may still be right: another version, an earlier moment; "" if neither."""
    state, written = _STATE.search(told), _WRITTEN.search(told)
    theirs, ours = _VERSION.search(told), _VERSION.search(expected)
    if theirs and ours and theirs[1] != ours[1]:
        return f"version {theirs[1]} of {PROGRAM} wrote it, this is version {ours[1]}"
    if state and state[1] == state[2] and state[1] in ENDINGS:
        return f"written before the run had ended; it was {state[1]}"
    if written and newest_log:
        ended = strptime(newest_log.partition("-")[0], "%Y%m%dT%H%M%S")
        if strftime("%Y-%m-%d %H:%M", ended) > written[1]:
            return "written before the newest attempt ended"
    return ""


def _of_other_code(every: Iterable[Step]) -> str:
    """Return a sentence if this code draws the report differently from the code that made it; else ""."""
    (step,) = (step for step in every if step.kind == "report")
    made = current_of(step.slot)[1]
    if made is None:
        return ""
    drawn = report_page(report.book_of(step.request()))
    same = sha256(drawn) == made.files[Report.PAGE].sha256
    return "" if same else "this version draws the same report otherwise"


def _lines(run: AnyRun, text: str) -> list[str]:
    """Return the lines of a page, without the time, address and settings that may differ between two right pages."""
    text = _STORE.sub(r"\1", _WRITTEN.sub("Written", text))
    free = {f"<dt>{escape(name)}</dt>" for name in _free_settings(run)}
    lines = text.split("\n")
    return [line for line in lines if not (line.startswith("<dt>") and f"{line.partition('</dt>')[0]}</dt>" in free)]


def _free_settings(run: AnyRun) -> Iterator[str]:
    """Yield the names of settings that decide no result."""
    decides = {name for name, _ in facts.flat(run.recipe.identity())}
    yield from (name for name, _ in facts.flat(run.recipe.model_dump(mode="json")) if name not in decides)


def _difference(run: AnyRun, told: str, expected: str) -> tuple[str, str]:
    """Return a reason and a fault, one of them "": only the words of logs and ledger differ, or some line does."""
    found, right = _parts(_lines(run, told)), _parts(_lines(run, expected))
    differing = [one for one, other in zip_longest(found, right) if one != other and one is not None]
    named = [name for name, _ in differing]
    same_parts = [name for name, _ in found] == [name for name, _ in right]
    if same_parts and all(name in TOLD for name in named):
        ours = dict(right)
        if any(_shape(lines) != _shape(ours[name]) for name, lines in differing):
            return f"other words than this version's in {', '.join(named)}; no part about artifacts differs", ""
    lines = zip_longest(*([line for _, some in parts for line in some] for parts in (found, right)))
    number, one, other = next((n, a, b) for n, (a, b) in enumerate(lines, 1) if a != b)
    return "", f"line {number}: {_shown(one, other)}, what the run holds gives {_shown(other, one)}"


def _parts(lines: Iterable[str]) -> list[Part]:
    """Return the parts of a page in order; the parts before the first section are ``style`` and ``header``."""
    parts: list[Part] = [("style", [])]
    for line in lines:
        if match := _SECTION.match(line):
            parts.append((match[1], []))
        elif line == "<header>":
            parts.append(("header", []))
        parts[-1][1].append(line)
        if line == "</section>":
            parts.append(("end", []))
    return [(name, some) for name, some in parts if "".join(some)]


def _shape(lines: Iterable[str]) -> list[str]:
    """Return lines in which each number is replaced by 0."""
    return [re.sub(r"[0-9.,:%]+", "0", line) for line in lines]


def _shown(line: str | None, other: str | None) -> str:
    """Return a part of a line that begins a few words before its first difference."""
    if line is None:
        return "nothing"
    place = next((i for i, (a, b) in enumerate(zip(line, other or "", strict=False)) if a != b), len(other or ""))
    start = max(0, min(place, len(line)) - SHOWN // 4)
    return repr(line[start : start + SHOWN])
