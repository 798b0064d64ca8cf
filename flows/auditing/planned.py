"""Check that artifacts are those that the plan asks for: with its settings and seed, made from what stands now."""

from collections.abc import Callable, Iterable
from contextlib import suppress

from cosmos_rl_core.errors import ArtifactError
from flows.auditing.faults import Findings
from flows.auditing.slot import Slot
from flows.planning.steps import Step
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import standing
from stages.contracts import Reward
from stages.scoring.rewards import label_of


def check(steps: Iterable[Step], slot_at: Callable[[str], Slot], findings: Findings) -> list[tuple[Manifest, Request]]:
    """Compare each artifact with the Request that the plan gives, and return those pairs that have one recipe.

    ``slot_at`` returns the slot with a URL.
    Scores by another version of their scorer than today's are compared with what the plan asks of that one.
    """
    pairs: list[tuple[Manifest, Request]] = []
    for step in steps:
        # Without an input there is no Request; that it is missing, or damaged, is found where it belongs.
        with suppress(ArtifactError):
            made, request = standing(step.slot)[1], step.request()
            if made is None:
                continue
            if (then := _as_scored(made, request)) is not None:
                request, told = then
                findings.unchecked.append(f"{findings.place(step.slot)}: {told}")
            if made.recipe == request.recipe:
                pairs.append((made, request))
            if (reason := made.why_not(request)) is not None and not _waits(made, request, slot_at):
                field = "inputs" if made.recipe == request.recipe else "recipe"
                findings.add(Manifest.url(step.slot, made.generation), field, reason)
    return pairs


def _as_scored(made: Manifest, request: Request) -> tuple[Request, str] | None:
    """Return the Request that asks for the scorer which made the scores, and how that differs from today's.

    None if it is the same, or if more differs.

    The version of a scorer names the packages that it needs, so it changes with the machine too.
    """
    if not isinstance(request.config, Reward) or made.config.get("scorer") in (None, request.config.scorer):
        return None
    config = request.config.model_copy(update={"scorer": made.config["scorer"]})
    then = request.model_copy(update={"config": config})
    told = f"scored by version {config.scorer!r} of {label_of(made)}, today's is {request.config.scorer!r}"
    return (then, told) if then.recipe == made.recipe else None


def _waits(made: Manifest, request: Request, slot_at: Callable[[str], Slot]) -> bool:
    """Return whether an artifact waits for `run` to make it again.

    An input was ended, its stage has a new version, or it is the report of a shorter run. A run that goes on ends it
    when it gets there.
    """
    if request.stage == "report" and _is_of_fewer(made, request):
        return True
    sources = [source for some in made.inputs.values() for source in some]
    return made.version != request.version or any(one.generation in slot_at(one.url).ended for one in sources)


def _is_of_fewer(made: Manifest, request: Request) -> bool:
    """Return whether a report is on the first of the policy versions that are there now."""
    of, now = ([source.content for source in one.inputs.get("updates", ())] for one in (made, request))
    return len(of) < len(now) and of == now[: len(of)]
