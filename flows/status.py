"""One table of a run: iterations down, stages across."""

import itertools

from rich.table import Table

from flows.plan import read_plan
from flows.requests import Run
from stages.artifacts import standing
from stages.manifest import Manifest


def stages_of(run: Run) -> list[str]:
    """Names of an iteration's slots, in order."""
    if not run.trains_on_rewards:
        return ["finetune"]
    return ["rollout", *(f"reward-{reward.fn.name}" for reward in run.recipe.rewards), "update"]


def table(store_url: str, run_id: str) -> Table:
    """State, number of generations, seconds and reward of every stage of a run."""
    run = Run(read_plan(store_url, run_id), store_url)
    shown = Table(title=f"{run_id} ({run.url})")
    stages = stages_of(run)
    for column in ("iteration", *stages):
        shown.add_column(column)
    for k in itertools.count():
        cells = [_cell(*standing(run.iteration(k, stage)), stage) for stage in stages]
        # The run may have gone further than its plan said when it began.
        if k >= run.recipe.train.num_iterations and all(cell == "-" for cell in cells):
            break
        shown.add_row(f"{k:04d}", *cells)
    return shown


def _cell(generation: int, manifest: Manifest | None, stage: str) -> str:
    times = f" (generation {generation})" if generation > 1 else ""
    if manifest is None:
        return f"to be made{times}" if times else "-"
    reward = manifest.summary.get(stage.removeprefix("reward-"))
    score = f" {reward:.3f}" if isinstance(reward, float) else ""
    return f"{manifest.summary.get('seconds', 0)} s{score}{times}"
