"""Copies of a run's exported weights in a directory, with the layout of cosmos-rl."""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import ArtifactError, ConfigError, counted, unwritten
from cosmos_rl_core.exporters.comfyui import lora_file
from cosmos_rl_core.storage.file_digests import Remembered
from flows.devices.work_folders import hold, in_use
from flows.library.best import Best, best_of
from flows.library.states import State, states
from flows.planning import kinds
from flows.planning.base import AnyRun
from flows.planning.ranking import ranking_rule
from flows.planning.steps import read_run
from flows.terminal.commands import about
from stages.artifacts.artifact import Artifact
from stages.artifacts.files import copy
from stages.artifacts.slots import current_of, input_of

PIPELINE = "pipeline/"
"""Folder of a whole pipeline in an artifact; its files go to the top of the target."""
Which = int | Literal["newest", "best", "all"]
"""A policy version, or how to choose one."""
Format = Literal["diffusers", "comfyui"]
"""The program that the files are for."""


@dataclass(frozen=True)
class Copied:
    """A policy whose exported weights lie in a directory."""

    policy: int
    directory: str
    files: int
    file: str | None = None
    """The one file, if the directory may have others."""


@dataclass(frozen=True)
class Exported:
    """Weights of a run that were copied."""

    run: str
    copied: list[Copied]
    best: Best | None = None
    """The policy version that is ranked first; None unless it was asked for."""
    judged: list[int] = field(default_factory=list[int])
    """Policy versions among which ``best`` was ranked."""
    to_come: list[str] = field(default_factory=list[str])
    """Stages of later versions that were not made yet."""

    def lines(self) -> Iterator[str]:
        """Yield the lines to print."""
        if self.best is not None:
            yield f"best of {_listed(self.judged)}: {self.best}"
        for one in self.copied:
            where = one.file or f"{counted(one.files, 'file')} in {one.directory}"
            yield f"policy {one.policy} of {self.run}: {where}"
        yield from (f"{name} was not made yet" for name in self.to_come)


def export(
    store_url: str, run_id: str, output_dir: str, which: Which = "newest", form: Format = "diffusers"
) -> Exported:
    """Copy exports and check every byte.

    With the form ``comfyui`` a LoRA becomes the file ``<run>-step_<N>.safetensors`` in ``output_dir``. Otherwise it
    goes to ``safetensors/step_<N>/lora/`` below, a whole pipeline to ``safetensors/step_<N>/``;
    N is the number of optimizer steps. ``best`` is the version that ``validation.best_by`` ranks first. Raises
    :class:`ArtifactError` if an export or one of its inputs is damaged, :class:`ConfigError` if there is no such
    export, it is not current, or the target holds other files, :class:`NoSpaceError` on a full disk.
    """
    run = read_run(store_url, run_id)
    found = states(run)
    exports, made = _made(found, "export")
    if not made:
        raise ConfigError(f"{run_id} has no export yet; run it, or {_see(run)}")
    best = _best(run, found) if which == "best" else None
    wanted = list(made) if which == "all" else [_version(which, best, max(made))]
    if unknown := [k for k in wanted if k not in made]:
        raise ConfigError(
            f"{run_id} has no export of policy {unknown[0]}; exported: {_listed(made)}. To export others, run the "
            "recipe again with --set train.ckpt.export_every=N"
        )
    for k in wanted:
        name = made[k].step.name
        _check_current(run, found, made[k], f"{name}, the newest export," if which == "newest" else name)
    rule = ranking_rule(run)
    ranks = rule.stages[0] if rule is not None else ""
    copied: list[Copied] = []
    for k in wanted:
        artifact, step = Artifact(input_of(made[k].step.slot)), f"step_{optimizer_steps(run, k)}"
        if form == "comfyui":
            file = Path(output_dir, f"{run_id}-{step}.safetensors")
            _convert(run, artifact, file)
            copied.append(Copied(k, str(file.parent), 1, str(file)))
            continue
        target = Path(output_dir, "safetensors", step)
        copied.append(Copied(k, str(target), _copy(artifact, target)))
    if isinstance(which, int):
        return Exported(run_id, copied)
    every, judged = (exports, {}) if best is None else _made(found, ranks)
    to_come = [state.step.name for k, state in every.items() if k > max(made)]
    return Exported(run_id, copied, best, [*judged], to_come)


def _version(which: Which, best: Best | None, newest: int) -> int:
    if isinstance(which, int):
        return which
    return newest if best is None else best.k


