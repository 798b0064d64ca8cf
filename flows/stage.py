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
from flows.running.session import Place, RunId, ends_in_state, working_on
from stages.artifacts.generations import has_begun
from stages.execution.runner import require_own_version


def stage_name() -> str:
    """The flow run's name in the UI."""
    parameters = flow_run.get_parameters()
    iteration = parameters.get("iteration")
    return " ".join([parameters["run_id"], parameters["stage"], *([] if iteration is None else [str(iteration)])])


@flow(name="stage", description="One stage of a run, from the inputs that stand.", flow_run_name=stage_name)
@ends_in_state
def run(
    run_id: RunId,
    stage: Annotated[str, Field(min_length=1)],
    iteration: Annotated[int, Field(ge=0)] | None = None,
    force: bool = False,
    store: Place = DEFAULT_STORE,
    cluster: Place | None = None,
    allow_numerics_change: bool = False,
) -> str:
    """Make one stage of a run that exists, unless it stands already.

    Args:
        run_id: Name of the run.
        stage: As `cosmos-flows status` names it: rollout, reward-ocr, update, export, report ...
        iteration: Which iteration, from 0; for an export or an evaluation which policy version. Leave empty where a run
            has one of it.
        force: Make it again although it stands; what depends on changed bytes follows with the next run of the recipe.
        store: Directory or URL (s3://bucket/prefix) of all runs.
        cluster: Path of a TOML file that says how processes are launched. Default: as the run began.
        allow_numerics_change: Go on under other versions, threads or devices than the run began with.
    """
    opened = open_run(store, run_id)
    step = find(steps(opened), run_id, stage, iteration)
    config = launch_of(cluster) if cluster else opened.recipe.launch
    with working_on(opened, config, allow_numerics_change) as (launcher, shown):
        if force and has_begun(step.slot):
            require_own_version(step.request())
            for line in rerun(store, run_id, stage, iteration).lines():
                shown.note(line)
        launcher.launch(step.name, step.request())
    return f"{step.name} stands"
