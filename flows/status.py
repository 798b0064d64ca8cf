"""A run at a glance: what stands, what would be made again and why, what it took, the rewards."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rich.table import Table

from cosmos_rl_core.errors import ArtifactError
from flows.requests import Run
from flows.steps import Step, open_run, steps
from stages.artifacts import standing, why_stale
from stages.manifest import Manifest

Word = Literal["stands", "stale", "waits", "damaged", "to be made", "-"]
"""``stale``: would be made again. ``waits``: what it reads does not stand, so nobody knows yet. ``to be made``: its
generation was ended. ``-``: never made."""


@dataclass(frozen=True)
class State:
    """What there is of one stage."""

    step: Step
    word: Word
    generation: int = 1
    manifest: Manifest | None = None
    why: str = ""
    """Why it is stale or damaged."""

    @property
    def cell(self) -> str:
        """For people; a time without a word means that it stands."""
        words = [] if self.word == "stands" else [self.word]
        if self.manifest is not None:
            seconds = self.manifest.summary.get("seconds")
            words += [f"{seconds:.1f} s"] if isinstance(seconds, int | float) else ["? s"]
            reward = self.manifest.summary.get(self.step.stage.partition("-")[2])
            words += [f"{reward:.3f}"] if isinstance(reward, float) else []
        words += [f"(generation {self.generation})"] if self.generation > 1 else []
        return " ".join(words)


def overview(store_url: str, run_id: str) -> list[str | Table]:
    """A run as lines and a table of its iterations, in the order to print them."""
    run = open_run(store_url, run_id)
    found = states(run)
    groups: dict[str, list[State]] = {}
    for state in found:
        groups.setdefault(state.step.group, []).append(state)
    *first, report = groups.pop("")
    versions = [name for name in groups if name.startswith("policy-")]
    return [
        f"{run_id} ({run.url})",
        *(_line(state.step.stage, state.cell) for state in first),
        _table([group for name, group in groups.items() if name not in versions]),
        *(_line(name, "   ".join(f"{state.step.stage} {state.cell}" for state in groups[name])) for name in versions),
        _line(report.step.stage, report.cell),
        *(f"{state.step.name} is {state.word}: {state.why}" for state in found if state.why),
        f"{sum(state.word == 'stands' for state in found)} of {len(found)} stages stand",
    ]


def states(run: Run) -> list[State]:
    """Every stage of the run as it is now, in order."""
    found: list[State] = []
    in_doubt: set[str] = set()
    for step in steps(run):
        found.append(state := _state(step, in_doubt))
        if state.word != "stands":
            in_doubt.add(step.slot)
    return found


def _state(step: Step, in_doubt: set[str]) -> State:
    """``in_doubt`` are the slots of earlier stages that do not stand."""
    try:
        generation, manifest = standing(step.slot)
    except ArtifactError as error:
        return State(step, "damaged", why=str(error).splitlines()[0])
    if manifest is None:
        return State(step, "to be made" if generation > 1 else "-", generation)
    try:
        request = step.request()
    except ArtifactError:
        # It is an input that has no artifact or a damaged one, which that input's own state tells.
        return State(step, "waits", generation, manifest)
    if any(source.url in in_doubt for inputs in request.inputs.values() for source in inputs):
        return State(step, "waits", generation, manifest)
    try:
        reason = why_stale(manifest, request)
    except ArtifactError as error:
        return State(step, "damaged", generation, manifest, str(error))
    return State(step, "stands" if reason is None else "stale", generation, manifest, reason or "")


def _line(name: str, text: str) -> str:
    return f"{name:<12} {text}"


def _table(iterations: Iterable[list[State]]) -> Table:
    """Iterations down, stages across."""
    rows = list(iterations)
    table = Table(caption="a time alone: it stands; waits: for what it reads")
    for column in ("iteration", *(state.step.stage for state in rows[0])):
        table.add_column(column)
    for row in rows:
        table.add_row(f"{row[0].step.k:04d}", *(state.cell for state in row))
    return table
