"""A fork of a run, as a Prefect flow: ``prefect deployment run fork/runs``."""

from typing import Annotated

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field

from cosmos_rl_core.config.recipe import MAX_ITERATIONS
from flows.defaults import store_of
from flows.planning.plan import ForkOf, Settings
from flows.session.session import Override, Place, RunId, ends_in_state, train


def fork_name() -> str:
    """Return the flow run's name in the UI."""
    parameters = flow_run.get_parameters()
    return str(parameters.get("run_id") or f"{parameters['run']} at {parameters['at']}")


@flow(name="fork", description="Begin a new run in the middle of another one.", flow_run_name=fork_name)
@ends_in_state
def fork(
    run: RunId,
    at: Annotated[int, Field(ge=0)],
    store: Place | None = None,
    run_id: RunId | None = None,
    iterations: Annotated[int, Field(ge=1, le=MAX_ITERATIONS)] | None = None,
    overrides: list[Override] | None = None,
    rewards: Place | None = None,
    cluster: Place | None = None,
    allow_numerics_change: bool = False,
    remake: bool = False,
    accept_scorer: bool = False,
) -> str:
    """Run a fork to its end, or continue it.

    Args:
        run: Name of the run that is forked.
        at: Policy version that the fork begins with, from 0.
        store: Directory or URL (s3://bucket/prefix) of all runs. Default: COSMOS_FLOWS_STORE where the flow runs, else
            outputs.
        run_id: Name of the fork; the same name continues the same fork. Default: from the run and the changes.
        iterations: Number of iterations, including the iterations before the fork. Default: the run's.
        overrides: Settings of the run's recipe to change, one in each line: section.key=value.
        rewards: Path of a TOML file with the rewards of the fork. Default: the rewards of the run.
        cluster: Path of a cluster profile (TOML). Default: the launch settings of the run.
        allow_numerics_change: Continue with other package versions, threads or devices than the fork began with.
        remake: Make artifacts again whose stages have changed since an earlier version of this code made them.
        accept_scorer: Score samples without scores by another scorer of a reward service than the run began with.
    """
    others = (iterations, tuple(overrides or ()), cluster, allow_numerics_change, remake, accept_scorer)
    return train(Settings("", store_of(store), run_id, *others, fork=ForkOf(run, at, rewards)))
