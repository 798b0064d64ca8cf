"""A run at one moment: the state of every stage, its process, and what follows from them."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from importlib import import_module
from typing import Any

from cosmos_rl_core.errors import ArtifactError, counted, first_line
from cosmos_rl_core.storage.lease import BEAT_S, PATIENCE_S
from flows.ledger.estimates import Mean, Means
from flows.ledger.pages import Page, marked, newest_page
from flows.library.best import Best, best_of
from flows.library.life import Life, Word, iterations_made, wave_at_work
from flows.library.outlook import Outlook, known_means, outlook
from flows.library.states import State, states, states_of
from flows.lineage.forks import Fork, forks_of
from flows.planning.base import AnyRun
from flows.planning.steps import read_run
from flows.running.progress import Progress
from flows.warning.warnings import Warned


@dataclass(frozen=True)
class Overview:
    """The state of a run at one moment."""

    run: AnyRun
    """The run, with as many iterations as its process makes, or as its last process made."""
    states: list[State]
    """Every stage, in order."""
    life: Word
    progress: Progress
    holder: dict[str, Any] | None
    """``pid`` and ``host`` of the process that works on the run; None without one."""
    means: Callable[[], Means] = field(default=dict[str, Mean], repr=False)
    """Function that gives the mean time of each kind of wave. It is called only while waves are left, and reads the
    ledger once."""

    @classmethod
    def of(cls, run: AnyRun, patience_s: float = 2 * BEAT_S) -> "Overview":
        """Look at a run now. Waits up to ``patience_s`` for a heartbeat of a process on another machine."""
        # Before the states are read: the process may finish stages while this waits for a heartbeat.
        life = Life.of(run, patience_s)
        if life.progress.iterations > run.recipe.train.num_iterations:
            run = run.going_to(life.progress.iterations)
        found = _with_progress(states(run), life)
        return cls(run, found, life.word, life.progress, life.holder, _means_of(run))

    @property
    def current(self) -> int:
        """Return the number of stages whose artifact is current."""
        return sum(state.word == "stands" for state in self.states)

    @cached_property
    def damage(self) -> str:
        """Return the damage that was seen, in one line; "" if there is none. Only an audit reads every byte."""
        if damaged := [state.step.name for state in self.states if state.word == "damaged"]:
            return f"{counted(len(damaged), 'stage')} of {self.run.plan.run_id} damaged: {', '.join(damaged)}"
        try:
            iterations_made(self.run)
            best_of(self.run, self.states)
            _warnings(self.states)
        except ArtifactError as error:
            return f"{self.run.plan.run_id} is damaged: {first_line(error)}"
        return ""

    @cached_property
    def outlook(self) -> Outlook:
        """Return reward before and after, the time that is left, the cost until now and where the report is."""
        return outlook(self.run, self.states, self.progress, self.means)

    @cached_property
    def lost(self) -> int | None:
        """Return the number of attempts that left no artifact; None without a ledger, or with a damaged one."""
        looks: list[Page | None] = []

        def look() -> Page | None:
            looks.append(newest_page(self.run.url))
            return looks[-1]

        wave = self.progress.wave if self.life == "running" else ""
        try:
            newest = look()
            if self.life == "running" and newest is not None and newest.state == "open" and newest.wave != wave:
                # The run has gone on since its progress was read, or its last process was killed.
                wave = wave_at_work(self.run, look)
        except ArtifactError:
            return None
        newest = looks[-1]
        return None if newest is None else marked([newest], wave)[0].totals.failed

    @property
    def best(self) -> Best | None:
        """Return the best policy version so far; None if none was judged, or if :attr:`damage` names its scores."""
        with suppress(ArtifactError):
            return best_of(self.run, self.states)
        return None

    @property
    def warnings(self) -> list[Warned]:
        """Return, in order, the iterations whose scores exceed a limit of early warning, with the decisions on them.

        Empty if :attr:`damage` names the evidence or a decision.
        """
        with suppress(ArtifactError):
            return _warnings(self.states)
        return []

    @cached_property
    def forks(self) -> list[Fork]:
        """Return the runs that began in the middle of this one; empty if a record is damaged, which an audit finds."""
        with suppress(ArtifactError):
            return [*forks_of(self.run.url)]
        return []

    @cached_property
    def hacking(self) -> str:
        """Return whether a finished run shows signs of reward hacking, as its report says; "" for any other run."""
        if self.current < len(self.states):
            return ""
        # Imported here because it needs pandas, and the status of a run at work does not.
        signs = import_module("flows.warning.signs")
        try:
            return signs.verdict(self.run, [state.manifest for state in self.states if state.manifest is not None])
        except ArtifactError as error:
            return f"not known: {first_line(error)}"

    @property
    def z_scores(self) -> tuple[int, dict[str, float]] | None:
        """Return the newest judged iteration, and how many deviations each reward is from the first; None without."""
        judged = [state for state in self.states if state.step.kind == "warn" and state.word == "stands"]
        if not judged or (manifest := judged[-1].manifest) is None:
            return None
        z = {name.removesuffix("_z"): value for name, value in manifest.summary.items() if name.endswith("_z")}
        return judged[-1].step.k or 0, {name: value for name, value in z.items() if isinstance(value, float)}

    def again(self) -> "Overview":
        """Return the state of the run now. Reads only the stages that its process has reached since.

        A process on another machine counts as ended once its lease expires.
        """
        life = Life.of(self.run, PATIENCE_S)
        progress = life.progress
        every = [state.step for state in self.states]
        if life.word != "running" or progress.wave not in {"", *(step.wave for step in every)}:
            # The process ended, or went on past the planned end.
            return Overview.of(read_run(self.run.store_url, self.run.plan.run_id))
        if progress.wave == self.progress.wave:
            return replace(self, progress=progress, holder=life.holder)
        passed = [i for i, step in enumerate(every) if step.wave in (self.progress.wave, progress.wave)]
        first, last = min(passed, default=0), max(passed, default=-1)
        kept = {state.step.name: state for state in (*self.states[:first], *self.states[last + 1 :])}
        found = _with_progress(states_of(every, kept), life)
        return Overview(self.run, found, life.word, progress, life.holder, _means_of(self.run))

    def as_json(self) -> dict[str, Any]:
        """Return the state for scripts.

        Keys: ``run``, ``url``, ``init`` (what the run begins with, "" for the base), ``forks`` (policy versions that
        forks begin with, by their runs), ``state`` (``running``, or how the last process ended), ``error`` ("" unless
        failed), ``holder`` (``pid`` and ``host``, or null), ``wave``, ``phase``, ``step``, ``total`` and
        ``wave_seconds`` of the newest wave, ``processes`` (that stay between stages:
        :class:`flows.devices.staying.Processes`), ``standing``, ``best`` (``k``, ``by``, ``figure``,
        ``standard_error``, ``rewards`` and ``passed`` of the best policy version, or null), ``warnings``
        (:meth:`Warned.as_json`), ``z_scores`` of the newest iteration that was judged (by reward, or null),
        ``outlook`` (:class:`flows.library.outlook.Outlook`), and ``stages``. Each stage has ``name``, ``stage``,
        ``k`` (iteration or policy version, or null), ``slot``, ``state`` (:data:`flows.library.states.Word`),
        ``why``, ``generation``, ``attempts``, and ``seconds``, ``reward`` and ``loss`` (or null).
        """
        return {
            "run": self.run.plan.run_id,
            "url": self.run.url,
            "init": self.run.plan.lineage,
            "forks": {fork.run: fork.at for fork in self.forks},
            "state": self.life,
            "holder": self.holder,
            **_fields(self.progress, "error wave phase step total"),
            "wave_seconds": self.progress.seconds,
            "processes": self.progress.processes.model_dump(mode="json"),
            "workers": None if self.progress.crew is None else self.progress.crew.model_dump(mode="json"),
            "standing": self.current,
            "best": None if self.best is None else _fields(self.best, "k by figure standard_error rewards passed"),
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


def _means_of(run: AnyRun) -> Callable[[], Means]:
    return cache(partial(known_means, run))


def _warnings(states: Iterable[State]) -> list[Warned]:
    judged = [state.manifest for state in states if state.step.kind == "warn" and state.word == "stands"]
    return [warned for manifest in judged if manifest is not None and (warned := Warned.of(manifest)) is not None]


def _fields(value: object, names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names.split()}


def _with_progress(found: list[State], life: Life) -> list[State]:
    """Return the states; stages of the process's newest wave without a current artifact get its word and error."""
    progress = life.progress
    left = [state for state in found if state.step.wave == progress.wave and state.word != "stands"]
    word, why = life.word if life.word in ("running", "failed") else "interrupted", ""
    if life.word == "failed":
        # The error begins with the name of the failed stage.
        failed = progress.error.partition(" ")[0]
        left = [state for state in left if state.step.name == failed] or left
        why = first_line(progress.error)
    return [replace(state, word=word, why=why) if state in left else state for state in found]
