"""A run's overview for people: one table, and what it takes a line to say."""

import itertools
import time
from collections.abc import Iterator
from contextlib import nullcontext

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from flows.watching.status import Overview, State, look

LOOK_S = 1.0
"""Between two looks at a run that is at work."""
BESIDE = 8
"""Lines of a terminal that the table leaves to the others, its own head included."""

ENDS = {"done": "finished", "failed": "failed", "stopped": "was stopped", "interrupted": "was killed"}


def show(overview: Overview, console: Console) -> None:
    """Print it, lines of any length whole."""
    for part in rendered(overview):
        console.print(part, soft_wrap=isinstance(part, str))


def watch(store_url: str, run_id: str, console: Console) -> Overview:
    """Show a run until no process works on it; returns how it is then.

    On a terminal one table changes; elsewhere there is a line for each wave, and the table at the end.
    """
    overview, wave = look(store_url, run_id), ""
    live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
    with live or nullcontext():
        while overview.life == "running":
            if live is not None:
                live.update(Group(*rendered(overview, console.height - BESIDE)), refresh=True)
            elif overview.progress.wave not in ("", wave):
                wave = overview.progress.wave
                console.print(f"{wave} is running", soft_wrap=True)
            time.sleep(LOOK_S)
            overview = overview.again()
    show(overview, console)
    return overview


def rendered(overview: Overview, height: int | None = None) -> Iterator[str | Table]:
    """The lines and the table, in the order to print them; of the table at most ``height`` rows, about what is at work.

    Height None gives all of them.
    """
    yield f"{overview.run.plan.run_id} ({overview.run.url}): {_life(overview)}"
    yield _table(overview, height)
    yield from (f"{state.step.name} is {state.word}: {state.why}" for state in overview.states if state.why)
    unfinished = overview.standing < len(overview.states) and overview.life != "running"
    go_on = "; to go on, give its command again or retry its flow run" if unfinished else ""
    yield f"{overview.standing} of {len(overview.states)} stages stand{go_on}"


def _life(overview: Overview) -> str:
    at, holder = overview.progress, overview.holder
    if holder is not None:
        step = f" {at.phase} {at.step}/{at.total}" if at.phase else ""
        wave = f", {at.wave}{step} {at.seconds:.0f} s" if at.wave else ""
        return f"running as process {holder['pid']} on {holder['host']}{wave}"
    last = f"; the last one {ENDS[overview.life]}" if overview.life in ENDS else ""
    return f"no process works on it{last}"


def _table(overview: Overview, height: int | None) -> Table:
    """A row for what comes first, each iteration, each policy that is judged, and the end; a column a stage.

    A cell of another stage than its column's says which.
    """
    rows = [list(group) for _, group in itertools.groupby(overview.states, lambda state: state.step.group)]
    head = next(row for row in rows if row[0].step.group.startswith("iteration-"))
    columns = [state.step.stage for state in head]
    columns += [""] * (max(map(len, rows)) - len(columns))
    table = Table("", *columns, caption="a time alone: it stands; waits: for what it reads")
    shown = _window(rows, height)
    for i, row in shown:
        name = row[0].step.group or ("start" if i == 0 else "end")
        cells = [
            (f"{state.step.stage} " if state.step.stage != column else "") + cell(state)
            for column, state in zip(columns, row, strict=False)
        ]
        table.add_row(name, *cells)
    if len(shown) < len(rows):
        table.caption = f"{len(shown)} of {len(rows)} rows"
    return table


def _window(rows: list[list[State]], height: int | None) -> list[tuple[int, list[State]]]:
    """Rows and their places, about the first that does not stand."""
    numbered = list(enumerate(rows))
    if height is None or len(rows) <= height:
        return numbered
    height = max(height, 1)
    at = next((i for i, row in numbered if any(state.word != "stands" for state in row)), len(rows) - 1)
    first = min(max(0, at - height // 2), len(rows) - height)
    return numbered[first : first + height]


def cell(state: State) -> str:
    """A state for people; a time without a word means that it stands."""
    words = [] if state.word == "stands" else ["-" if state.word == "missing" else state.word]
    if state.manifest is not None:
        words.append("? s" if state.seconds is None else f"{state.seconds:.1f} s")
    if state.reward is not None:
        words.append(f"{state.reward:.3f}")
    notes = [f"generation {state.generation}"] * (state.generation > 1)
    notes += [f"{state.attempts} attempts"] * (state.attempts > 1)
    words += [f"({', '.join(notes)})"] if notes else []
    return " ".join(words)
