"""``cosmos-flows``: plan, run, look at and re-run post-training.

Exit codes: 0 done, 64 config or command line, 65 data, 75 unavailable, 70 other.
"""

import importlib
import json
import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.recipe import launch_of
from cosmos_rl_core.errors import ConfigError, CosmosRLError
from flows import export as export_command
from flows import gc as gc_command
from flows import import_recipe as import_command
from flows import rerun as rerun_command
from flows import status as status_command
from flows.describe import describe_memory, describe_plan
from flows.plan import DEFAULT_STORE, Settings, plan_of
from flows.server import prefect_server, server_is_named

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
Returned = TypeVar("Returned")

RecipeArgument = Annotated[str, typer.Argument(help="A TOML recipe, e.g. configs/tiny/nft.toml, or one of cosmos-rl's")]
StoreOption = Annotated[str, typer.Option(help="Directory or URL (s3://bucket/prefix) of all runs")]
RunIdOption = Annotated[str | None, typer.Option(help="Name of the run; default: from the recipe and its contents")]
IterationsOption = Annotated[int | None, typer.Option(min=1, help="How far to go, instead of the recipe's number")]
OverridesOption = Annotated[
    list[str] | None, typer.Option("--set", help="Change a setting: section.key=value; repeatable")
]
ClusterOption = Annotated[str | None, typer.Option(help="How processes are launched: a file of deployments/clusters")]
RunArgument = Annotated[str, typer.Argument(help="The run's id")]


@app.command()
def run(
    recipe: RecipeArgument,
    store: StoreOption = DEFAULT_STORE,
    run_id: RunIdOption = None,
    iterations: IterationsOption = None,
    overrides: OverridesOption = None,
    cluster: ClusterOption = None,
    allow_numerics_change: Annotated[bool, typer.Option(help="Go on under other versions, threads or devices")] = False,
) -> None:
    """Run a recipe to the end; the same command goes on where it stopped.

    Example: cosmos-flows run configs/tiny/nft.toml --set train.seed=1
    """
    _note_translation(recipe)
    settings = Settings(recipe, store, run_id, iterations, tuple(overrides or ()), cluster, allow_numerics_change)
    plan = _or_exit(lambda: plan_of(settings))
    algorithm = plan.recipe.train.train_policy.type

    def start() -> None:
        with prefect_server():
            # Prefect reads its settings when it is imported.
            flow = getattr(importlib.import_module(f"flows.{algorithm}"), algorithm)
            flow(recipe, store, plan.run_id, iterations, overrides, cluster, allow_numerics_change)

    _or_exit(start)


@app.command()
def plan(
    recipe: RecipeArgument,
    store: StoreOption = DEFAULT_STORE,
    run_id: RunIdOption = None,
    iterations: IterationsOption = None,
    overrides: OverridesOption = None,
    cluster: ClusterOption = None,
) -> None:
    """Resolve a recipe, report every mistake at once, and say what a run would do and what memory its stages need.

    Starts and writes nothing.

    Example: cosmos-flows plan configs/tiny/nft.toml --set rollout.n_generation=8
    """
    _note_translation(recipe)
    settings = Settings(recipe, store, run_id, iterations, tuple(overrides or ()), cluster)
    console, planned = Console(highlight=False, markup=False), _or_exit(lambda: plan_of(settings))
    for part in (describe_plan(planned, store), "", *describe_memory(planned.recipe)):
        console.print(part, soft_wrap=isinstance(part, str))


@app.command()
def status(run_id: RunArgument, store: StoreOption = DEFAULT_STORE) -> None:
    """Show every stage of a run: whether it stands or would be made again and why, how long it took, the reward.

    Example: cosmos-flows status nft-1a2b3c4d
    """
    console = Console(highlight=False, markup=False)
    for part in _or_exit(lambda: status_command.overview(store, run_id)):
        console.print(part, soft_wrap=isinstance(part, str))


