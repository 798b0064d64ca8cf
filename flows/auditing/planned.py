"""Check that artifacts are what the plan asks for: with its settings and seed, made from the current inputs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Protocol

from cosmos_rl_core.errors import ArtifactError
from flows.auditing.checks.faults import Findings
from flows.auditing.slot import Slot
from flows.planning.base import AnyRun
from flows.planning.plan import Plan, every_plan
from flows.planning.steps import Step
from flows.planning.versions import KIND
from flows.post_train import steps
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import current_of
from stages.contracts import Reward
from stages.registry import STAGES
from stages.scoring.rewards import label_of


class Asking(Protocol):
    """Knows what is asked for in slots."""

    def versions(self, stage: str) -> set[int]:
        """Return the versions of a stage that may have made an artifact."""
        ...

    def of(self, step: Step) -> Iterator[tuple[Request, str]]:
        """Yield what is asked for in the slot of a step, like :meth:`Asked.of`."""
        ...


class Asked:
    """The Requests of a run: of today, and from before it went on with other stage versions or limits."""

    def __init__(self, run: AnyRun) -> None:
        self._run = run

    def versions(self, stage: str) -> set[int]:
        """Return the versions of a stage that the run was planned with or went on with."""
        return {plan.stage_versions.get(stage, STAGES[stage].version) for plan in self._plans}

    def of(self, step: Step) -> Iterator[tuple[Request, str]]:
        """Yield what is asked for in the slot of a step, the newest first, each with the record that replaced it.

        Left out are Requests whose inputs are not there.
        """
        with suppress(ArtifactError):
            yield step.request(), ""
        for number, earlier in reversed([*enumerate(self._earlier, 1)]):
            with suppress(ArtifactError):
                if step.slot in earlier:
                    yield earlier[step.slot].request(), f"{KIND}.{number}.json"

    @cached_property
    def _plans(self) -> list[Plan]:
        return every_plan(self._run.store_url, self._run.plan.run_id)

    @cached_property
    def _earlier(self) -> list[dict[str, Step]]:
        """Return the steps by slot, once for each plan but the newest."""
        changed = ({name: getattr(plan, name) for name in _REPLACED} for plan in self._plans[:-1])
        runs = (replace(self._run, plan=self._run.plan.model_copy(update=change)) for change in changed)
        return [{step.slot: step for step in steps(run)} for run in runs]


_REPLACED = ("stage_versions", "early_warning")
"""Fields of a plan that decide Requests and that a record replaces."""


def check(
    chosen: Iterable[Step], asked: Asking, slot_at: Callable[[str], Slot], findings: Findings
) -> list[tuple[Manifest, Request]]:
    """Compare each artifact with the Request that the plan gives, and return those pairs that have one recipe.

    ``slot_at`` returns the slot with a URL. Scores by another version of their scorer than today's are compared with
    what the plan asks of that one. What was made before the run went on with other stage versions or limits waits for
    `run` to make it again, and is compared with what was asked for then.
    """
    pairs: list[tuple[Manifest, Request]] = []
    for step in chosen:
        # Without an input there is no Request; that it is missing, or damaged, is found where it belongs.
        with suppress(ArtifactError):
            if (made := current_of(step.slot)[1]) is None:
                continue
            if made.stage in STAGES and made.version not in (known := asked.versions(made.stage)):
                told = f"{made.version} of {made.stage}, expected {' or '.join(map(str, sorted(known)))}"
                findings.add(Manifest.url(step.slot, made.generation), "version", f"{told} as the run was planned")
            elif (request := _compare(made, step, asked, slot_at, findings)) is not None:
                pairs.append((made, request))
    return pairs


def _compare(
    made: Manifest, step: Step, asked: Asking, slot_at: Callable[[str], Slot], findings: Findings
) -> Request | None:
    """Compare an artifact with what is or was asked for in its slot; return the Request that has its recipe, or None.

    It is the newest that the artifact is current for, else the newest of its recipe.
    """
    found: tuple[Request, list[str]] | None = None
    rank = (True, True, True)
    for asked_for, replaced in asked.of(step):
        request, scored = _as_scored(made, asked_for)
        differs = (made.why_not(request) is not None, made.recipe != request.recipe, made.version != request.version)
        if found is None or differs < rank:
            then = f"version {made.version} of {made.stage} made it, before {replaced}" if replaced else ""
            found, rank = (request, [scored, then]), differs
        if not rank[0]:
            break
    if found is None:
        return None
    request, told = found
    place = findings.place(step.slot)
    if made.stage == request.stage and made.version != request.version:
        told = [f"version {made.version} of {made.stage} made it, and what that was asked for cannot be told any more"]
    elif (reason := made.why_not(request)) is not None and not _waits(made, request, slot_at):
        field = "inputs" if made.recipe == request.recipe else "recipe"
        findings.add(Manifest.url(step.slot, made.generation), field, reason)
    findings.unchecked += [f"{place}: {line}" for line in told if line]
    return request if made.recipe == request.recipe else None


def _as_scored(made: Manifest, request: Request) -> tuple[Request, str]:
    """Return the Request that asks for the scorer which made the scores, and how that differs from today's.

    If the scorer is the same, or if more than the scorer differs, it is the given Request, and the text is empty. The
    version of a scorer names the packages that it needs, so it changes with the machine too.
    """
    if not isinstance(request.config, Reward) or made.config.get("scorer") in (None, request.config.scorer):
        return request, ""
    config = request.config.model_copy(update={"scorer": made.config["scorer"]})
    then = request.model_copy(update={"config": config})
    told = f"scored by version {config.scorer!r} of {label_of(made)}, today's is {request.config.scorer!r}"
    return (then, told) if then.recipe == made.recipe else (request, "")


def _waits(made: Manifest, request: Request, slot_at: Callable[[str], Slot]) -> bool:
    """Return whether an artifact waits for `run` to make it again.

    An input was ended, or it is the report of a shorter run. A run that goes on ends it when it gets there.
    """
    if request.stage == "report" and _is_of_fewer(made, request):
        return True
    sources = [source for some in made.inputs.values() for source in some]
    return made.recipe == request.recipe and any(one.generation in slot_at(one.url).ended for one in sources)


def _is_of_fewer(made: Manifest, request: Request) -> bool:
    """Return whether a report is on the first of the policy versions that are there now."""
    of, now = ([source.content for source in one.inputs.get("updates", ())] for one in (made, request))
    return len(of) < len(now) and of == now[: len(of)]
