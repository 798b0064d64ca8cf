"""The state of every stage of a run: finished, running, failed or stale, with attempts, seconds and rewards."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from cosmos_rl_core.errors import ArtifactError, counted, first_line
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.lease import BEAT_S, PATIENCE_S
from cosmos_rl_core.storage.sealed import RESTORE
from flows.ledger.estimates import Mean, Means
from flows.ledger.pages import Page
from flows.planning.run import Run
from flows.planning.steps import Step, open_run
from flows.post_train import steps
from flows.running.progress import Progress, read_progress
from flows.warning.warnings import Warned
from flows.watching.best import Best, best_of
from flows.watching.outlook import Outlook, known_means, outlook
from flows.watching.states import State
from stages.artifacts.request import Request
from stages.artifacts.slots import one_look, standing, why_stale

Life = Literal["running", "done", "failed", "stopped", "suspended", "limited", "interrupted", "idle"]
"""``running``: a process works on the run. Otherwise how the last process ended; ``idle`` if there was none."""
LOOKS = 4
PAUSE_S = 0.3
"""Looks until two files agree, and seconds between them."""


@dataclass(frozen=True)
class Overview:
    """The state of a run at one moment."""

    run: Run
    states: list[State]
    """Every stage, in order."""
    life: Life
    progress: Progress
    holder: dict[str, Any] | None
    """``pid`` and ``host`` of the process that works on the run; None without one."""
    means: Means = field(default_factory=dict[str, Mean], repr=False)
    """What waves of the run take."""

    @property
    def standing(self) -> int:
        """Return the number of stages that stand."""
        return sum(state.word == "stands" for state in self.states)

    @cached_property
    def damage(self) -> str:
        """Return what of the run is damaged, in one line; "" if nothing was seen. Only an audit reads every byte."""
        if damaged := [state.step.name for state in self.states if state.word == "damaged"]:
            return f"{counted(len(damaged), 'stage')} of {self.run.plan.run_id} damaged: {', '.join(damaged)}"
        try:
            iterations_made(self.run)
        except ArtifactError as error:
            return f"{self.run.plan.run_id} is damaged: {first_line(error)}"
        return ""

    @cached_property
    def outlook(self) -> Outlook:
        """Return reward before and after, the time that is left, the cost until now and where the report is."""
        return outlook(self.run, self.states, self.progress, self.means)

    @property
    def best(self) -> Best | None:
        """Return the best policy version so far; None if none was judged."""
        return best_of(self.run, self.states)

    @property
    def warnings(self) -> list[Warned]:
        """Return the iterations whose scores exceed a limit of early warning, with what was decided, in order."""
        judged = [state.manifest for state in self.states if state.step.kind == "warn" and state.word == "stands"]
        return [warned for manifest in judged if manifest is not None and (warned := Warned.of(manifest)) is not None]

    @property
    def z_scores(self) -> tuple[int, dict[str, float]] | None:
        """Return the newest iteration that was judged, and its rewards as z-scores of policy 0; None without any."""
        judged = [state for state in self.states if state.step.kind == "warn" and state.word == "stands"]
        if not judged or (manifest := judged[-1].manifest) is None:
            return None
        z = {name.removesuffix("_z"): value for name, value in manifest.summary.items() if name.endswith("_z")}
        return judged[-1].step.k or 0, {name: value for name, value in z.items() if isinstance(value, float)}

    def again(self) -> "Overview":
        """Return the state of the run now. Reads only the stages that its process has reached since.

        A process on another machine counts as ended once its lease expires.
        """
        life, progress, holder = life_of(self.run, PATIENCE_S)
        every = [state.step for state in self.states]
        if life != "running" or progress.wave not in {"", *(step.wave for step in every)}:
            # The process ended, or went on past the planned end.
            return look(self.run.store_url, self.run.plan.run_id)
        if progress.wave == self.progress.wave:
            return replace(self, progress=progress, holder=holder)
        passed = [i for i, step in enumerate(every) if step.wave in (self.progress.wave, progress.wave)]
        first, last = min(passed, default=0), max(passed, default=-1)
        kept = {state.step.name: state for state in (*self.states[:first], *self.states[last + 1 :])}
        with one_look():
            found = _with_progress(_states(every, kept), life, progress)
        return Overview(self.run, found, life, progress, holder, known_means(self.run))

    def as_json(self) -> dict[str, Any]:
        """Return the state for scripts.

        Keys: ``run``, ``url``, ``init`` (what policy version 0 begins with, "" for the base), ``state``
        (:data:`Life`), ``error`` ("" unless failed), ``holder`` (``pid`` and ``host``, or null), ``wave``, ``phase``,
        ``step``, ``total`` and ``wave_seconds`` of the newest wave, ``standing``, ``best`` (``k``, ``by``,
        ``figure``, ``rewards`` and ``passed`` of the best policy version, or null), ``warnings``
        (:meth:`Warned.as_json`), ``z_scores`` of the
        newest iteration that was judged (by reward, or null), ``outlook`` (:class:`flows.watching.outlook.Outlook`),
        and ``stages``. Each stage has ``name``, ``stage``,
        ``k`` (iteration or policy version, or null), ``slot``, ``state`` (:data:`Word`), ``why``, ``generation``,
        ``attempts``, and ``seconds``, ``reward`` and ``loss`` (or null).
        """
        return {
            "run": self.run.plan.run_id,
            "url": self.run.url,
            "init": self.run.plan.lineage,
            "state": self.life,
            "holder": self.holder,
            **_fields(self.progress, "error wave phase step total"),
            "wave_seconds": self.progress.seconds,
            "standing": self.standing,
            "best": None if self.best is None else _fields(self.best, "k by figure rewards passed"),
            "warnings": [warned.as_json() for warned in self.warnings],
            "z_scores": None if self.z_scores is None else self.z_scores[1],
            "outlook": self.outlook,
            "stages": [
                _fields(state.step, "name stage k slot")
                | {"state": state.word}
                | _fields(state, "why generation attempts seconds reward loss")
                for state in self.states
            ],
        }


def _fields(value: object, names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names.split()}


def look(store_url: str, run_id: str) -> Overview:
    """Return the state of a run now. Raises :class:`ConfigError` if the run does not exist."""
    run = open_run(store_url, run_id)
    life, progress, holder = life_of(run, 2 * BEAT_S)
    return Overview(run, _with_progress(states(run), life, progress), life, progress, holder, known_means(run))


def states(run: Run) -> list[State]:
    """Return the state of every stage of the run, in order, from artifacts alone."""
    with one_look():
        return _states(steps(run), {})


def life_of(run: Run, patience_s: float) -> tuple[Life, Progress, dict[str, Any] | None]:
    """Return whether a process works on the run or how the last one ended, its progress, and the process.

    Waits up to ``patience_s`` for a heartbeat of a process on another machine.
    """
    # Read after the lease, because a process records how it ended before it releases the lease.
    holder = run.holder(patience_s)
    said = read_progress(run.url)
    if holder is not None:
        # A recorded end belongs to an earlier process.
        return "running", Progress() if said is None or said.end else said, holder
    if said is None:
        return "idle", Progress(), None
    if said.end == "done" and not _is_made(run):
        # Its last process made a part, or some of it is to be made again.
        return "idle", Progress(), None
    return said.end or "interrupted", said, None


def wave_at_work(run: Run, look: Callable[[], Page | None]) -> str:
    """Return the wave that a process works on; "" if none works on the run, or between waves.

    ``look`` reads the newest page of the ledger. It and the progress are two files: they are read again until they
    agree.
    """
    wave = ""
    for _ in range(LOOKS):
        newest = look()
        life, progress, _ = life_of(run, PATIENCE_S)
        wave = progress.wave if life == "running" else ""
        if life != "running" or newest is None or newest.state == "closed" or newest.wave == wave:
            break
        time.sleep(PAUSE_S)
    return wave


def iterations_made(run: Run) -> int:
    """Return the number of iterations up to the newest policy. Raises :class:`ArtifactError` for damaged folders."""
    made = newest_first(run, "iterations")
    return next((k + 1 for k in made if standing(run.slots.policy(k + 1))[1] is not None), 0)


def newest_first(run: Run, folder: str) -> list[int]:
    """Return the numbers of the folders in ``folder``, falling. Raises :class:`ArtifactError` for a file."""
    found = store.names(url := store.join(run.url, folder))
    if found == {folder}:  # a file is listed as itself
        raise ArtifactError(f"{url} is a file, expected a folder; {RESTORE}")
    return sorted((int(name) for name in found if name.isdecimal()), reverse=True)


def _is_made(run: Run) -> bool:
    try:
        return run.is_made
    except ArtifactError:
        return False


def _states(every: Sequence[Step], kept: dict[str, State]) -> list[State]:
    """Return the state of every stage; those in ``kept``, by name, are not read again."""
    found: list[State] = []
    in_doubt: set[str] = set()
    group, begun = "", True
    for step in every:
        if step.group.startswith("iteration-") and step.group != group:
            # Iterations run in order: after one without any file there are no later ones.
            before = [state.word for state in found if state.step.group == group]
            begun = begun and (group == "" or set(before) != {"missing"})
            group = step.group
        if (state := kept.get(step.name)) is None:
            reads = begun or step.group == ""
            state = state_of(step, in_doubt) if reads else State(step, "missing")
        found.append(state)
        if state.word != "stands":
            in_doubt.add(step.slot)
    return found


def state_of(step: Step, in_doubt: set[str]) -> State:
    """Return the state of one stage. ``in_doubt`` are the slots of earlier stages that do not stand."""
    found = State(step, "waits")
    try:
        logs, folders = (len(store.names(store.join(step.slot, name))) for name in ("logs", "attempts"))
        found = replace(found, logs=logs, folders=folders)
        generation, manifest = standing(step.slot)
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


def _with_progress(found: list[State], life: Life, progress: Progress) -> list[State]:
    """Return the states with what the run's process recorded of its newest wave, for stages that do not stand."""
    left = [state for state in found if state.step.wave == progress.wave and state.word != "stands"]
    word, why = life if life == "running" or life == "failed" else "interrupted", ""
    if life == "failed":
        # The error begins with the end of the failed stage's slot.
        failed = f"/{progress.error.partition(' ')[0]}"
        left = [state for state in left if state.step.slot.endswith(failed)] or left
        why = first_line(progress.error)
    return [replace(state, word=word, why=why) if state in left else state for state in found]
