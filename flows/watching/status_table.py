"""The state of a run as a table and a few lines."""

import itertools
import time
from collections.abc import Iterator
from contextlib import nullcontext

from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table

from cosmos_rl_core.errors import counted
from flows.library.opened_run import open_run
from flows.library.overview import Overview
from flows.library.states import State
from flows.terminal import commands
from flows.terminal.console import can_redraw

LOOK_S = 1.0
"""Seconds between two readings of a running run."""
BESIDE = 8
"""Lines of a terminal that are not rows of the table."""

WARNINGS = 3
"""Iterations whose warnings are shown."""

ENDS = {
    "done": "finished",
    "failed": "failed",
    "stopped": "was stopped",
    "suspended": "was suspended by a warning",
    "limited": "reached train.max_gpu_hours",
    "interrupted": "was killed",
}


def show(overview: Overview, console: Console) -> None:
    """Print the state; long lines are not wrapped."""
    for part in rendered(overview):
        console.print(part, soft_wrap=isinstance(part, str))


def watch(store_url: str, run_id: str, console: Console) -> Overview:
    """Show a run until no process works on it. Return its state then.

    On a terminal the table is updated in place. Elsewhere each wave prints a line, and the table comes at the end.
    """
    overview, wave = open_run(run_id, store_url).now(), ""
    live = Live(console=console, auto_refresh=False, transient=True) if can_redraw(console) else None
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
    """Yield lines and the table, in order. The table has at most ``height`` rows, around the first unfinished stage."""
    yield f"{overview.run.plan.run_id} ({overview.run.url}): {_life(overview)}"
    if lineage := overview.run.plan.lineage:
        yield f"begins with {lineage}"
    yield _table(overview, height)
    yield from (f"{state.step.name} is {state.word}: {state.why}" for state in overview.states if state.why)
    if overview.best is not None:
        yield f"best: {overview.best}"
    yield from overview.outlook.lines()
    if (judged := overview.z_scores) is not None and judged[1]:
        z = ", ".join(f"{name} {value:+.2f}" for name, value in judged[1].items())
        yield f"z-scores of policy 0, iteration {judged[0]}: {z}"
    yield from _warnings(overview)
    unfinished = overview.standing < len(overview.states) and overview.life != "running"
    go_on = "; to go on, give its command again or retry its flow run" if unfinished else ""
    yield f"{overview.standing} of {len(overview.states)} stages stand{go_on}"


def _warnings(overview: Overview) -> Iterator[str]:
    """Yield what tripped in the newest iterations, and what it waits for."""
    warnings = overview.warnings
    if len(warnings) > WARNINGS:
        yield f"limits tripped in {counted(len(warnings), 'iteration')}, the newest of them:"
    for warned in warnings[-WARNINGS:]:
        yield from warned.lines()
    if overview.life == "suspended" and any(one.waits for one in warnings):
        yield f"to go on: {commands.about(overview.run.store_url, 'approve', overview.run.plan.run_id)}"


def _life(overview: Overview) -> str:
    at, holder = overview.progress, overview.holder
    if holder is not None:
        step = f" {at.phase} {at.step}/{at.total}" if at.phase else ""
        wave = f", {at.wave}{step} {at.seconds:.0f} s" if at.wave else ""
        return f"running as process {holder['pid']} on {holder['host']}{wave}"
    last = f"; the last one {ENDS[overview.life]}" if overview.life in ENDS else ""
    return f"no process works on it{last}"


def _table(overview: Overview, height: int | None) -> Table:
    """Return the table: a row for the start, each iteration, each evaluated policy and the end; a column a stage.

    A cell whose stage is not that of its column begins with the stage's name.
    """
    rows = [list(group) for _, group in itertools.groupby(overview.states, lambda state: state.step.group)]
    head = next(row for row in rows if row[0].step.group.startswith("iteration-"))
    columns = [state.step.stage for state in head]
    columns += [""] * (max(map(len, rows)) - len(columns))
    folded = (Column(name, overflow="fold") for name in columns)
    table = Table(Column("", no_wrap=True), *folded, caption="a time alone: finished in it; waits: for its inputs")
    first, last = _window(rows, height)
    for i, row in enumerate(rows[first:last], first):
        name = row[0].step.group or ("start" if i == 0 else "end")
        cells = [
            cell(state) if state.step.stage == column else f"{state.step.stage} {cell(state)}"
            for state, column in zip(row, columns, strict=False)
        ]
        table.add_row(name, *cells)
    if last - first < len(rows):
        table.caption = f"{last - first} of {len(rows)} rows"
    return table


def _window(rows: list[list[State]], height: int | None) -> tuple[int, int]:
    """Return the bounds of the rows to show, around the first with a stage that does not stand."""
    height = len(rows) if height is None else min(max(height, 1), len(rows))
    unfinished = (i for i, row in enumerate(rows) if any(state.word != "stands" for state in row))
    first = min(max(0, next(unfinished, len(rows) - 1) - height // 2), len(rows) - height)
    return first, first + height


def cell(state: State) -> str:
    """Return the text of a state; a time without a word means that the stage stands."""
    words = [] if state.word == "stands" else ["-" if state.word == "missing" else state.word]
    if state.manifest is not None:
        words.append("? s" if state.seconds is None else f"{state.seconds:.1f} s")
    words += [f"{number:.3f}" for number in (state.reward, state.loss) if number is not None]
    notes = [f"generation {state.generation}"] * (state.generation > 1)
    notes += [f"{state.attempts} attempts"] * (state.attempts > 1)
    words += [f"({', '.join(notes)})"] if notes else []
    return " ".join(words)
