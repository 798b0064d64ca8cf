"""Make one stage of a run again."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cosmos_rl_core.errors import ArtifactError, ConfigError, counted
from cosmos_rl_core.storage import store
from flows.planning.base import AnyRun
from flows.planning.steps import Step, find, read_run
from flows.post_train import steps
from stages.artifacts.artifact import Artifact
from stages.artifacts.generations import current_generation, has_begun, invalidate, is_committed
from stages.artifacts.manifest import Manifest, seconds_of
from stages.artifacts.request import Input
from stages.artifacts.slots import read_manifest

SHOWN = 40
"""Largest number of artifacts that are listed one by one."""


@dataclass(frozen=True)
class Made:
    """An artifact that exists."""

    name: str
    """Name of the artifact's step: ``iteration-0003/update``."""
    seconds: float | None
    """Seconds that its stage took; None if it did not record them."""


@dataclass(frozen=True)
class Rerun:
    """The generation that a rerun ended, or would end, and the artifacts that this may make stale."""

    run: str
    name: str
    slot: str
    generation: int
    committed: bool
    """Whether the generation had an artifact."""
    dry_run: bool
    shared: bool
    """Whether other runs of the store may read the artifact too."""
    below: list[Made]
    """Artifacts made from it."""

    def lines(self) -> list[str]:
        """Return the lines to print."""
        lines = listed(f"stale if {self.name} comes out differently", self.below)
        lines = lines or [f"nothing was made from {self.name}"]
        if self.shared:
            lines.append("other runs of this store may read it too; they were not checked")
        what = f"generation {self.generation} of {self.slot}"
        if self.dry_run:
            return [*lines, f"nothing was changed; without --dry-run {what} would be ended"]
        ended = "invalidated" if self.committed else "nothing will be adopted from the unfinished"
        return [*lines, f"{ended} {what}; give its command again or retry its flow run to make it"]


def rerun(store_url: str, run_id: str, stage: str, iteration: int | None = None, *, dry_run: bool = False) -> Rerun:
    """End the generation of a stage, finished or not, so that the next run makes it again. Deletes nothing.

    ``iteration`` is the policy version for an export or an evaluation. With ``dry_run`` nothing changes.
    Raises :class:`ConfigError` if the run has no such stage, or the stage has never begun.
    """
    run = read_run(store_url, run_id)
    every = steps(run)
    step = find(every, run_id, stage, iteration)
    generation = current_generation(step.slot)
    if not has_begun(step.slot, generation):
        found = "no artifact and no unfinished one"
        raise ConfigError(f"{step.name} of {run_id} has {found}; just run it")
    _check_inputs(step)
    found = Rerun(
        run=run_id,
        name=step.name,
        slot=step.slot,
        generation=generation,
        committed=is_committed(step.slot, generation),
        dry_run=dry_run,
        shared=step.stage.startswith(("embed", "encode")),
        below=made_from(run, [step], every),
    )
    if not dry_run:
        invalidate(step.slot, generation, "asked for by `cosmos-flows rerun`")
    return found


def _check_inputs(step: Step) -> None:
    """Raise :class:`ConfigError` if the stage reads files that retention has deleted: it could not be made again."""
    for source in _inputs(step):
        artifact = Artifact(source)
        if gone := [part for part in source.parts if artifact.lacks(part)]:
            raise ConfigError(
                f"{step.name} cannot be made again: it reads {', '.join(gone)} of {source.url}, which this run deleted "
                "because newer ones exist; rerun the stage that made them first"
            )


def listed(what: str, artifacts: Sequence[Made]) -> list[str]:
    """Return lines: number and time of the artifacts, then up to ``SHOWN`` names. Empty without artifacts."""
    if not artifacts:
        return []
    total = sum(made.seconds or 0 for made in artifacts)
    lines = [f"{what}: {counted(len(artifacts), 'artifact')}, {total:.0f} s to make again"]
    for made in artifacts[:SHOWN]:
        seconds = "?" if made.seconds is None else f"{made.seconds:.0f}"
        lines.append(f"  {made.name:<28} {seconds} s")
    return lines + [f"  and {len(artifacts) - SHOWN} more"] * (len(artifacts) > SHOWN)


def made_from(run: AnyRun, targets: Sequence[Step], every: Iterable[Step]) -> list[Made]:
    """Return the artifacts made from the targets, directly or through others. ``every``: the run's steps, in order."""
    root = store.absolute(run.store_url).rstrip("/")
    # Paths in the store, not URLs: the store may have been moved since its manifests were written.
    places: list[str] = []
    found: list[Made] = []
    for step in every:
        if step in targets:
            places.append(step.slot.removeprefix(root))
        if step in targets or not places or not has_begun(step.slot):
            continue
        generation = current_generation(step.slot)
        manifest = _newest(step.slot, generation)
        if not any(source.url.endswith(tuple(places)) for source in _inputs(step, manifest)):
            continue
        places.append(step.slot.removeprefix(root))
        # An ended generation will be made again anyway; it only leads to the artifacts made from it.
        if is_committed(step.slot, generation):
            found.append(Made(step.name, seconds_of(manifest)))
    return found


def _newest(slot: str, generation: int) -> Manifest | None:
    """Return the last readable manifest up to a generation. A new generation has the inputs of the ended one."""
    for number in range(generation, 0, -1):
        try:
            if (manifest := read_manifest(slot, number)) is not None:
                return manifest
        except ArtifactError:
            continue
    return None


def _inputs(step: Step, manifest: Manifest | None = None) -> list[Input]:
    """Return the inputs of a manifest, else of the step's Request as it is now; empty if an artifact is missing."""
    try:
        made = manifest or step.request()
    except ArtifactError:
        return []
    return [source for some in made.inputs.values() for source in some]
