"""Make one stage of one iteration again."""

from cosmos_rl_core.errors import ConfigError
from flows.plan import read_plan
from flows.requests import Run
from flows.status import stages_of
from stages.artifacts import invalidate, standing


def rerun(store_url: str, run_id: str, iteration: int, stage: str) -> list[str]:
    """Invalidate the stage's standing artifact; returns what to tell people.

    Raises :class:`ConfigError` if there is none.
    """
    run = Run(read_plan(store_url, run_id), store_url)
    stages = stages_of(run)
    if stage not in stages:
        raise ConfigError(f"unknown stage {stage!r}; known: {', '.join(stages)}")
    slot = run.iteration(iteration, stage)
    generation, manifest = standing(slot)
    if manifest is None:
        raise ConfigError(f"{stage} of iteration {iteration} of {run_id} has no artifact that stands; just run it")
    below = _below(run, iteration, stages.index(stage))
    seconds = sum(seconds for _, seconds in below)
    lines = [f"stale if {stage} comes out differently: {len(below)} artifacts, {seconds:.0f} s to make again"]
    lines += [f"  {name}" for name, _ in below[:20]] + (["  ..."] if len(below) > 20 else [])
    invalidate(slot, generation, "asked for by `cosmos-flows rerun`")
    return [*lines, f"invalidated generation {generation} of {slot}; run the recipe again to make it"]


def _below(run: Run, iteration: int, place: int) -> list[tuple[str, float]]:
    """Standing artifacts after a stage, with what they took. Rewards beside each other do not depend on one another."""
    stages = stages_of(run)
    found: list[tuple[str, float]] = []
    k = iteration
    while True:
        first = place if k == iteration else -1
        names = [
            s for i, s in enumerate(stages) if i > first and not (k == iteration and _side_by_side(stages[first], s))
        ]
        manifests = [(name, standing(run.iteration(k, name))[1]) for name in names]
        if k > iteration and not any(manifest for _, manifest in manifests):
            return found
        found += [
            (f"iteration-{k:04d}/{n}", float(m.summary.get("seconds") or 0)) for n, m in manifests if m is not None
        ]
        k += 1


def _side_by_side(stage: str, other: str) -> bool:
    return stage.startswith("reward-") and other.startswith("reward-")
