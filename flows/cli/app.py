"""Plan, run, watch and repeat post-training.

Exit codes:
0 success
64 wrong settings or command line
65 wrong data
70 another failure
75 something does not answer or is busy: try the same command later
76 at its limit of device hours: train.max_gpu_hours
77 suspended by a warning, until `cosmos-flows approve`
130, 143 ended by Ctrl-C, by SIGTERM or `stop`: the same command continues
"""

import sys
import traceback
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import typer
from typer import Argument, Option

from cosmos_rl_core.errors import ArtifactError, ConfigError, CosmosRLError, StageError, counted
from flows.cli.approve import approve
from flows.cli.command import (
    DATA,
    KEEP,
    LOOK,
    MAKE,
    PROGRAM,
    ClusterOption,
    JsonOption,
    OwnExitCode,
    StoreOption,
    accept_all_characters,
    command,
    console,
    print_json,
    print_parts,
    say,
    store_named_by,
)
from flows.cli.cost import cost_app
from flows.cli.data import data_app
from flows.cli.imports import imports_app
from flows.cli.infra import infra_app
from flows.cli.proof import proof_app
from flows.cli.report import report_app
from flows.cli.rewards import rewards_app, score_app
from flows.cli.runs import runs_app, show_runs
from flows.defaults import DEFAULT_STORE, GRACE_H

# Commands import what they need when they run: all imports together take seconds, and help and completion need none.

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(infra_app, name="infra", rich_help_panel=KEEP)
app.add_typer(data_app, name="data", rich_help_panel=DATA)
app.add_typer(rewards_app, name="reward-service", rich_help_panel=DATA)
for group in (proof_app, report_app, cost_app, runs_app, imports_app, score_app):
    app.add_typer(group)
RecipeArgument = Annotated[str, Argument(help="TOML: a path, package:tiny/nft, or one of cosmos-rl")]
RunIdOption = Annotated[str | None, Option(help="Name of the run; default: from the recipe")]
IterationsOption = Annotated[int | None, Option(min=1, help="Iterations; default: the recipe's number")]
SET = Option("--set", help="Change a setting: section.key=value; may be repeated")
OverridesOption = Annotated[list[str] | None, SET]
DryRunOption = Annotated[bool, Option(help="Print what would happen; change nothing")]
RunArgument = Annotated[str, Argument(help="Id of the run")]
WATCH = Option("--watch/--no-watch", help="Follow a run; exit with 70 if a stage does not stand")
STAGE = (
    "policy embed encode embed-held-out encode-held-out rollout reward-NAME update finetune export "
    "validate evaluate evaluate-NAME report, or another name that status shows"
)
ITERATION = "Number of the iteration, from 0; for export and evaluate the policy version"
OLDER_THAN = Option(min=0, help="Hours: keep files of attempts that wrote since then")


def _print_version(asked: bool) -> None:
    if asked:
        say(f"{PROGRAM} {import_module('importlib.metadata').version('cosmos-rl-flows')}")
        raise typer.Exit


VERSION = Option("--version", callback=_print_version, is_eager=True, help="Print the version")


@app.callback(help=__doc__)
def options(
    version: Annotated[bool, VERSION] = False,
) -> None:
    """Accept ``--version``, the only option without a command."""


@command(app, panel=MAKE)
def run(
    recipe: RecipeArgument,
    store: StoreOption = DEFAULT_STORE,
    run_id: RunIdOption = None,
    iterations: IterationsOption = None,
    overrides: OverridesOption = None,
    cluster: ClusterOption = None,
    allow_numerics_change: Annotated[bool, Option(help="Accept other versions or devices")] = False,
    remake: Annotated[bool, Option(help="Make artifacts of changed stages again")] = False,
    accept_scorer: Annotated[bool, Option(help="Score the rest with a service's other scorer")] = False,
) -> None:
    """Run a recipe to the end; the same command continues after an interruption.

    Examples:
        cosmos-flows run configs/tiny/nft.toml
        cosmos-flows run configs/tiny/nft.toml --set train.seed=1 --set rollout.n_generation=8
        cosmos-flows run configs/ddrl/2b.toml --store s3://bucket/prefix --cluster deployments/clusters/eight-gpus.toml
    """
    plan = _plan_of(recipe, store, run_id, iterations, overrides or (), cluster)
    algorithm = plan.recipe.train.train_policy.type
    options = (iterations, overrides, cluster, allow_numerics_change, remake, accept_scorer)
    tags = import_module("flows.running.tags").tags_of(algorithm, plan.model.adapter)
    with import_module("flows.running.server").prefect_server():
        # Prefect reads its settings when it is imported.
        session = import_module("flows.session.session")
        flow = session.flow_of(algorithm, session.described(plan), algorithm)
        suspension = import_module("prefect.exceptions").Pause
        try:
            with import_module("prefect").tags(*tags):
                flow(recipe, store, plan.run_id, *options)
        except suspension as suspended:
            message = f"suspended in Prefect; the same command continues {plan.run_id}"
            raise StageError.of("busy", message) from suspended
        except KeyboardInterrupt:
            say(f"stopped; the same command continues {plan.run_id}", err=True)
            raise


