"""Check that the lines of ``metrics.jsonl`` follow from the artifacts.

A run writes the file after each wave that trains or evaluates, before it begins the next wave. So a wave that has begun
proves that all lines up to the last such wave before it were written. Lines after these may be missing: the run is at
work, or was killed.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cosmos_rl_core.canonical import from_json
from cosmos_rl_core.storage import store
from flows.auditing.checks.faults import Findings
from flows.planning.base import AnyRun
from flows.planning.steps import Step
from flows.post_train import post_train
from flows.watching.metrics import steps_after, wave_lines
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import current_of

Pair = tuple[Request, Manifest]


@dataclass(frozen=True)
class _Wave:
    """Artifacts of a wave that are current, and the lines that they give."""

    pairs: list[Pair]
    lines: list[bytes]
    whole: bool
    begun: bool
    """Whether this run made an artifact of the wave; artifacts that runs share may come from others."""
    writes: bool
    """Whether the run writes the file after it."""
    planned: bool
    """Whether the wave is in the run's list today. Evaluations at the ends of shorter runs, from which it went on, are
    not, and their lines may be gone."""
    remade: bool
    """Whether an artifact is a later generation: until the file is written again, its lines are of the first one."""
    stale: bool
    """Whether an input of an artifact has changed since: the run makes the artifact again when it goes on."""


def check(run: AnyRun, every: Iterable[Step], url: str, findings: Findings) -> None:
    """Compare ``metrics.jsonl`` with the lines that the artifacts give, up to the first wave that is not whole."""
    waves = _current(run, every)
    # Read after the artifacts, so that it can have the lines of all of them.
    told = (store.read_if_exists(url) or b"").splitlines(keepends=True)
    proved, place, remade = _proved(waves), 0, False
    for number, wave in enumerate(waves):
        if not wave.whole:
            return
        found = told[place : place + len(wave.lines)]
        remade = remade or wave.remade
        if found == wave.lines:
            place += len(wave.lines)
        elif not wave.planned:
            continue
        elif number < proved or (len(told) > place and not remade and _differ(found, wave.lines)):
            _add(told, place, waves, url, findings)
            return
        else:
            return
    if proved == len(waves) and len(told) > place:
        findings.add(url, "lines", f"{len(told)}, the artifacts give {place}")


def _current(run: AnyRun, every: Iterable[Step]) -> list[_Wave]:
    """Return the waves with a current artifact, up to the first that is not whole."""
    planned = {step.slot for wave in post_train(run) for step in wave.steps}
    waves: list[_Wave] = []
    reached = 0
    for steps in _waves(every):
        pairs = [(one.request(), found) for one in steps if (found := current_of(one.slot)[1]) is not None]
        lines = wave_lines(pairs, reached, run.headline_reward)
        after = [steps_after(request) or 0 for request, _ in pairs]
        reached = max(reached, *after) if pairs else reached
        waves.append(
            _Wave(
                pairs,
                [line.encode() for line in lines],
                whole=len(pairs) == len(steps),
                # A fork refers to artifacts before it does anything.
                begun=any(found.slot.startswith(f"{run.url}/") for _, found in pairs),
                writes=bool(lines) and (any(after) or lines[-1].is_evaluation),
                planned=steps[0].slot in planned,
                remade=any(made.generation > 1 for _, made in pairs),
                stale=any(_is_stale(made, request) for request, made in pairs),
            )
        )
        if not waves[-1].whole:
            break
    return waves


def _is_stale(made: Manifest, request: Request) -> bool:
    """Return whether the run will make an artifact again, or its report of a shorter run, whose recipe is another."""
    known = made.recipe == request.recipe or request.stage == "report"
    return known and made.why_not(request) is not None


def _proved(waves: list[_Wave]) -> int:
    """Return the number of waves whose lines must be in the file."""
    fresh = next((number for number, wave in enumerate(waves) if wave.stale), len(waves))
    begun = [number for number, wave in enumerate(waves[:fresh]) if wave.begun and wave.planned]
    if not begun:
        return 0
    last = begun[-1]
    if last == len(waves) - 1 and waves[last].whole and not waves[last].lines:
        # The report: nothing that has lines comes after it.
        return len(waves)
    return next((number + 1 for number in reversed(range(last)) if waves[number].writes and waves[number].planned), 0)


def _differ(found: list[bytes], expected: list[bytes]) -> bool:
    return any(one != other for one, other in zip(found, expected, strict=False))


def _add(told: list[bytes], place: int, waves: list[_Wave], url: str, findings: Findings) -> None:
    """Add a fault: the first line that differs, or the number of lines if that is all."""
    lines = [line for wave in waves if wave.planned for line in wave.lines]
    for number, (found, expected) in enumerate(zip(told, lines, strict=False)):
        if found != expected:
            findings.add(url, f"line {number + 1}", _difference(found, expected))
            return
    findings.add(url, "lines", f"{len(told)}, the artifacts give {len(lines)}")


def _waves(every: Iterable[Step]) -> list[list[Step]]:
    waves: dict[str, list[Step]] = {}
    for step in every:
        waves.setdefault(step.wave, []).append(step)
    return list(waves.values())


def _difference(found: bytes, expected: bytes) -> str:
    """Return a sentence on the first value that differs between two lines."""
    try:
        told, right = from_json(found), from_json(expected)
    except ValueError:
        return "no JSON that can be read"
    names = [*right, *told] if isinstance(told, dict) else []
    name = next((name for name in names if (name in told, told.get(name)) != (name in right, right.get(name))), None)
    if name is None:
        return "other text than the artifacts give"
    value = told.get(name)
    # No right value is a list or a dict, and one that is nested deep cannot be printed.
    shown = f"a {type(value).__name__}" if isinstance(value, dict | list) else value
    return f"{name} is {shown}, the artifacts give {right.get(name)}"
