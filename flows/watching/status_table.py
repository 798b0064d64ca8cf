"""The state of a run as a table and a few lines."""

import time
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from cosmos_rl_core.errors import counted
from flows.library.opened_run import open_run
from flows.library.overview import Overview
from flows.library.states import grouped
from flows.terminal import commands
from flows.terminal.console import can_redraw
from flows.watching.screen import ENDS, as_of, cell, failure, next_command, screen

LOOK_S = 1.0
"""Seconds between two readings of a running run."""
WARNINGS = 3
"""Number of iterations whose warnings are shown, the newest."""


def show(overview: Overview, console: Console) -> None:
    """Print the state. On a terminal print as much as fits; elsewhere all of it, with lines of any length."""
    if console.is_terminal:
        # One line is for the prompt.
        for line in screen(overview, console.width, console.height - 1):
            console.print(line, soft_wrap=True)
        return
    for part in rendered(overview):
        console.print(part, soft_wrap=isinstance(part, str))


def watch(store_url: str, run_id: str, console: Console) -> Overview:
    """Show a run until no process works on it. Return its state then.

    On a terminal the picture is updated in place. Elsewhere each wave prints a line, and the table comes at the end.
    """
    overview, wave = open_run(run_id, store_url).now(), ""
    if overview.life == "running" and can_redraw(console):
        return _redrawn(overview, console)
    while overview.life == "running":
        if overview.progress.wave not in ("", wave):
            wave = overview.progress.wave
            console.print(f"{wave} is running", soft_wrap=True)
        time.sleep(LOOK_S)
        overview = overview.again()
    show(overview, console)
    return overview


def _redrawn(overview: Overview, console: Console) -> Overview:
    """Draw a run over itself until no process works on it, and return its state then.

    The last picture stays on the terminal, also after Ctrl-C.
    """
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(Text("\n".join(screen(overview, console.width, console.height - 1))), refresh=True)
            if overview.life != "running":
                return overview
            time.sleep(LOOK_S)
            overview = overview.again()


def rendered(overview: Overview) -> Iterator[str | Table]:
    """Yield the lines of the state and its table, from top to bottom."""
    yield f"{overview.run.plan.run_id} ({overview.run.url}): {_life(overview)}"
    if lineage := overview.run.plan.lineage:
        yield f"begins with {lineage}"
    if forks := overview.forks:
        yield f"forks: {', '.join(f'{fork.run} at policy {fork.at}' for fork in forks)}"
    yield _table(overview)
    yield from (failure(state) for state in overview.states if state.why)
    if overview.best is not None:
        yield f"best: {overview.best}"
    yield from overview.outlook.lines()
    if (judged := overview.z_scores) is not None and judged[1]:
        z = ", ".join(f"{name} {value:+.2f}" for name, value in judged[1].items())
        yield f"z-scores of policy {overview.run.plan.baseline}, iteration {judged[0]}: {z}"
    yield from _warnings(overview)
    if overview.hacking:
        yield f"reward hacking: {overview.hacking}"
    yield f"{overview.current} of {len(overview.states)} stages are finished"
    if overview.progress.written:
        yield f"as of {as_of(overview)}"
    if (following := next_command(overview)) is not None:
        yield str(following)


def _warnings(overview: Overview) -> Iterator[str]:
    """Yield the limits that tripped in the newest iterations, and how to approve them if no command is known."""
    warnings = overview.warnings
    if len(warnings) > WARNINGS:
        yield f"limits tripped in {counted(len(warnings), 'iteration')}, the newest of them:"
    for warned in warnings[-WARNINGS:]:
        yield from warned.lines()
    following = next_command(overview)
    if following is not None and not following.command and any(one.waits for one in warnings):
        yield f"to go on: {commands.about(overview.run.store_url, 'approve', overview.run.plan.run_id)}"


def _life(overview: Overview) -> str:
    at, holder = overview.progress, overview.holder
    if holder is not None:
        step = f" {at.phase} {at.step}/{at.total}" if at.phase else ""
        wave = f", {at.wave}{step} {at.seconds:.0f} s" if at.wave else ""
        return f"running as process {holder['pid']} on {holder['host']}{wave}"
    last = "" if overview.life == "idle" else f"; the last one {ENDS[overview.life]}"
    return f"no process works on it{last}"


def _table(overview: Overview) -> Table:
    """Return the table: a row for the start, each iteration, each evaluated policy and the end; one column per stage.

    The columns are the stages of an iteration. A cell of another stage begins with its name.
    """
    rows = grouped(overview.states)
    first = next(row for row in rows if row[0].step.parent.startswith("iteration-"))
    columns = [state.step.stage for state in first]
    columns += [""] * (max(map(len, rows)) - len(columns))
    folded = (Column(name, overflow="fold") for name in columns)
    table = Table(Column("", no_wrap=True), *folded, caption="a time alone: finished in it; waits: for its inputs")
    for i, row in enumerate(rows):
        name = row[0].step.parent or ("start" if i == 0 else "end")
        cells = [
            cell(state) if state.step.stage == column else f"{state.step.stage} {cell(state)}"
            for state, column in zip(row, columns, strict=False)
        ]
        table.add_row(name, *cells)
    return table
