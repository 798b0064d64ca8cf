"""Runs of a study that are planned together."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import starmap
from typing import Any

from cosmos_rl_core.errors import ConfigError, Mistakes, counted
from cosmos_rl_core.storage import store
from flows.forking.references import found_in_origin
from flows.forking.work import Work, work_of
from flows.planning import requests
from flows.planning.base import AnyPlan, AnyRun
from flows.planning.plan import Settings
from flows.planning.run import Run, run_of
from flows.post_train import post_train
from flows.studying.study import Member, Study
from stages.artifacts.slots import one_look
from stages.registry import trains


@dataclass(frozen=True)
class Planned:
    """A run of a study, with its plan and the settings that a training flow takes."""

    member: Member
    settings: Settings
    plan: AnyPlan
    begins: AnyPlan | None = None
    """The plan of another run of the study, if this run begins as its fork at policy 0, once that policy exists."""


@dataclass(frozen=True)
class PlannedStudy:
    """A study that is not made yet, with its work."""

    study: Study
    folder: str
    runs: tuple[tuple[Member, Work], ...]

    @property
    def work(self) -> Work:
        """Return the work of all runs."""
        return sum((work for _, work in self.runs), Work())

    def lines(self) -> Iterator[str]:
        """Yield the lines to print."""
        yield f"{'study':<11}{self.study.name}: {counted(len(self.runs), 'run')} of {self.study.source}"
        for member, work in self.runs:
            yield f"{'':<11}{member.words} ({member.run}): {work.words}"
        yield f"{'makes':<11}{self.work.words}"
        yield f"{'page':<11}{self.folder}/index.html"

    def as_json(self) -> dict[str, Any]:
        """Return the work as plain data."""
        runs = [{**member.model_dump(mode="json"), "work": asdict(work)} for member, work in self.runs]
        found = {"study": self.study.name, "of": self.study.of, "source": self.study.source, "folder": self.folder}
        return found | {"work": asdict(self.work), "runs": runs}


def planned_study(study: Study, planned: Sequence[Planned], store_url: str) -> PlannedStudy:
    """Return the work of a study. Writes nothing."""
    return PlannedStudy(study, study.url(store_url), tuple(starmap(_work, ((one, store_url) for one in planned))))


def _work(one: Planned, store_url: str) -> tuple[Member, Work]:
    run = run_of(one.plan.model_copy(update={"run_id": one.member.run}), store_url)
    with one_look():
        if run.plan.origin is not None:
            return one.member, work_of(run, found_in_origin(run))
        return one.member, work_of(run, () if one.begins is None else {*_shared(run, run_of(one.begins, store_url))})


def _shared(run: AnyRun, first: AnyRun) -> Iterator[str]:
    """Yield the slots that a run will share with the first run of its seed: both make these alike before any update."""
    if not isinstance(run, Run) or not isinstance(first, Run):
        return
    yield run.slots.policy(0)
    rollouts, exports = store.join(run.url, "iterations/0000/"), store.join(run.url, "exports/0000/")
    like = {rollouts: _samples(run) == _samples(first), exports: _held_out(run) == _held_out(first)}
    differing = {reward.fn.label for reward in run.scored if reward not in first.scored}
    for wave in post_train(run):
        for step in wave.steps:
            folder = next((folder for folder in like if step.slot.startswith(folder)), None)
            if folder is None or not like[folder] or trains(step.kind):
                continue
            _, is_score, label = step.stage.partition("-")
            if not differing or step.kind in _SAMPLES or (is_score and label not in differing):
                yield step.slot


def _samples(run: Run) -> dict[str, Any]:
    return requests.sampling(run, 0).identity() if run.trains_on_rewards else {}


def _held_out(run: Run) -> Any:
    return run.recipe.validation, run.plan.validation_prompts, run.plan.media, run.recipe.policy.diffusers


_SAMPLES = ("rollout", "export", "evaluate", "embed")
"""Stages that read no score."""


class Planning:
    """The runs of a study while they are planned, and the mistakes of all of them."""

    def __init__(self) -> None:
        self.mistakes = Mistakes()
        self._planned: list[Planned] = []

    def add(self, planned: Planned) -> bool:
        """Add a run; return False if an equal run is there, because two settings mean the same."""
        if planned.member.run in {one.member.run for one in self._planned}:
            return False
        settings = replace(planned.settings, run_id=planned.member.run, of_study=True)
        self._planned.append(replace(planned, settings=settings))
        return True

    def found(self) -> list[Planned]:
        """Return the runs. Raises one :class:`ConfigError` with all mistakes."""
        if self.mistakes:
            raise ConfigError("\n  ".join(self.mistakes))
        return self._planned
