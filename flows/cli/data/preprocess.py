"""The command that prepares a dataset."""

from importlib import import_module
from typing import Annotated, Any

from typer import Argument, Option

from cosmos_rl_core.recipes.dataset import DatasetConfig, read_dataset
from flows.cli.base.options import ClusterOption, JsonOption, OverridesOption, StoreOption
from flows.cli.base.planned import misfits
from flows.cli.base.printing import notes_on_stderr, print_json, say
from flows.defaults import DEFAULT_STORE
from flows.running.server import prefect_server
from stages.artifacts import snapshots


def preprocess(
    dataset: Annotated[str, Argument(help="TOML file of a dataset")],
    store: StoreOption = DEFAULT_STORE,
    overrides: OverridesOption = None,
    cluster: ClusterOption = None,
    verify: Annotated[bool, Option(help="Read all files, those too that look unchanged")] = False,
    merge: Annotated[bool, Option(help="Read all files and make one part of all items")] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring a dataset up to date with its files: index what is new, write the next snapshot.

    Examples:
        cosmos-flows preprocess configs/data/local.toml
        cosmos-flows preprocess configs/data/local.toml --set sources.mine.local_dir=clips --store s3://bucket/prefix
        cosmos-flows preprocess configs/data/local.toml --verify
    """
    operation: Any = import_module("flows.operations.preprocess")  # reads tables with pandas

    def fits(config: DatasetConfig) -> list[str]:
        return misfits(config.launch, operation.stages_of(config), runs_here=True)

    config = read_dataset(dataset, tuple(overrides or ()), cluster, fits)
    # Without Prefect, whose server takes longer to start than 10,000 files take to be looked at.
    last, asked = snapshots.newest(store, config.name), verify or merge
    before = 0 if last is None else last.number
    if not asked and (last := operation.unchanged(config, store)) is not None and not operation.missing(config, store):
        if not as_json:
            say(operation.outcome_of(last, None))
    else:
        with notes_on_stderr(as_json), prefect_server():
            # Prefect reads its settings when it is imported.
            flow = import_module("flows.preprocess").preprocess
            flow(dataset, store, overrides, cluster, verify, merge)
    if as_json:
        print_json(operation.as_json(store, config.name, before))
