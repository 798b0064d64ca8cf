"""The state of a run on a screen: the answers that people look for first, then the stages, as far as they fit."""

import os
import re
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, chop_cells

from cosmos_rl_core.errors import counted, visible
from flows.ledger.costs import device_time, duration
from flows.library.outlook import score_of
from flows.library.overview import Overview
from flows.library.states import State, grouped
from flows.terminal import commands
from flows.warning.warnings import Warned

ENDS = {
    "finished": "finished",
    "failed": "failed",
    "stopped": "was stopped",
    "suspended": "was suspended by a warning",
    "limited": "reached train.max_gpu_hours",
    "interrupted": "was interrupted",
    "idle": "no process works on it",
}
"""How a run that no process works on ended."""
LABEL = 9
"""Width in columns of the labels in front of the lines."""
WHY_LINES = 3
"""Largest number of lines for the reason of a failure. The log and `audit` have all of it."""
OTHERS = 4
"""Largest number of lines for other facts, if stages need the room."""
GIVE_AGAIN = "give its command again or retry its flow run"
"""Advice in place of a run's command that is not known."""
ITERATION = "iteration-"
MORE = "(| cat shows all of it as a table)"
_TOKEN = re.compile(r"(?:'[^']*'|\\.|[^\s'])+")
_TOGETHER = "\u00a0"
"""Space at which no line is broken."""


@dataclass(frozen=True)
class Row:
    """One answer on the screen. A command is folded in such a way that a shell takes it as it is shown."""

    label: str
    text: str
    is_command: bool = False
    lines: int | None = None
    """Largest number of lines of the text; None for as many as it needs."""
    may_go: bool = False
    """Whether the row is left out if there is no room for every answer."""

    def folded(self, width: int) -> list[str]:
        """Return the lines of the text, none of them wider than ``width``."""
        if self.is_command:
            return folded_command(visible(self.text), width)
        found = _wrapped(visible(self.text), max(width - LABEL, 1))
        if self.lines is not None and len(found) > self.lines:
            found = [*found[: self.lines - 1], f"{found[self.lines - 1][: width - LABEL - 2]} …"]
        return [f"{self.label if i == 0 else '':<{LABEL}}{line}" for i, line in enumerate(found)]


def screen(overview: Overview, width: int, height: int) -> list[str]:
    """Return at most ``height`` lines of at most ``width`` columns: the answers, then other facts and the stages.

    Lines that do not fit are left out from the end, and the last line says so.
    """
    groups = _Groups(overview)
    return fitted([*answers(overview, groups)], [*others(overview)], groups, width, height)


def fitted(first: Sequence[Row], others: Sequence[Row], groups: "_Groups", width: int, height: int) -> list[str]:
    """Return the lines that fit ``height``: ``first``, then the other rows, then the newest groups."""
    lines = _lines(first, width)
    if len(lines) > height:
        lines = _lines([row for row in first if not row.may_go], width)
    rest, older, left = _lines(others, width), groups.other_lines(width), height - len(lines)
    if len(rest) + len(older) <= left:
        return [*lines, *rest, *older]
    # Iterations come first: other facts take the lines that they leave, and a few lines at least.
    rest = rest[: max(min(left - 2, OTHERS), left - 2 - len(older), 0)]
    kept = max(left - len(rest) - 2, 0)
    folded = groups.folded(kept, width) if left - len(rest) > 1 else []
    return [*lines, *rest, *older[:kept], *folded, MORE][:height]


def _lines(rows: Iterable[Row], width: int) -> list[str]:
    return [line for row in rows for line in row.folded(width)]


def answers(overview: Overview, groups: "_Groups") -> Iterator[Row]:
    """Yield the rows that people look for first: state, position, warnings, next command, cost, reward, report."""
    yield Row("run", f"{overview.run.plan.run_id}: {_life(overview)}")
    yield Row("now", _position(overview, groups), lines=WHY_LINES)
    if overview.hacking:
        yield Row("hacking", overview.hacking, lines=WHY_LINES)
    elif overview.warnings:
        yield Row("warning", newest_warning(overview.warnings), lines=WHY_LINES)
    if (following := next_command(overview)) is not None:
        yield from following.rows()
    if groups.now is not None:
        yield Row("stages", groups.cells(groups.now), may_go=True)
    yield Row("left", _work(overview))
    yield Row("reward", _reward(overview))
    yield Row("best", str(overview.best or "no policy was judged yet"))
    yield Row("report", _near(overview.outlook.report) or "written after the first iteration")
    if overview.progress.written:
        yield Row("as of", as_of(overview))


