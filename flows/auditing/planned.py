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
    """The Requests that are, or were, asked for in slots."""

    def versions(self, stage: str) -> set[int]:
        """Return the versions of a stage that may have made an artifact."""
        ...

    def of(self, step: Step) -> Iterator[tuple[Request, str]]:
        """Yield the Requests for the slot of a step, like :meth:`Asked.of`."""
        ...


class Asked:
    """The Requests of a run: today's, and earlier ones, from before it went on with other stage versions or limits."""

    def __init__(self, run: AnyRun) -> None:
        self._run = run

    def versions(self, stage: str) -> set[int]:
        """Return the versions of a stage that the run was planned with or went on with."""
        return {plan.stage_versions.get(stage, STAGES[stage].version) for plan in self._plans}

    def of(self, step: Step) -> Iterator[tuple[Request, str]]:
        """Yield the Requests for the slot of a step, the newest first, each with the record that replaced it.

        Today's has "" in place of a record. Requests whose inputs are missing are left out.
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
    """Compare each artifact with the Request that the plan gives, and return the pairs whose recipes are equal.

    ``slot_at`` returns the slot with a URL. Scores by another version of their scorer than today's are compared with
    the plan's Request for that version. An artifact from before the run went on with other stage versions or limits
    is compared with the Request of that time: it waits for `run` to make it again.
    """
    pairs: list[tuple[Manifest, Request]] = []
    for step in chosen:
        # Without an input there is no Request; the check of that input says that it is missing or damaged.
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
    """Compare an artifact with the Requests for its slot, today's and earlier; return the one of its recipe, or None.

    Of several, it is the newest for which the artifact is current, else the newest of its recipe.
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
        told = [f"version {made.version} of {made.stage} made it, whose Requests this code cannot make any more"]
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

    It does if an input was ended, or if it is the report of a shorter run: a run that goes on ends such an artifact
    when it gets there.
    """
    if request.stage == "report" and _is_of_fewer(made, request):
        return True
    sources = [source for some in made.inputs.values() for source in some]
    return made.recipe == request.recipe and any(one.generation in slot_at(one.url).ended for one in sources)


def _is_of_fewer(made: Manifest, request: Request) -> bool:
    """Return whether a report shows only the first of today's policy versions."""
    of, now = ([source.content for source in one.inputs.get("updates", ())] for one in (made, request))
    return len(of) < len(now) and of == now[: len(of)]