@app.command()
def rerun(
    run_id: RunArgument,
    stage: Annotated[
        str,
        typer.Option(
            help="policy embed encode embed-held-out encode-held-out rollout reward-NAME update finetune export "
            "validate evaluate evaluate-NAME report"
        ),
    ],
    iteration: Annotated[
        int | None,
        typer.Option(min=0, help="Which iteration, from 0; for export and evaluate which policy version"),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Invalidate one stage, finished or not, so that the next run makes it again. Deletes nothing.

    Example: cosmos-flows rerun nft-1a2b3c4d --stage reward-ocr --iteration 7
    """
    for line in _or_exit(lambda: rerun_command.rerun(store, run_id, stage, iteration)):
        typer.echo(line)


@app.command()
def export(
    run_id: RunArgument,
    directory: Annotated[str, typer.Argument(help="Where to put the files")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Copy a run's newest exported weights to a directory, as diffusers loads them.

    Example: cosmos-flows export nft-1a2b3c4d lora-out
    """
    for line in _or_exit(lambda: export_command.export(store, run_id, directory)):
        typer.echo(line)


@app.command("import-recipe")
def import_recipe(
    recipe: Annotated[str, typer.Argument(help="A TOML file of cosmos-rl, of either schema")],
    output: Annotated[str | None, typer.Option(help="Where to write it as a recipe of ours; default: nowhere")] = None,
) -> None:
    """Say what every key of a file of cosmos-rl is here, and write it as a recipe of ours.

    Example: cosmos-flows import-recipe stable-diffusion-3-5-medium-nft.toml --output sd3.toml
    """
    translation = _or_exit(lambda: import_command.translation_of(recipe))
    Console(highlight=False).print(import_command.table(translation))
    typer.echo(f"\n{recipe} is {translation.summary}")
    if output is None:
        _or_exit(lambda: import_command.check(translation, recipe))
    else:
        _or_exit(lambda: import_command.write(translation, recipe, output))
        typer.echo(f"written to {output}; next: cosmos-flows plan {shlex.quote(output)}")


@app.command()
def import_weights(
    weights: Annotated[str, typer.Argument(help="A .pt file of cosmos's own code")],
    base: Annotated[str, typer.Argument(help="A diffusers pipeline of the same model")],
    directory: Annotated[str, typer.Argument(help="Where to write the pipeline with those weights; must not exist")],
) -> None:
    """Make a diffusers pipeline of Cosmos-Predict2.5 weights that cosmos's own code wrote.

    Example: cosmos-flows import-weights 81edfebe_ema_bf16.pt Cosmos-Predict2.5-2B-diffusers my-base
    """
    # In a process of its own: it needs torch, which no command imports.
    command = [sys.executable, "-m", "cosmos_rl_core.native_weights", weights, base, directory]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@app.command()
def gc(
    run_id: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    superseded: Annotated[bool, typer.Option(help="Also the files of generations that were made again")] = False,
    dry_run: Annotated[bool, typer.Option(help="Say it, delete nothing")] = False,
) -> None:
    """Delete files that killed attempts left and no artifact holds. Refused while a process works on the run.

    Example: cosmos-flows gc nft-1a2b3c4d --dry-run
    """
    for line in _or_exit(lambda: gc_command.gc(store, run_id, superseded=superseded, dry_run=dry_run)):
        typer.echo(line)


infra_app = typer.Typer(no_args_is_help=True, help="What runs stand on: Prefect's pools and limits, stores, services.")
app.add_typer(infra_app, name="infra")


@infra_app.command("init")
def infra_init(
    gpus: Annotated[int, typer.Option(min=0, help="Slots of the global concurrency limit `gpus`")] = 8,
    pool_type: Annotated[str, typer.Option(help="Where flows run: process, kubernetes, ...")] = "process",
) -> None:
    """Make the work pool, its queues, the limit for GPUs and the automation for dead flow runs. Safe to repeat.

    Example: cosmos-flows infra init --gpus 8
    """
    for line in _or_exit(lambda: _with_server("flows.pools").set_up(gpus, pool_type)):
        typer.echo(line)


@infra_app.command("check")
def infra_check(
    store: StoreOption = DEFAULT_STORE,
    cluster: ClusterOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Check server, pool, worker, GPUs, ranks, store and services. Exit code 75 if something failed.

    Example: cosmos-flows infra check --store s3://bucket/prefix
    """
    check = importlib.import_module("flows.flight_check")
    findings = check.flight_check(store, _or_exit(lambda: launch_of(cluster)) if cluster else LaunchConfig())
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings]))
    else:
        Console(highlight=False).print(check.table(findings))
    _or_exit(lambda: check.require(findings))


def _with_server(module: str) -> Any:
    """A module that asks Prefect's server. Raises :class:`ConfigError` if none is named."""
    if not server_is_named():
        raise ConfigError("no Prefect server is named: start one with `prefect server start` and set PREFECT_API_URL")
    return importlib.import_module(module)


def _note_translation(recipe: str) -> None:
    if (line := _or_exit(lambda: import_command.note(recipe))) is not None:
        typer.echo(line, err=True)


def _or_exit(action: Callable[[], Returned]) -> Returned:
    try:
        return action()
    except CosmosRLError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(error.exit_code) from error


def main() -> None:
    """The entry point."""
    try:
        app()
    except SystemExit as end:
        # Click's own code for a command line that it cannot read.
        sys.exit(ConfigError("").exit_code if end.code == 2 else end.code)
    except Exception:
        traceback.print_exc()
        sys.exit(CosmosRLError("").exit_code)


if __name__ == "__main__":
    main()
