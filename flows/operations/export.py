"""Copy a run's exported weights to a directory, with the layout of cosmos-rl."""

import secrets
import shutil
from pathlib import Path

from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.storage.file_digests import Remembered
from flows.planning.run import Run
from flows.planning.steps import open_run
from flows.watching.status import State, states
from stages.artifacts.artifact import Artifact
from stages.artifacts.files import copy
from stages.artifacts.slots import input_of, standing

PIPELINE = "pipeline/"
"""Folder of a whole pipeline in an artifact; its files go to the top of the target."""


def export(store_url: str, run_id: str, output_dir: str) -> list[str]:
    """Copy the newest export and check every byte. Return the lines to print.

    A LoRA goes to ``safetensors/step_<N>/lora/`` below ``output_dir``, a whole pipeline to ``safetensors/step_<N>/``;
    N is the number of optimizer steps. Raises :class:`ArtifactError` if the export or one of its inputs is damaged,
    :class:`ConfigError` if nothing was exported, the newest export does not stand, or the target holds other files.
    """
    run = open_run(store_url, run_id)
    found = states(run)
    newest = _newest(found, run_id).step
    k = newest.k or 0
    target = Path(output_dir, "safetensors", f"step_{optimizer_steps(run, k)}")
    count = _copy(Artifact(input_of(newest.slot)), target)
    exports = [state.step for state in found if state.step.stage == "export"]
    to_come = [f"{step.name} was not made yet" for step in exports if (step.k or 0) > k]
    return [f"policy {k} of {run_id}: {count} files in {target}", *to_come]


def _newest(found: list[State], run_id: str) -> State:
    """Return the newest export. Raises if it does not stand; an older one is never returned instead."""
    see = f"see `cosmos-flows status {run_id}`"
    made = [state for state in found if state.step.stage == "export" and state.word != "missing"]
    if not made:
        raise ConfigError(f"{run_id} has no export yet; run it, or {see}")
    newest = made[-1]
    if newest.word == "stands":
        return newest
    name = f"{newest.step.name}, the newest export,"
    for state in found[: found.index(newest) + 1]:
        if state.word == "damaged":
            raise ArtifactError(f"{name} cannot be used: {state.step.name}: {state.why}")
    because = f" ({newest.why})" if newest.why else ""
    raise ConfigError(f"{name} is {newest.word}{because}; run the recipe again to make it, or {see}")


def optimizer_steps(run: Run, k: int) -> int:
    """Return the number of optimizer steps of policy version k."""
    manifest = None if k == 0 else standing(run.slots.policy(k))[1]
    if manifest is None:
        return 0
    return manifest.config["steps"]["first_step"] + len(manifest.config["steps"]["lrs"])


def _copy(artifact: Artifact, target: Path) -> int:
    """Copy all files to a directory that appears when it is complete. Return their number."""
    files = {name.removeprefix(PIPELINE): name for name in artifact.names()}
    if target.exists():
        present = [path for path in target.rglob("*") if path.is_file()]
        there = {str(path.relative_to(target)): Remembered(None).sha256(path) for path in present}
        if there == {path: artifact.entry(name).sha256 for path, name in files.items()}:
            return len(files)
        raise ConfigError(f"{target} exists and holds other files; remove it, or name another")
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        for path, name in files.items():
            (partial / path).parent.mkdir(parents=True, exist_ok=True)
            copy(artifact.url, artifact.entry(name), partial / path)
        partial.rename(target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}; name another") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return len(files)
