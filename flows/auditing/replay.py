"""A stage of a run, made again in a scratch place from the same inputs, and compared with its artifact."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from cosmos_rl_core.canonical import differences
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.storage import store
from flows.auditing import differing
from flows.auditing.differing import Difference
from flows.library.opened_run import OpenedRun
from flows.planning.steps import find, read_run
from flows.running.display import Display
from flows.running.wave import Waves
from flows.terminal.commands import about
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.files import read_entry
from stages.artifacts.manifest import Manifest
from stages.artifacts.pool import PICTURES
from stages.artifacts.records import Layout, place_of, store_of
from stages.artifacts.request import Request
from stages.artifacts.slots import current_manifest, current_of, input_of
from stages.contracts import RECORDS
from stages.formats.references import Pictures
from stages.formats.samples import all_rows, num_units
from stages.formats.tables import read_table

SAMPLE_TABLES = (contracts.Reward.SCORES, contracts.Update.ADVANTAGES)
"""Tables with one row for each sample."""
SHOWN = 20
"""Differences that are listed one by one."""


@dataclass(frozen=True)
class Replay:
    """Outcome of a stage that was made again, compared with its artifact."""

    name: str
    """The step: ``iteration-0003/update``."""
    numerics: list[str]
    """How the numerics differ; empty if they are equal, and then all bits must be."""
    files: int
    """Number of files that were compared."""
    gone: list[str]
    """Files of the artifact that retention deleted. They were made again, and compared by digest alone."""
    found: list[Difference] = field(default_factory=list[Difference])

    @property
    def equal(self) -> bool:
        """Return whether nothing differs, or all differences are within the tolerances of other numerics."""
        return all(one.tolerated and self.numerics for one in self.found)

    def lines(self) -> Iterator[str]:
        """Yield the lines to print."""
        if self.numerics:
            tolerances = (
                f"{differing.RELATIVE:g} of a tensor's largest number, {differing.LEVELS:g} levels of a picture"
            )
            yield f"made under other numerics ({', '.join(self.numerics)}): compared within {tolerances}"
        for one in self.found[:SHOWN]:
            tolerated = " (tolerated)" if one.tolerated and self.numerics else ""
            yield f"{one.file}{f' {one.sample}' * bool(one.sample)}: {one.what}{tolerated}"
        if (more := len(self.found) - SHOWN) > 0:
            yield f"and {more} more differences; --json lists all"
        compared = f"{self.files} files" + f", {len(self.gone)} of them deleted by retention" * bool(self.gone)
        if not self.found:
            yield f"{self.name}: equal bit for bit, {compared}"
        else:
            yield f"{self.name}: {'equal within tolerances' if self.equal else 'DIFFERENT'}, {compared}"

    def as_json(self) -> dict[str, Any]:
        """Return all fields as JSON, for scripts."""
        found = [vars(one) for one in self.found]
        return {"step": self.name, "equal": self.equal, "numerics": self.numerics, "files": self.files} | {
            "gone": self.gone,
            "differences": found,
        }


def replay(
    store_url: str,
    run_id: str,
    stage: str,
    iteration: int | None,
    *,
    launch: LaunchConfig | None = None,
    samples: Sequence[str] = (),
) -> Replay:
    """Make a stage again and compare all of it, or some samples of it. The run's own files are only read.

    ``launch`` replaces the run's launch settings. Raises :class:`ConfigError` if there is no such stage or sample,
    :class:`ArtifactError` if it has no current artifact, and :class:`StageError` if the stage fails.
    """
    opened = OpenedRun(read_run(store_url, run_id))
    run = opened.run
    step = find(opened.steps, run_id, stage, iteration)
    _, made = current_of(step.slot)
    if made is None:
        shows = f"`{about(store_url, 'status', run_id)}` shows which stages are current"
        raise ConfigError(f"{step.name} has no artifact; {shows}")
    request = step.request()
    _check_samples(made, samples)
    if (reason := made.why_not(request)) is not None:
        raise ArtifactError(f"{step.name} is not current: {reason}; only what is current can be replayed")
    with tempfile.TemporaryDirectory(prefix="cosmos-replay-") as folder:
        scratch = store.join(folder, place_of(step.slot))
        _copy_layout(made, scratch)
        _copy_pictures(request, scratch)
        again = _make(request.model_copy(update={"slot": scratch}), folder, launch or run.recipe.launch)
        numerics = differences(made.numerics, again.numerics)
        artifact, compared = Artifact(input_of(made.slot)), _names(made)
        gone = [name for name in compared if artifact.lacks(name.partition("/")[0])]
        found = [one for one in _differences(made, again, {*gone}) if not samples or one.sample in samples]
    return Replay(step.name, numerics, len(compared), gone, found)


def _check_samples(made: Manifest, samples: Sequence[str]) -> None:
    """Raise :class:`ConfigError` for samples that the artifact does not have."""
    if not samples:
        return
    artifact = Artifact(input_of(made.slot))
    if num_units(artifact):
        known = [str(row["sample_id"]) for row in all_rows(artifact)]
    else:
        table = next((name for name in artifact.names() if name in SAMPLE_TABLES), None)
        known = [] if table is None else read_table(artifact, table)["sample_id"].tolist()
    if unknown := [one for one in samples if one not in known]:
        shown = f"it has {len(known)}, such as {', '.join(known[:3])}" if known else "it has none"
        raise ConfigError(f"{made.stage} has no sample {', '.join(unknown)}; {shown}")


def _copy_layout(made: Manifest, scratch: str) -> None:
    """Copy the artifact's layout to the scratch slot: how work is divided decides the last bits of its results."""
    layout = Layout.read(made.slot, made.generation)
    if layout is not None:
        copy = layout.model_copy(update={"place": place_of(scratch), "generation": 1})
        store.put_if_absent(Layout.url(scratch, 1), copy.sealed())


def _copy_pictures(request: Request, scratch: str) -> None:
    """Copy the references of a Request's prompts, unless it has inputs, in whose store a stage looks for them."""
    if request.home != request.slot:
        return
    pictures, pool = Pictures(request.slot), store.join(store_of(scratch), "dataset", PICTURES)
    for prompt in getattr(request.config, "prompts", ()):
        for one in prompt.references:
            store.write(store.join(pool, one.digest), pictures.data(one.digest))


def _make(request: Request, folder: str, launch: LaunchConfig) -> Manifest:
    with Display() as display, closing(Waves(store.join(folder, "run"), launch, display)) as waves:
        waves.make("replay", [request])
    manifest = current_manifest(request)
    assert manifest is not None, "a wave without an error has made its artifacts"
    return manifest


def _names(manifest: Manifest) -> list[str]:
    return [name for name in manifest.files if not name.startswith(RECORDS)]


def _differences(made: Manifest, again: Manifest, gone: set[str]) -> Iterator[Difference]:
    for name in sorted({*_names(made), *_names(again)}):
        if name not in made.files or name not in again.files:
            yield Difference(name, "", f"only in the {'replay' if name in again.files else 'artifact'}")
        elif made.files[name].sha256 == again.files[name].sha256:
            continue
        elif name in gone:
            yield Difference(name, "", "other bytes than the deleted file had")
        else:
            old, new = (read_entry(one.slot, one.files[name]) for one in (made, again))
            yield from differing.of_files(name, old, new)
