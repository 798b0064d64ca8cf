"""A re-score of a run, as a Prefect flow: ``prefect deployment run rescore/runs``."""

from importlib import import_module
from typing import Annotated

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field

from cosmos_rl_core.errors import counted, mistakes_in
from cosmos_rl_core.recipes.reading import launch_of
from flows.defaults import store_of
from flows.devices.fitting import misfits_of
from flows.running import gpus
from flows.running.launch import launch
from flows.running.progress import Reporter
from flows.session.session import Place, RunId, check_services, ends_in_state, working_in
from stages.artifacts.slots import one_look

Iterations = Annotated[str, Field(pattern=r"^[0-9, -]+$")]


def rescore_name() -> str:
    """Return the flow run's name in the UI."""
    parameters = flow_run.get_parameters()
    return f"{parameters['run']} by {str(parameters['reward']).rpartition('/')[2]}"


@flow(name="rescore", description="Score stored samples of a run with other rewards.", flow_run_name=rescore_name)
@ends_in_state
def rescore(
    run: RunId,
    reward: Place,
    store: Place | None = None,
    iterations: Iterations | None = None,
    evaluations: bool = False,
    cluster: Place | None = None,
    allow_numerics_change: bool = False,
    accept_scorer: bool = False,
) -> str:
    """Score stored samples of a run with other rewards, or continue such a re-score. The run itself does not change.

    Args:
        run: Name of the run.
        reward: Name of a reward, or path of a TOML file with [[rewards]] as in a recipe.
        store: Directory or URL (s3://bucket/prefix) of all runs. Default: COSMOS_FLOWS_STORE where the flow runs, else
            outputs.
        iterations: Iterations whose rollouts are scored, such as 3-7,9. Default: all iterations with a rollout.
        evaluations: Score the held-out samples of every judged policy too.
        cluster: Path of a cluster profile (TOML). Default: the launch settings of the run.
        allow_numerics_change: Continue with other package versions, threads or devices than it began with.
        accept_scorer: Score samples without scores by another scorer of a reward service than it began with.
    """
    # Imported here because they need pandas, and Prefect imports this file again to cancel a flow run.
    plans, reports = import_module("flows.rescoring.plan"), import_module("flows.rescoring.report")
    wanted = plans.plan_of_rescore(store_of(store), run, reward, iterations, evaluations=evaluations)
    made, origin = wanted.rescore, wanted.rescore.run
    config = launch_of(cluster) if cluster else origin.recipe.launch
    with one_look():
        stages = [step.kind for stock in wanted.stocks for wave in made.waves(stock) for step in wave.steps]
    if wrong := misfits_of(config, list(dict.fromkeys(stages)), gpus.gpu_slots, runs_here=True):
        raise mistakes_in(cluster or f"launch settings of {run}", wrong)
    check_services(made.record.rewards)
    made.record.write(origin.url)
    accepted = {"allow_numerics_change": allow_numerics_change, "accept_scorer": accept_scorer}
    with working_in(made.url, origin.plan, config, Reporter(made.url), **accepted) as waves:
        waves.display.note(f"re-score {made.record.folder} of {run}: {made.url}")
        for stock in wanted.stocks:
            found = [*made.waves(stock)]
            if not found:
                waves.display.note(f"{stock.parent:<28} kept  {counted(len(made.record.rewards), 'reward')}")
            for wave in found:
                launch(waves, wave.name, *(step.request() for step in wave.steps))
        report = reports.write_report(wanted)
        for line in report.lines():
            waves.display.note(line)
    return report.result