@command(app, panel=DATA)
def preprocess(
    dataset: Annotated[str, Argument(help="TOML file of a dataset")],
    store: StoreOption = DEFAULT_STORE,
    overrides: OverridesOption = None,
    cluster: ClusterOption = None,
    verify: Annotated[bool, Option(help="Read all files, those too that look unchanged")] = False,
    merge: Annotated[bool, Option(help="Read all files and make one part of all items")] = False,
) -> None:
    """Bring a dataset up to date with its files: index what is new, write the next snapshot.

    Examples:
        cosmos-flows preprocess configs/data/local.toml
        cosmos-flows preprocess configs/data/local.toml --set sources.mine.local_dir=clips --store s3://bucket/prefix
        cosmos-flows preprocess configs/data/local.toml --verify
    """
    operation = import_module("flows.operations.preprocess")

    def misfits(config: Any) -> list[str]:
        return _misfits(config.launch, operation.stages_of(config), runs_here=True)

    read_dataset = import_module("cosmos_rl_core.recipes.dataset").read_dataset
    config = read_dataset(dataset, tuple(overrides or ()), cluster, misfits)
    # Without Prefect, whose server takes longer to start than 10,000 files take to be looked at.
    asked = verify or merge
    if not asked and (head := operation.unchanged(config, store)) is not None and not operation.missing(config, store):
        say(operation.described(head, None))
        return
    with import_module("flows.running.server").prefect_server():
        flow = import_module("flows.preprocess").preprocess
        flow(dataset, store, overrides, cluster, verify, merge)


