"""The state of every stage of a run: what its slot holds, and whether it is up to date."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cosmos_rl_core.errors import ArtifactError, first_line
from cosmos_rl_core.imports import uncollected
from cosmos_rl_core.storage import store
from flows.ledger.attempts import logs_of
from flows.planning.base import AnyRun
from flows.planning.steps import Step
from flows.post_train import steps
from stages.artifacts.manifest import Manifest, seconds_of
from stages.artifacts.request import Request
from stages.artifacts.slots import current_of, one_look, why_stale

Word = Literal["stands", "stale", "waits", "damaged", "invalidated", "missing", "running", "failed", "interrupted"]
"""``stands``: finished and up to date. ``stale``: would be made again. ``waits``: an input is not current, so it is not
known yet. ``damaged``: a file has wrong bytes. ``invalidated``: its generation was ended. ``missing``: never made.
``interrupted``: the process that made it ended."""


@dataclass(frozen=True)
class State:
    """One stage."""

    step: Step
    word: Word
    generation: int = 1
    manifest: Manifest | None = None
    why: str = ""
    """Reason of ``stale``, ``damaged`` or ``failed``."""
    logs: tuple[str, ...] = ()
    """Names of the logs that attempts left, which begin with the times when they ended; the newest comes last."""
    folders: int = 0
    """Number of attempts that wrote files."""

    read: bool = True
    """Whether its slot was read; slots after an iteration that has not begun are not."""

    @property
    def attempts(self) -> int:
        """Return the number of attempts that left a log or files, of ended generations too, and the running one."""
        return max(self.folders, len(self.logs) + (self.word == "running"))

    @property
    def seconds(self) -> float | None:
        """Return the seconds that the artifact took; None without an artifact, or if it did not record them."""
        return seconds_of(self.manifest)

    @property
    def reward(self) -> float | None:
        """Return the mean score; None for a stage without scores."""
        return self._number(self.step.stage.partition("-")[2])

    @property
    def loss(self) -> float | None:
        """Return the held-out loss; None for a stage other than ``validate``, and if it is not finite."""
        return self._number("loss") if self.step.stage == "validate" else None

    def _number(self, name: str) -> float | None:
        summary = {} if self.manifest is None else self.manifest.summary
        found = summary.get(name)
        return found if isinstance(found, float) else None


def states(run: AnyRun) -> list[State]:
    """Return the state of every stage of the run, in order, from artifacts alone."""
    with one_look(), uncollected():
        return states_of(steps(run))


def states_of(every: Sequence[Step], kept: Mapping[str, State] | None = None) -> list[State]:
    """Return the states of the steps of a run, in order, from artifacts alone.

    The states in ``kept``, by the names of their steps, are not read again.
    """
    with one_look():
        return _states(every, kept or {})


def _states(every: Sequence[Step], kept: Mapping[str, State]) -> list[State]:
    found: list[State] = []
    in_doubt: set[str] = set()
    words: set[Word] = set()
    """Words of the stages of the newest iteration so far."""
    newest, begun = -1, True
    for step in every:
        k = -1 if step.k is None or not step.parent.startswith("iteration-") else step.k
        if k > newest:
            # Iterations run in order: after one without any file there are no later ones. Stages of an iteration may
            # come after the first stage of the next.
            begun = begun and (newest < 0 or words != {"missing"})
            newest, words = k, set()
        if (state := kept.get(step.name)) is None:
            reads = begun or step.parent == ""
            state = state_of(step, in_doubt) if reads else State(step, "missing", read=False)
        found.append(state)
        if k == newest:
            words.add(state.word)
        if state.word != "stands":
            in_doubt.add(step.slot)
    return found


def grouped(found: Iterable[State]) -> list[list[State]]:
    """Return the stages of each iteration and each judged policy version, and first and last the stages of neither.

    With ``train.staleness`` stages of the next iteration come between the stages of an iteration.
    """
    groups: dict[str, list[State]] = {}
    for state in found:
        start = not any(groups)
        groups.setdefault(state.step.parent or ("" if start else "end"), []).append(state)
    return [*groups.values()]


def state_of(step: Step, in_doubt: set[str]) -> State:
    """Return the state of one stage. ``in_doubt`` are the slots of earlier stages that are not current."""
    found = State(step, "waits")
    try:
        folders = store.names(store.join(step.slot, "attempts"))
        found = replace(found, logs=tuple(logs_of(step.slot)), folders=len(folders))
        generation, manifest = current_of(step.slot)
        found = replace(found, generation=generation, manifest=manifest)
        if manifest is None:
            return replace(found, word="invalidated" if generation > 1 else "missing")
        if (request := _request(step, in_doubt)) is None:
            return found
        reason = why_stale(manifest, request)
    except ArtifactError as error:
        return replace(found, word="damaged", why=first_line(error))
    return replace(found, word="stands" if reason is None else "stale", why=reason or "")


def _request(step: Step, in_doubt: set[str]) -> Request | None:
    """Return the step's Request; None if one of its inputs is missing, damaged or in doubt."""
    try:
        request = step.request()
    except ArtifactError:
        return None
    sources = [source.url for inputs in request.inputs.values() for source in inputs]
    return None if in_doubt.intersection(sources) else request
