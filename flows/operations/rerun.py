"""Make one stage of a run again."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.storage import store
from flows.planning.run import Run
from flows.planning.steps import Step, find, open_run
from flows.post_train import steps
from stages.artifacts.artifact import Artifact
from stages.artifacts.generations import current_generation, has_begun, invalidate, is_committed
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Input
from stages.artifacts.slots import read_manifest

SHOWN = 40
"""Artifacts that are named one by one."""


@dataclass(frozen=True)
class Rerun:
    """A generation of one stage that was ended, or would be, and what that may make stale."""

    run_id: str
    step: Step
    generation: int
    committed: bool
    """Whether it had an artifact."""
    below: list[tuple[str, float | None]]
    """Artifacts made from it, and the seconds that each took, where it is known."""
    dry_run: bool

    @property
    def shared(self) -> bool:
        """Whether other runs of the store may read it too."""
        return self.step.stage.startswith(("embed", "encode"))

    def lines(self) -> list[str]:
        """For people."""
        lines = _cost(self.step.name, self.below)
        if self.shared:
            lines.append("other runs of this store that read the same artifact are not looked at")
        ended = "invalidated" if self.committed else "nothing will be adopted from the unfinished"
        what = f"generation {self.generation} of {self.step.slot}"
        if self.dry_run:
            return [*lines, f"nothing was changed; without --dry-run {what} would be ended and made again"]
        return [*lines, f"{ended} {what}; give its command again or retry its flow run to make it"]

    def as_json(self) -> dict[str, Any]:
        """For scripts: ``run``, ``name``, ``slot``, ``generation`` that was ended, whether it was ``committed``,
        ``dry_run``, whether it is ``shared`` with other runs, and ``below``: what may become stale, of each ``name``
        and ``seconds`` (null where nobody knows)."""
        return {
            "run": self.run_id,
            "name": self.step.name,
            "slot": self.step.slot,
            "generation": self.generation,
            "committed": self.committed,
            "dry_run": self.dry_run,
            "shared": self.shared,
            "below": [{"name": name, "seconds": seconds} for name, seconds in self.below],
        }


def rerun(store_url: str, run_id: str, stage: str, iteration: int | None = None, *, dry_run: bool = False) -> Rerun:
    """End the generation of a stage, finished or not, so that the next run makes it anew; or only say what it means.

    ``iteration`` is the policy version for an export or an evaluation. Raises :class:`ConfigError` if there is no such
    stage, or nothing of it.
    """
    run = open_run(store_url, run_id)
    every = steps(run)
    step = find(every, run_id, stage, iteration)
    generation = current_generation(step.slot)
    if not has_begun(step.slot, generation):
        raise ConfigError(f"{step.name} of {run_id} has no artifact and no unfinished one; just run it")
    _check_inputs(step)
    below = made_from(run, [step], every)
    found = Rerun(run_id, step, generation, is_committed(step.slot, generation), below, dry_run)
    if not dry_run:
        invalidate(step.slot, generation, "asked for by `cosmos-flows rerun`")
    return found


def _check_inputs(step: Step) -> None:
    """Raise :class:`ConfigError` if the stage reads files that retention has deleted: it could not be made again."""
    try:
        inputs = step.request().inputs
    except ArtifactError:
        return  # an input is not there yet: it will be made before this stage
    for source in (source for some in inputs.values() for source in some):
        artifact = Artifact(source)
        if gone := [part for part in source.parts if artifact.lacks(part)]:
            raise ConfigError(
                f"{step.name} cannot be made again: it reads {', '.join(gone)} of {source.url}, which this run deleted "
                "because newer ones are there; rerun the stage that made them first"
            )


def _cost(name: str, below: Sequence[tuple[str, float | None]]) -> list[str]:
    if not below:
        return [f"nothing was made from {name}"]
    lines = [f"stale if {name} comes out differently: {cost(below)} to make again"]
    return lines + listed(below)


def cost(artifacts: Sequence[tuple[str, float | None]]) -> str:
    """How many artifacts, and the seconds that they took, for people."""
    return f"{len(artifacts)} artifacts, {sum(seconds or 0 for _, seconds in artifacts):.0f} s"


def listed(artifacts: Sequence[tuple[str, float | None]]) -> list[str]:
    """A line each, as far as they are shown."""
    lines = [f"  {name:<28} {'?' if s is None else f'{s:.0f}'} s" for name, s in artifacts[:SHOWN]]
    return lines + ([f"  and {len(artifacts) - SHOWN} more"] if len(artifacts) > SHOWN else [])


def made_from(run: Run, targets: Sequence[Step], every: Iterable[Step]) -> list[tuple[str, float | None]]:
    """The artifacts made from the targets, directly or not, and the seconds that each took; ``every`` is in order."""
    root = store.absolute(run.store_url).rstrip("/")
    # Places in the store, not URLs: a store may have been moved since its manifests were written.
    places: list[str] = []
    found: list[tuple[str, float | None]] = []
    for step in every:
        if step in targets:
            places.append(step.slot.removeprefix(root))
        if step in targets or not places:
            continue
        generation = current_generation(step.slot)
        manifest = _newest(step.slot, generation)
        if not any(source.url.endswith(tuple(places)) for source in _sources(step, manifest)):
            continue
        places.append(step.slot.removeprefix(root))
        # An ended generation will be made anyway; it is on the list only as a link to what was made from it.
        if is_committed(step.slot, generation):
            found.append((step.name, seconds_of(manifest)))
    return found


def seconds_of(manifest: Manifest | None) -> float | None:
    """What an artifact took; None if nobody knows."""
    seconds = manifest.summary.get("seconds") if manifest else None
    return float(seconds) if isinstance(seconds, int | float) else None


def _newest(slot: str, generation: int) -> Manifest | None:
    """The last manifest up to a generation that can be read: what an ended one was made from tells its successor's."""
    for number in range(generation, 0, -1):
        try:
            manifest = read_manifest(slot, number)
        except ArtifactError:
            continue
        if manifest is not None:
            return manifest
    return None


def _sources(step: Step, manifest: Manifest | None) -> list[Input]:
    """The recorded inputs; where no manifest can be read, those it would be asked with now."""
    inputs = {} if manifest is None else manifest.inputs
    if manifest is None and has_begun(step.slot):
        try:
            inputs = step.request().inputs
        except ArtifactError:
            return []
    return [source for some in inputs.values() for source in some]