def _made(found: list[State], stage: str) -> tuple[dict[int, State], dict[int, State]]:
    """Return the states of a stage by policy version: of all versions, and of the versions that were made."""
    every = {state.step.k or 0: state for state in found if state.step.stage == stage}
    return every, {k: state for k, state in every.items() if state.word != "missing"}


def _listed(known: Iterable[int]) -> str:
    return ", ".join(map(str, known))


def _see(run: AnyRun) -> str:
    return f"see `{about(run.store_url, 'status', run.plan.run_id)}`"


def _best(run: AnyRun, found: list[State]) -> Best:
    """Return the best policy version. Raises if the number of any version is not current: it could be the best."""
    run_id = run.plan.run_id
    if (rule := ranking_rule(run)) is None:
        raise ConfigError(
            f"nothing ranks the policies of {run_id}: its recipe has neither validation.data nor [[rewards]] with "
            "validation.dataset; name a policy"
        )
    for stage in rule.stages:
        for state in _made(found, stage)[1].values():
            _check_current(run, found, state, state.step.name)
    if (best := best_of(run, found)) is None:
        raise ConfigError(f"no {rule.by} of {run_id} is known; {_see(run)}")
    return best


def _check_current(run: AnyRun, found: list[State], state: State, name: str) -> None:
    """Raise if a state is not current, so that nobody takes its outdated artifact for the version."""
    if state.word == "stands":
        return
    for earlier in found[: found.index(state) + 1]:
        if earlier.word == "damaged":
            raise ArtifactError(f"{name} cannot be used: {earlier.step.name}: {earlier.why}")
    because = f" ({state.why})" if state.why else ""
    raise ConfigError(f"{name} is {state.word}{because}; run the recipe again to make it, or {_see(run)}")


def optimizer_steps(run: AnyRun, k: int) -> int:
    """Return the number of optimizer steps of policy version k."""
    manifest = None if k == 0 else current_of(run.slots.policy(k))[1]
    if manifest is None:
        return 0
    return manifest.config["steps"]["first_step"] + len(manifest.config["steps"]["lrs"])


def _convert(run: AnyRun, artifact: Artifact, target: Path) -> None:
    """Write the LoRA of an export in ComfyUI's layout, as a file that appears when it is whole."""
    if kinds.of(run.plan) is not None or (named := plugins.load("models", run.plan.model.adapter).SPEC.comfyui) is None:
        raise ConfigError(
            f"ComfyUI has no LoRA layout for this model; leave out --format to export {run.plan.run_id} for diffusers"
        )
    if "lora/model.safetensors" not in artifact.names():
        raise ConfigError(f"{run.plan.run_id} trains all weights; leave out --format, for the whole pipeline")
    settings = artifact.json("lora/adapter_config.json")
    data = lora_file(artifact.read("lora/model.safetensors"), settings, named)
    if target.exists():
        if target.read_bytes() == data:
            return
        raise ConfigError(f"{target} exists and is another file; remove it, or name another directory")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            partial.write_bytes(data)
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise unwritten(target, error) from error


def _copy(artifact: Artifact, target: Path) -> int:
    """Copy all files to a directory that appears when it is complete. Return their number."""
    files = {name.removeprefix(PIPELINE): name for name in artifact.names()}
    if target.exists():
        present = [path for path in target.rglob("*") if path.is_file()]
        there = {str(path.relative_to(target)): Remembered(None).sha256(path) for path in present}
        if there == {path: artifact.entry(name).sha256 for path, name in files.items()}:
            return len(files)
        raise ConfigError(f"{target} exists and holds other files; remove it, or name another")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _partial(target) as partial:
            for path, name in files.items():
                (partial / path).parent.mkdir(parents=True, exist_ok=True)
                copy(artifact.url, artifact.entry(name), partial / path)
            partial.rename(target)
    except OSError as error:
        raise unwritten(target, error) from error
    return len(files)


@contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """Yield a new hidden folder next to the target, and remove the folders that killed exports left."""
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    parent = os.open(target.parent, os.O_RDONLY)
    try:
        # Without locks, a killed export looks like one that still copies: then the folders stay.
        with suppress(OSError):
            fcntl.flock(parent, fcntl.LOCK_EX)
            for folder in target.parent.glob(f".{target.name}.*"):
                if not in_use(folder):
                    shutil.rmtree(folder, ignore_errors=True)
        partial.mkdir()
        mine = os.open(partial, os.O_RDONLY)
        hold(mine)
    finally:
        os.close(parent)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(mine)
