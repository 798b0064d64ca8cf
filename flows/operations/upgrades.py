"""Continue a run whose artifacts were made by other stage versions than this code's."""

from dataclasses import replace

from cosmos_rl_core.errors import ConfigError
from flows.operations.rerun import Made, listed, made_from
from flows.planning.base import AnyRun
from flows.planning.plan import read_plan
from flows.planning.steps import Step
from flows.planning.versions import best_by_of, go_on_with
from flows.post_train import steps
from flows.terminal.commands import about
from stages.artifacts.manifest import Manifest, seconds_of
from stages.artifacts.slots import current_of
from stages.registry import STAGES


def settled(run: AnyRun, *, remake: bool) -> AnyRun:
    """Record the stage versions of this code, early warning and ranking for the run; return the run with them.

    Artifacts of other stage versions are stale from then on. Without ``remake``, raises :class:`ConfigError` with the
    cost if there are any: newer code alone never makes a finished artifact stale.
    """
    ours = {name: stage.version for name, stage in STAGES.items()}
    recorded = read_plan(run.store_url, run.plan.run_id)
    warning, best_by = run.plan.early_warning, best_by_of(run.recipe)
    same = recorded.early_warning == warning and best_by_of(recorded.recipe) == best_by
    if recorded.stage_versions == ours and same:
        return run
    every = steps(run)
    manifests = ((step, _of_another_version(step)) for step in every)
    other = [(step, manifest) for step, manifest in manifests if manifest is not None]
    if other and not remake:
        raise ConfigError(_refusal(run, every, other))
    go_on_with(run.url, run.plan.run_id, ours, warning, best_by)
    versions = read_plan(run.store_url, run.plan.run_id).stage_versions
    return replace(run, plan=run.plan.model_copy(update={"stage_versions": versions}))


def _of_another_version(step: Step) -> Manifest | None:
    """Return the current manifest if this code has another version of its stage, else None."""
    _, manifest = current_of(step.slot)
    if manifest is None or manifest.stage not in STAGES:
        return None
    return manifest if manifest.version != STAGES[manifest.stage].version else None


def _refusal(run: AnyRun, every: list[Step], other: list[tuple[Step, Manifest]]) -> str:
    first, _ = other[0]
    which = ["--stage", first.stage, *([] if first.k is None else ["--iteration", str(first.k)])]
    changes = {m.stage: f"{m.stage} {m.version} -> {STAGES[m.stage].version}" for _, m in other}
    again = [Made(step.name, seconds_of(manifest)) for step, manifest in other]
    below = made_from(run, [step for step, _ in other], every)
    return "\n".join(
        [
            f"run {run.plan.run_id} has artifacts of other stage versions than this code has: "
            f"{', '.join(changes.values())}",
            *listed("of another version", again),
            *listed("stale if those come out differently", below),
            "nothing was changed; continue with the code that made them, make all again with --remake, or end single "
            f"ones, such as the first with `{about(run.store_url, 'rerun', run.plan.run_id, *which)}`",
        ]
    )
