"""One stage of a run, as a Prefect flow: ``prefect deployment run stage/run``."""

import importlib
from collections.abc import Sequence
from typing import Annotated

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field

from cosmos_rl_core.errors import ArtifactError, ConfigError, mistakes_in
from cosmos_rl_core.recipes.reading import launch_of
from cosmos_rl_core.storage.store import join, size
from flows.defaults import store_of
from flows.devices.fitting import misfits_of
from flows.library import open_run
from flows.operations.rerun import rerun
from flows.planning.base import AnyRun
from flows.planning.steps import Step, find, read_run
from flows.post_train import steps
from flows.running import events, gpus
from flows.running.launch import launch
from flows.session.session import Place, RunId, ends_in_state, working_on
from flows.warning.gate import pass_gate
from stages.artifacts.generations import has_begun
from stages.artifacts.slots import current_of
from stages.execution.runner import require_own_version
from stages.reporting.contracts import Report


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
    store: Place | None = None,
    cluster: Place | None = None,
    allow_numerics_change: bool = False,
    accept_scorer: bool = False,
) -> str:
    """Make one stage of an existing run, unless it is finished and up to date.

    Args:
        run_id: Name of the run.
        stage: Name in `cosmos-flows status`: rollout, reward-ocr, update, export, report ...; or decode, for the
            samples that a rollout did not decode.
        iteration: Number of the iteration, from 0; for an export or an evaluation the policy version. Leave empty for
            stages that a run has once.
        force: Make the stage again although it is current. If its bytes change, the next run of the recipe makes
            everything that depends on them again.
        store: Directory or URL (s3://bucket/prefix) of all runs. Default: COSMOS_FLOWS_STORE where the flow runs, else
            outputs.
        cluster: Path of a cluster profile (TOML). Default: the profile of the run's plan.
        allow_numerics_change: Continue with other package versions, threads or devices than the run began with.
        accept_scorer: Score samples without scores by another scorer of a reward service than the run began with.
    """
    store = store_of(store)
    opened = read_run(store, run_id)
    every = steps(opened, undecoded=stage == "decode")
    step = find(every, run_id, stage, iteration)
    _require_order(opened, every, step)
    config = launch_of(cluster) if cluster else opened.recipe.launch
    if wrong := misfits_of(config, [step.kind], gpus.gpu_slots, runs_here=True):
        raise mistakes_in(cluster or f"launch settings of {run_id}", wrong)
    accepted = {"allow_numerics_change": allow_numerics_change, "accept_scorer": accept_scorer}
    with working_on(opened, config, **accepted) as waves:
        if force and has_begun(step.slot):
            require_own_version(step.request())
            for line in rerun(store, run_id, stage, iteration).lines():
                waves.display.note(line)
        warnings = [one for one in every if step.kind == "update" and (one.kind, one.k) == ("warn", step.k)]
        for warning in warnings:
            pass_gate(opened, launch(waves, warning.name, warning.request()), waves.display.note)
        events.policies_committed(opened, waves.begun, launch(waves, step.name, step.request()))
        # Imported here because it needs pandas, and Prefect imports this file again to cancel a flow run.
        importlib.import_module("flows.session.recording").record(opened, waves.display.note)
    return "; ".join([f"{step.name} is made", *_renew_page(run_id, store)])


def _renew_page(run_id: str, store_url: str) -> list[str]:
    """Write the page of the run again, if it has one. Return the error if damaged artifacts prevent that, else none."""
    opened = open_run(run_id, store_url)
    if size(join(opened.run.slots.report, Report.PAGE)) is None:
        return []
    try:
        importlib.import_module("flows.reporting.report").write_report(opened)
    except ArtifactError as error:
        return [str(error)]
    return []


def _require_order(run: AnyRun, every: Sequence[Step], step: Step) -> None:
    """Raise :class:`ConfigError` if a stage of an earlier wave was never made.

    Heads and metrics record artifacts in the order of the waves. An audit reports a gap in them as a loss.
    """
    for before in every:
        if before.wave == step.wave:
            return
        if before.slot.startswith(f"{run.url}/") and current_of(before.slot) == (1, None):
            raise ConfigError(
                f"{step.name} comes after {before.name}, which was not made yet; make that first, or continue the run"
            )