@dataclass(frozen=True)
class NextCommand:
    """The next command of a run that no process works on."""

    word: str
    """``go on`` or ``train on``."""
    command: str
    """The command; "" if it is not known."""
    to: str = ""
    """How far the command trains, in words."""

    def rows(self) -> Iterator[Row]:
        """Yield the rows of a screen."""
        if not self.command:
            yield Row(self.word, GIVE_AGAIN)
            return
        # A finished run needs no next command.
        yield Row(self.word, f"{self.to}{', ' * bool(self.to)}with this command:", may_go=bool(self.to))
        yield Row("", self.command, is_command=True, may_go=bool(self.to))

    def __str__(self) -> str:
        far = f", {self.to}" if self.to else ""
        return f"to {self.word}{far}: {self.command}" if self.command else f"to {self.word}, {GIVE_AGAIN}"


def next_command(overview: Overview) -> NextCommand | None:
    """Return the command that continues a run, or trains a finished run further; None while a process works on it."""
    if overview.life == "running":
        return None
    if overview.current == len(overview.states):
        iterations = 2 * overview.run.recipe.train.num_iterations
        command = commands.to_train_on(overview.run, iterations)
        return NextCommand("train on", command, f"to {iterations} iterations") if command else None
    decided = [one.decision.word for one in overview.warnings[-1:] if one.decision is not None]
    return NextCommand("go on", commands.to_go_on(overview.run, "".join(decided)))


def as_of(overview: Overview) -> str:
    """Return the time at which the process of a run last wrote its progress, and how long ago that was."""
    written_s = overview.progress.written
    told = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(written_s))
    # Never in the future, even if the clocks of two machines differ.
    return f"{told} UTC, {duration(max(time.time() - written_s, 0.1))} ago"


def newest_warning(warnings: Sequence[Warned]) -> str:
    """Return the first limit that tripped in the newest iteration with any, and how many more tripped."""
    more = sum(len(one.tripped) for one in warnings) - 1
    counts = f" (and {more} more in {counted(len(warnings), 'iteration')})" if more else ""
    return f"iteration {warnings[-1].k}: {warnings[-1].tripped[0]}{counts}"


def others(overview: Overview) -> Iterator[Row]:
    """Yield other facts: warnings, faults of stages, other rewards, processes, and what the run begins with."""
    failed = overview.life == "failed"
    for warned in overview.warnings[-1:]:
        # The first line is one of the answers.
        told = warned.lines()[0 if overview.hacking else 1 :]
        yield from (Row("warning", line.strip(), lines=1) for line in told)
    for state in overview.states:
        if state.why and not (failed and state.word == "failed"):
            yield Row(state.word, f"{state.step.name}: {state.why}", lines=WHY_LINES)
    yield from (Row("", str(change)) for change in overview.outlook.others)
    if (judged := overview.z_scores) is not None and judged[1]:
        z = ", ".join(f"{name} {value:+.2f}".replace(" ", _TOGETHER) for name, value in judged[1].items())
        yield Row("z-scores", f"of policy {overview.run.plan.baseline}, iteration {judged[0]}: {z}")
    yield from _workers(overview)
    yield from _processes(overview)
    if lineage := overview.run.plan.lineage:
        yield Row("begins", f"with {lineage}")
    if forks := overview.forks:
        yield Row("forks", ", ".join(f"{fork.run} at policy {fork.at}" for fork in forks))


def _workers(overview: Overview) -> Iterator[Row]:
    """Yield the workers that share the stage at work."""
    if (crew := overview.progress.crew) is not None:
        made = f"{crew.units} of {crew.of or '?'} units made"
        yield Row("workers", f"{crew.workers} now, {crew.largest} at most, {made}{crew.ended}", lines=1)


def _processes(overview: Overview) -> Iterator[Row]:
    """Yield the processes that stay between stages, and why the last ones ended."""
    found = overview.progress.processes
    for one in found.stay:
        kept = f", keeps {one.kept_bytes / 2**30:.2f} GiB" if one.kept_bytes else ""
        served = counted(one.served, "stage")
        yield Row("stays", f"process {one.pid} on {one.device} since {one.since} UTC, {served} served{kept}", lines=1)
    yield from (Row("ended", why, lines=1) for why in found.ended)