@command(app, panel=MAKE)
def plan(
    context: typer.Context,
    recipe: RecipeArgument,
    store: StoreOption = DEFAULT_STORE,
    run_id: RunIdOption = None,
    iterations: IterationsOption = None,
    overrides: OverridesOption = None,
    cluster: ClusterOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a recipe and show what a run would do, with its sizes, its memory and an estimate of its time.

    All mistakes are reported at once. Nothing is started or written. Only config files of the base model are needed.

    Examples:
        cosmos-flows plan configs/tiny/nft.toml
        cosmos-flows plan configs/tiny/nft.toml --set rollout.n_generation=8
        cosmos-flows plan configs/tiny/nft.toml --json
    """
    asked = (recipe, store, run_id, iterations, overrides or (), cluster)
    planned = _plan_of(*asked, without_weights=True)
    import_module("flows.planning.steps").require_same_as_written(planned, store)
    describe = import_module("flows.describing.describe")
    named_by, slots = store_named_by(context), slots_of(planned.recipe.launch, required=False)
    if as_json:
        print_json(describe.as_json(planned, store, slots=slots) | {"store_from": named_by})
    else:
        print_parts(*describe.described(planned, store, f" (store from {named_by})", slots=slots))


@command(app, panel=LOOK)
def status(
    run_id: Annotated[str | None, Argument(help="Id of the run; default: list all")] = None,
    store: StoreOption = DEFAULT_STORE,
    watch: Annotated[bool | None, WATCH] = None,
    as_json: JsonOption = False,
) -> None:
    """Show every stage of a run: whether it stands and why not, attempts, seconds, reward.

    On a terminal, the command follows a running run. Without an id, it lists the runs of the store. Exit with 65 if
    something is damaged.

    Examples:
        cosmos-flows status
        cosmos-flows status nft-1a2b3c4d --store s3://bucket/prefix --watch
        cosmos-flows status nft-1a2b3c4d --json
    """
    if as_json and watch:
        raise ConfigError("--json shows one moment: use it without --watch")
    if run_id is None:
        if watch:
            raise ConfigError("--watch follows one run: add its id")
        show_runs(store, as_json=as_json)
        return
    table = import_module("flows.watching.status_table")
    open_run = import_module("flows.library").open_run
    terminal = console()
    follows = not as_json and (terminal.is_terminal if watch is None else watch)
    overview = table.watch(store, run_id, terminal) if follows else open_run(run_id, store).now()
    if as_json:
        print_json(overview.as_json())
    elif not follows:
        table.show(overview, terminal)
    if overview.damage:
        audit = import_module("flows.terminal.commands").about(store, "audit", run_id)
        raise ArtifactError(f"{overview.damage}; `{audit}` lists every wrong byte")
    if watch and (left := len(overview.states) - overview.standing):
        raise StageError(f"{run_id} is not complete: {counted(left, 'stage')} left to make")


@command(app, panel=MAKE)
def rerun(
    run_id: RunArgument,
    stage: Annotated[str, Option(help=STAGE)],
    iteration: Annotated[int | None, Option(min=0, help=ITERATION)] = None,
    store: StoreOption = DEFAULT_STORE,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Invalidate one stage, finished or not, so that the next run makes it again. No file is deleted.

    Examples:
        cosmos-flows rerun nft-1a2b3c4d --stage reward-ocr --iteration 7
        cosmos-flows rerun nft-1a2b3c4d --stage evaluate --iteration 16 --dry-run
        cosmos-flows rerun nft-1a2b3c4d --stage report
    """
    make_again = import_module("flows.operations.rerun").rerun
    found = make_again(store, run_id, stage, iteration, dry_run=dry_run)
    print_json(found) if as_json else print_parts(*found.lines())


command(app, panel=MAKE)(approve)


@command(app, panel=LOOK)
def export(
    run_id: RunArgument,
    directory: Annotated[str, Argument(help="Directory for the files")],
    store: StoreOption = DEFAULT_STORE,
    policy: Annotated[int | None, Option(min=0, help="Policy version; default: the newest that was exported")] = None,
    best: Annotated[bool, Option("--best", help="The best by validation.best_by of the recipe")] = False,
    every: Annotated[bool, Option("--all", help="Every exported version")] = False,
) -> None:
    """Copy a run's newest exported weights, or those of other versions, to a directory that diffusers can load.

    Examples:
        cosmos-flows export nft-1a2b3c4d out
        cosmos-flows export nft-1a2b3c4d out --best
        cosmos-flows export nft-1a2b3c4d out --policy 8
    """
    if (policy is not None) + best + every > 1:
        raise ConfigError("--policy, --best and --all exclude each other: give one of them")
    which = policy if policy is not None else "best" if best else "all" if every else "newest"
    print_parts(*import_module("flows.library.exports").export(store, run_id, directory, which))


@command(app, panel=KEEP)
def schema(
    recipe: Annotated[str | None, Argument(help="A recipe with plugins to include")] = None,
) -> None:
    """Print the JSON Schema of recipes, for completion and checks in editors.

    Examples:
        cosmos-flows schema
        cosmos-flows schema my_recipe.toml
    """
    print_json(import_module("cosmos_rl_core.recipes.schema").recipe_schema(recipe))


@command(app, panel=KEEP)
def gc(
    run_id: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    superseded: Annotated[bool, Option(help="Also delete files of ended generations")] = False,
    older_than: Annotated[float, OLDER_THAN] = GRACE_H,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete files of killed attempts that belong to no artifact. Refused while a process works on the run.

    Works on a full disk. Also deletes folders of killed flows in this machine's TMPDIR.

    Examples:
        cosmos-flows gc nft-1a2b3c4d --dry-run
        cosmos-flows gc nft-1a2b3c4d --superseded
        cosmos-flows gc nft-1a2b3c4d --dry-run --json
    """
    collect = import_module("flows.garbage.run").gc
    found = collect(store, run_id, superseded=superseded, dry_run=dry_run, older_than_h=older_than)
    print_json(found) if as_json else print_parts(*found.lines())


@command(app, panel=KEEP)
def shipped(
    name: Annotated[str | None, Argument(help="A name of the list: print its path")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the recipes, cluster profiles, pipelines and deployments inside the package.

    `package:NAME` stands for one wherever a path is expected.

    Examples:
        cosmos-flows shipped
        cosmos-flows shipped tiny/nft
        cosmos-flows shipped --json
    """
    found = import_module("cosmos_rl_core.shipped").listed(name)
    lines = (row["path"] if name else "{kind:16} {name:22} {path}".format_map(row) for row in found)
    print_json(found) if as_json else print_parts(*lines)


def _plan_of(recipe: str, *others: Any, without_weights: bool = False) -> Any:
    """Return the plan for a recipe and the other settings of a run, in their order.

    Prints a note on stderr if the recipe was translated from cosmos-rl.
    """
    if (line := import_module("flows.operations.import_recipe").note(recipe)) is not None:
        say(line, err=True)
    plan, misfits = import_module("flows.planning.plan"), partial(_misfits, runs_here=not without_weights)
    return plan.plan_of(plan.Settings(recipe, *others), without_weights=without_weights, misfits=misfits)


def _misfits(launch: Any, stages: Any, *, runs_here: bool) -> list[str]:
    """Return a message for each mistake by which stages do not fit the devices."""
    fitting = import_module("flows.devices.fitting")
    return fitting.misfits_of(launch, stages, partial(slots_of, required=runs_here), runs_here=runs_here)


def slots_of(launch: Any, *, required: bool) -> int | None:
    """Return the slots of the limit of a profile; None without one, and if nobody tells.

    Raises :class:`ConfigError` if a server is named that has no such limit, which a run requires and a plan does not.
    Imports Prefect only if a server is named.
    """
    if launch.gpu_limit is None:
        return None
    try:
        named = import_module("flows.running.server").named_server()
        return import_module("flows.running.gpus").slots(launch) if named else None
    except ConfigError:
        if required:
            raise
        return None


def main() -> None:
    """Run the command line."""
    accept_all_characters()
    try:
        app(prog_name=PROGRAM)
    except SystemExit as end:
        # Click exits with 2 for a wrong command line.
        wrong_words = end.code == 2 and not isinstance(end, OwnExitCode)
        sys.exit(ConfigError("").exit_code if wrong_words else end.code)
    except Exception:
        with suppress(OSError):
            traceback.print_exc()
        sys.exit(CosmosRLError("").exit_code)


if __name__ == "__main__":
    main()
