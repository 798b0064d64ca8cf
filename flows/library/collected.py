"""Facts that pages show of a run, read from each artifact once: fragments, optimizer steps, seconds, attempts."""

import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cosmos_rl_core.errors import ArtifactError, first_line
from cosmos_rl_core.storage import store
from flows.ledger.attempts import LOGS, Attempts, Logged, logs_of, named
from flows.library.best import Best, Measured, best_among
from flows.library.states import State
from flows.planning.base import AnyRun
from flows.planning.steps import Step
from flows.warning.warnings import Warned
from stages import registry
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.records import Invalidated, place_of
from stages.artifacts.request import Input
from stages.artifacts.slots import current_of
from stages.fragment import excerpt_of
from stages.reporting.book import Piece, Trained
from stages.reporting.contracts import Fragment
from stages.reporting.pictures import References

LAST_WORDS = 300
"""Characters of the last line of a log."""
_BAR = re.compile(r"\d%\|.*\|.*\d+/(\d+|\?)|\[\d+:\d+[<,]")
"""A progress bar of tqdm."""


@dataclass
class Stage:
    """All artifacts of one stage."""

    made: int = 0
    seconds: float = 0.0


@dataclass
class Collected:
    """Facts of a run. :meth:`add` artifacts in the order of the loop."""

    run: AnyRun
    iterations: dict[int, Piece] = field(default_factory=dict[int, Piece])
    judged: dict[int, Piece] = field(default_factory=dict[int, Piece])
    trained: dict[int, Trained] = field(default_factory=dict[int, Trained])
    stages: dict[str, Stage] = field(default_factory=dict[str, Stage])
    logged: dict[str, Logged] = field(default_factory=dict[str, Logged])
    """What the logs of a slot say, by its place in the store."""
    listed: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Names of the logs of each artifact when it was added, by the place of its slot."""
    made_again: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Names of slots with later generations than the first, each with the reason why the one before ended."""
    tripped: list[Manifest] = field(default_factory=list[Manifest])
    numerics: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Numerics of the newest artifact of each stage with torch; the newest artifact of all comes last."""
    logs: list[str] = field(default_factory=lambda: ["", ""])
    """Names of the first and of the newest log, which begin with their time."""
    measured: dict[int, dict[str, Measured]] = field(default_factory=dict[int, dict[str, Measured]])
    """Measurements of each policy version, by the names of the stages that made them."""
    exported: set[int] = field(default_factory=set[int])
    """Policy versions that were exported."""
    scorers: dict[str, str] = field(default_factory=dict[str, str])
    """Version of the scorer in the newest artifact of each reward, by the reward's label."""
    damaged: dict[str, str] = field(default_factory=dict[str, str])
    """What is wrong, by the names of the stages whose files are damaged."""
    _first: Artifact | None = None
    """The artifact with the answers of version 0, from a stage that has no fragments."""
    _seen: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.attempts = Attempts(self.run.url)
        self.references = References(self.run.url)
        """The reader of the files that prompts refer to."""
        for slot in _history(self.run):
            with self.naming_damage(slot.removeprefix(f"{self.run.url}/")):
                if (made := current_of(slot)[1]) is not None:
                    self.add(slot, made, counts=False)

    def add(self, slot: str, made: Manifest, *, counts: bool = True) -> None:
        """Add the artifact of a slot; nothing if it was added before. ``counts`` says whether it may rank policies.

        Raises :class:`ArtifactError` if it is damaged.
        """
        if made.digest in self._seen:
            return
        k = made.iteration or 0
        if made.stage == "fragment":
            pieces = self.judged if made.config["held_out"] else self.iterations
            pieces[k] = Piece.read(Artifact(_input(made)), self._folder(made))
        elif registry.STAGES[made.stage].reader is not None:
            artifact = Artifact(_input(made))
            self._first = self._first or artifact
            self.judged[k] = Piece.read(artifact, first=self._first if k else None)
        elif registry.trains(made.stage):
            self.trained[k] = Trained.read(Artifact(_input(made)))
        elif made.stage == "warn" and made.summary.get("tripped"):
            self.tripped.append(made)
        if registry.STAGES[made.stage].torch:
            self.numerics.pop(made.stage, None)
            self.numerics[made.stage] = made.numerics
        if counts:
            self._measure(slot, made)
        self._count(slot, made)
        # Last, so that an artifact that could not be read is tried again.
        self._seen.add(made.digest)

    def has(self, slots: Iterable[str]) -> bool:
        """Return whether each of some slots has an artifact that was added."""
        return all(place_of(slot) in self.listed for slot in slots)

    @contextmanager
    def naming_damage(self, name: str) -> Iterator[None]:
        """Catch an :class:`ArtifactError` of the block, and list it under the ``name`` of a stage."""
        try:
            yield
        except ArtifactError as error:
            self.damaged[name] = first_line(error)

    def fill(self, states: Sequence[State]) -> None:
        """Add the artifacts of a run's stages. Where a fragment could be made but is not, make its excerpt, no files.

        Damaged artifacts are left out and listed.
        """
        for state in states:
            with self.naming_damage(state.step.name):
                self._fill(state)

    def _fill(self, state: State) -> None:
        if state.word == "damaged":
            self.damaged[state.step.name] = state.why
        elif state.manifest is not None:
            self.add(state.step.slot, state.manifest, counts=state.word == "stands")
        elif state.read:
            self._unfinished(state)
            if state.step.kind == "fragment":
                self._improvise(state.step)

    def _measure(self, slot: str, made: Manifest) -> None:
        if scorer := made.config.get("scorer"):
            self.scorers[slot.rpartition("/")[2].partition("-")[2]] = str(scorer)
        if place_of(slot).startswith(f"{place_of(self.run.url)}/exports/"):
            self.measured.setdefault(made.iteration or 0, {})[slot.rpartition("/")[2]] = Measured(slot, made)
        if made.stage.endswith("export"):
            self.exported.add(made.iteration or 0)

    @property
    def best(self) -> Best | None:
        """Return the best policy version; None if none was judged, or if a score that ranks is damaged."""
        with self.naming_damage("scores of policies"):
            return best_among(self.run, self.measured)
        return None

    def decisions(self) -> Iterator[tuple[int, str]]:
        """Yield the iteration of each warning that has a decision, and the last decision on it."""
        for made in self.tripped:
            found = self._warned(made)
            if found is not None and found.decision is not None:
                yield found.k, str(found.decision)

    def _warned(self, made: Manifest) -> Warned | None:
        with self.naming_damage(named(place_of(made.slot), made.stage)):
            return Warned.of(made)
        return None

    @property
    def decided(self) -> str:
        """Return the last decision on the newest warning, a :data:`flows.warning.decisions.Word`; "" without one."""
        found = self._warned(self.tripped[-1]) if self.tripped else None
        return "" if found is None or found.decision is None else found.decision.word

    def _folder(self, made: Manifest) -> str:
        """Return the address of a fragment's files, relative to the page."""
        if (entry := made.files.get(Fragment.FRAGMENT)) is None:
            raise ArtifactError(f"{made.slot} has no file {Fragment.FRAGMENT}")
        here = place_of(self.run.slots.report)
        return posixpath.relpath(posixpath.dirname(f"{place_of(made.slot)}/{entry.path}"), here) + "/"

    def _improvise(self, step: Step) -> None:
        try:
            request = step.request()
        except ArtifactError:  # an input is missing
            return
        excerpt = excerpt_of(request, lambda name, data: None, lambda phase, done, total: None)
        pieces = self.judged if step.parent.startswith("policy-") else self.iterations
        pieces[excerpt.k] = Piece(excerpt)

    def _count(self, slot: str, made: Manifest) -> None:
        if made.slot != slot:
            # Another run made it, and its time counts there.
            self.listed[place_of(slot)] = []
            return
        # Read before anything is counted: a damaged artifact is added again once it is whole.
        end = Invalidated.read(slot, made.generation - 1) if made.generation > 1 else None
        logs = self.listed[place_of(slot)] = logs_of(slot)
        stage = slot.rpartition("/")[2] if "/runs/" in slot else made.stage
        found = self.stages.setdefault(stage, Stage())
        found.made += 1
        found.seconds += float(made.summary.get("seconds") or 0)
        if slot.startswith(self.run.url):  # other runs may have made what is shared, at other times
            self._date(logs)
        failed = max(0, len(logs) - made.generation)
        last = _last_words(slot, logs[-2]) if failed else ""
        name = named(place_of(slot), made.stage)
        self.logged[place_of(slot)] = Logged(name, stage, failed, last)
        if made.generation > 1:
            why = f"made again, generation {made.generation}: {end.reason if end else 'no reason recorded'}"
            self.made_again.append((name, why))

    def _unfinished(self, state: State) -> None:
        step, logs = state.step, state.logs
        self._date(logs)
        last = _last_words(step.slot, logs[-1]) if logs else ""
        self.logged[place_of(step.slot)] = Logged(step.name, step.stage, len(logs), last)

    def _date(self, logs: Sequence[str]) -> None:
        if logs:
            first, last = self.logs
            self.logs = [min(first or logs[0], logs[0]), max(last, logs[-1])]


def _history(run: AnyRun) -> Iterator[str]:
    """Yield the slots of a fork's origin that its page shows: curves and pictures of the iterations before the fork.

    Yields none if the scores of both cannot be compared.
    """
    for k in range(run.plan.baseline, run.plan.first):
        yield from (run.slots.iteration(k, "fragment"), run.slots.policy(k + 1), run.slots.version(k, "fragment"))


def _input(made: Manifest) -> Input:
    return Input(
        url=made.slot,
        generation=made.generation,
        manifest=made.digest,
        fingerprint=made.fingerprint,
        content=made.part_content(),
    )


def _last_words(slot: str, log: str) -> str:
    """Return the last line of a log that is not a progress bar; "" without any."""
    data = store.read_if_exists(store.join(slot, LOGS, log)) or b""
    # A carriage return ends a line too: bars are drawn over themselves.
    lines = [line.strip() for line in data.decode(errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if not _BAR.search(line)]
    return told[-1][:LAST_WORDS] if told else ""