def _life(overview: Overview) -> str:
    if overview.holder is not None:
        return f"running as process {overview.holder['pid']} on {overview.holder['host']}"
    return ENDS[overview.life]


def _position(overview: Overview, groups: "_Groups") -> str:
    """Return the iteration and their number, the stage, and its progress or the reason of its failure."""
    at, every = overview.progress, counted(len(overview.states), "stage")
    if groups.now is None:
        return f"all {every} are finished, {groups.done} of {groups.total} iterations"
    place, failed = groups.place(), [state for state in overview.states if state.word == "failed"]
    if overview.life == "running" and at.wave:
        step = f", {at.phase} {at.step}/{at.total}" if at.phase else ""
        return f"{place}: {at.wave.rpartition('/')[2]}{step}, {at.seconds:.0f} s"
    if overview.life == "failed" and failed:
        return f"{place}: {failure(failed[0]).removeprefix(f'{failed[0].step.parent}/')}"
    return f"{place}: {overview.current} of {every} are finished"


def _work(overview: Overview) -> str:
    """Return in words the time that is left, the cost until now, and the number of lost attempts."""
    found, ended = overview.outlook, overview.current == len(overview.states)
    left = "time is not known yet" if found.left_s is None else f"about {duration(found.left_s)} of work"
    spent = "cost is not recorded" if found.device_s is None else f"{device_time(found.device_s)} of device time spent"
    lost = overview.lost
    told = "attempts are not recorded" if lost is None else f"{counted(lost, 'attempt') if lost else 'no attempt'} lost"
    return ", ".join(["nothing" if ended else left, spent, told])


def _reward(overview: Overview) -> str:
    if (change := overview.outlook.change) is not None:
        return str(change)
    measured = [state for state in overview.states if state.word == "stands" and state.reward is not None]
    named = [state for state in measured if state.step.stage.endswith(f"-{overview.run.headline_reward}")]
    if named:
        newest, name = named[-1], overview.run.headline_reward
        of = f"held-out {name}" if newest.step.stage.startswith("evaluate") else f"{name} of rollouts"
        return f"{of}: {score_of(newest)} ({newest.step.name}), measured once"
    losses = [state for state in overview.states if state.word == "stands" and state.loss is not None]
    if losses:
        before, after = (f"{one.loss:.4g} ({one.step.name})" for one in (losses[0], losses[-1]))
        return f"held-out loss: {before} -> {after}"
    return "none was measured yet" if overview.run.recipe.rewards else "none: the run trains without"


def _near(url: str) -> str:
    """Return a path in the current folder relative to it; other places as they are."""
    return url.removeprefix(f"{os.getcwd()}/")


