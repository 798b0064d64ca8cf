"""One stage of a run, as a Prefect flow: ``prefect deployment run stage/run``."""

from typing import Annotated

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field

from cosmos_rl_core.config.recipe import launch_of
from flows.defaults import DEFAULT_STORE
from flows.operations.rerun import rerun
from flows.planning.steps import find, open_run
from flows.post_train import steps
from flows.running.launch import launch
from flows.running.session import Place, RunId, ends_in_state, working_on
from flows.warning.gate import pass_gate
from stages.artifacts.generations import has_begun
from stages.execution.runner import require_own_version


def stage_name() -> str:
    """Return the flow run's name in the UI."""
    parameters = flow_run.get_parameters()
    words = (parameters["run_id"], parameters["stage"], parameters.get("iteration"))
    return " ".join(str(word) for word in words if word is not None)


@flow(name="stage", description="Make one stage of a run.", flow_run_name=stage_name)
@ends_in_state
def run(
    run_id: RunId,
    stage: Annotated[str, Field(min_length=1)],
    iteration: Annotated[int, Field(ge=0)] | None = None,
    force: bool = False,
    store: Place = DEFAULT_STORE,
    cluster: Place | None = None,
    allow_numerics_change: bool = False,
    accept_scorer: bool = False,
) -> str:
    """Make one stage of an existing run, unless it stands.

    Args:
        run_id: Name of the run.
        stage: Name in `cosmos-flows status`: rollout, reward-ocr, update, export, report ...
        iteration: Number of the iteration, from 0; for an export or an evaluation the policy version. Leave empty for
            stages that a run has once.
        force: Make the stage again although it stands. If its bytes change, the next run of the recipe makes what
            depends on them again.
        store: Directory or URL (s3://bucket/prefix) of all runs.
        cluster: Path of a cluster profile (TOML). Default: the profile of the run's plan.
        allow_numerics_change: Continue with other package versions, threads or devices than the run began with.
        accept_scorer: Score what has no scores with another scorer of a reward service than the run began with.
    """
    opened = open_run(store, run_id)
    every = steps(opened)
    step = find(every, run_id, stage, iteration)
    config = launch_of(cluster) if cluster else opened.recipe.launch
    accepted = {"allow_numerics_change": allow_numerics_change, "accept_scorer": accept_scorer}
    with working_on(opened, config, **accepted) as waves:
        if force and has_begun(step.slot):
            require_own_version(step.request())
            for line in rerun(store, run_id, stage, iteration).lines():
                waves.display.note(line)
        judges = [one for one in every if step.kind == "update" and (one.kind, one.k) == ("warn", step.k)]
        for judge in judges:
            pass_gate(opened, launch(waves, judge.name, judge.request()), waves.display.note)
        launch(waves, step.name, step.request())
    return f"{step.name} stands"
