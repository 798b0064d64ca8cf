"""Bring a run's exported weights to where they are wanted, laid out as cosmos-rl lays them out."""

import secrets
import shutil
from pathlib import Path

from cosmos_rl_core.errors import ConfigError
from flows.requests import Run
from flows.status import states
from flows.steps import open_run
from stages.artifacts import Artifact, input_of, standing

PIPELINE = "pipeline/"
"""Where an artifact keeps a whole pipeline, which lies at the top of what is exported."""


def export(store_url: str, run_id: str, output_dir: str) -> list[str]:
    """Copy the newest export that stands, every byte checked; returns what to tell people.

    To ``safetensors/step_<N>/lora/`` below ``output_dir``, or a whole pipeline to ``safetensors/step_<N>/``, after N
    optimizer steps. Raises :class:`ConfigError` if there is no export, or something else in its place.
    """
    run = open_run(store_url, run_id)
    exports = [state for state in states(run) if state.step.stage == "export"]
    found = [state for state in exports if state.word == "stands"]
    if not found:
        raise ConfigError(
            f"{run_id} has exported nothing that stands; run it, or look at `cosmos-flows status {run_id}`"
        )
    newest = found[-1].step
    k = newest.k or 0
    target = Path(output_dir, "safetensors", f"step_{optimizer_steps(run, k)}")
    count = _copy(Artifact(input_of(newest.slot)), target)
    passed_over = [f"{state.step.name} is {state.word}" for state in exports if (state.step.k or 0) > k]
    return [f"policy {k} of {run_id}: {count} files in {target}", *passed_over]


def optimizer_steps(run: Run, k: int) -> int:
    """How many optimizer steps policy version k has had."""
    manifest = None if k == 0 else standing(run.policy_after(k))[1]
    return 0 if manifest is None else manifest.config["steps"]["first_step"] + len(manifest.config["steps"]["lrs"])


def _copy(artifact: Artifact, target: Path) -> int:
    """Put all files there, or none: whoever sees the directory sees it whole. Returns their number."""
    files = {name.removeprefix(PIPELINE): name for name in artifact.names()}
    if target.exists():
        there = {str(path.relative_to(target)): path for path in target.rglob("*") if path.is_file()}
        if there.keys() == files.keys() and all(there[n].read_bytes() == artifact.read(files[n]) for n in files):
            return len(files)
        raise ConfigError(f"{target} exists and holds something else; name another directory, or remove it")
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        for path, name in files.items():
            (partial / path).parent.mkdir(parents=True, exist_ok=True)
            (partial / path).write_bytes(artifact.read(name))
        partial.rename(target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}; name another directory") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return len(files)