class _Groups:
    """The stages of a run by iteration and judged policy."""

    def __init__(self, overview: Overview) -> None:
        self._overview = overview
        self.groups = grouped(overview.states)
        iterations = [group for group in self.groups if group[0].step.parent.startswith(ITERATION)]
        self.total = max(len(iterations), overview.run.recipe.train.num_iterations)
        self.done = sum(_finished(group) for group in iterations)
        self.now = self._at_work()

    def _at_work(self) -> int | None:
        """Return the index of the group with the newest wave, else of the first unfinished group; None without any."""
        wave, left = self._overview.progress.wave, [i for i, group in enumerate(self.groups) if not _finished(group)]
        with_wave = (i for i in left if any(state.step.wave == wave for state in self.groups[i]))
        return next(with_wave, left[0] if left else None)

    def name(self, i: int) -> str:
        """Return the name of a group."""
        return self.groups[i][0].step.parent or ("start" if i == 0 else "end")

    def place(self) -> str:
        """Return the position of the run: the current group, and the number of iterations."""
        assert self.now is not None
        name = self.name(self.now)
        if name.startswith(ITERATION):
            return f"{name} ({int(name.removeprefix(ITERATION)) + 1} of {self.total})"
        return f"{name} ({self.done} of {self.total} iterations are finished)"

    def cells(self, i: int) -> str:
        """Return the stages of a group, each with its state, its time and its score."""
        return ", ".join(f"{state.step.stage} {cell(state)}".replace(" ", _TOGETHER) for state in self.groups[i])

    def other_lines(self, width: int) -> list[str]:
        """Return one line for all groups after the one at work, and a line for each before it, the newest first."""
        return [*self._later(width), *(self._line(i, width) for i in self._older())]

    def folded(self, kept: int, width: int) -> list[str]:
        """Return one line for the older groups that have no line among the first ``kept`` lines."""
        gone = self._older()[max(kept - len(self._later(width)), 0) :]
        if not gone:
            return []
        states = [state for i in gone for state in self.groups[i]]
        return _wrapped(f"{self.name(gone[-1])} to {self.name(gone[0])}: {_counts(states)}", width)[:1]

    def _older(self) -> list[int]:
        end = len(self.groups) if self.now is None else self.now
        return list(range(end))[::-1]

    def _later(self, width: int) -> list[str]:
        if self.now is None or not (later := range(len(self.groups))[self.now + 1 :]):
            return []
        states = [state for i in later for state in self.groups[i]]
        return _wrapped(f"{self.name(later[0])} to {self.name(later[-1])}: {_counts(states)}", width)[:1]

    def _line(self, i: int, width: int) -> str:
        """Return the line of a group: its stages or, if these do not fit, its time and scores."""
        name, group = f"{self.name(i)}: ", self.groups[i]
        whole = name + self.cells(i).replace(_TOGETHER, " ")
        if cell_len(whole) <= width:
            return whole
        scored = [(state.step.stage.partition("-")[2], state.reward) for state in group]
        scores = [f"{reward} {mean:.3f}" for reward, mean in scored if mean is not None]
        seconds = sum(state.seconds or 0.0 for state in group)
        told = [f"{seconds:.1f} s" if _finished(group) else _counts(group), *scores]
        while len(told) > 1 and cell_len(name + ", ".join(told)) > width:
            told.pop()
        return _wrapped(name + ", ".join(told), width)[0]


def cell(state: State) -> str:
    """Return a stage's state, time, numbers and attempts; a time without a word means that it is finished."""
    words = [] if state.word == "stands" else ["-" if state.word == "missing" else state.word]
    if state.manifest is not None:
        words.append("? s" if state.seconds is None else f"{state.seconds:.1f} s")
    words += [f"{number:.3f}" for number in (state.reward, state.loss) if number is not None]
    notes = [f"generation {state.generation}"] * (state.generation > 1)
    notes += [f"{state.attempts} attempts"] * (state.attempts > 1)
    words += [f"({', '.join(notes)})"] if notes else []
    return " ".join(words)


def failure(state: State) -> str:
    """Return a sentence on what is wrong with a stage. Most errors of stages begin with their names."""
    name = state.step.name
    return state.why if state.why.startswith(f"{name} ") else f"{name} is {state.word}: {state.why}"


def folded_command(command: str, width: int) -> list[str]:
    """Return a command on lines that end with a backslash, which a shell joins again."""
    lines = [""]
    for token in _TOKEN.findall(command):
        if lines[-1] and len(lines[-1]) + len(token) + len("  \\") > width:
            lines[-1] += " \\"
            lines.append("")
        lines[-1] += f" {token}" if lines[-1] else token
        # Only outside of quotes a backslash joins the halves of a word.
        while "'" not in token and "\\" not in token and len(lines[-1]) > width - len(" \\"):
            lines[-1:] = [f"{lines[-1][: width - 1]}\\", lines[-1][width - 1 :]]
    return lines


def _finished(group: Sequence[State]) -> bool:
    return all(state.word == "stands" for state in group)


def _counts(states: Sequence[State]) -> str:
    """Return how many stages are finished, and how many are not: ``3 of 9 stages are finished, 1 failed``."""
    words = Counter(state.word for state in states)
    others = [f"{count} {word}" for word, count in words.items() if word not in ("stands", "missing")]
    return ", ".join([f"{words['stands']} of {counted(len(states), 'stage')} are finished", *others])


def _wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text, broken at spaces, and inside of words only if a word is wider than a line."""
    words = textwrap.wrap(text.partition("\n")[0], width, break_on_hyphens=False, break_long_words=False) or [""]
    lines = (chop_cells(line, width) if cell_len(line) > width else [line] for line in words)
    return [part.replace(_TOGETHER, " ") for line in lines for part in line]
