"""The command that scores stored samples of a run with other rewards."""

from importlib import import_module
from typing import Annotated, Any

from typer import Option

from flows.cli.base.flowing import flowing
from flows.cli.base.options import ClusterOption, DryRunOption, JsonOption, RunArgument, StoreOption
from flows.cli.base.printing import print_found, print_json
from flows.defaults import DEFAULT_STORE
from flows.running.tags import tags_of


def rescore(
    run: RunArgument,
    reward: Annotated[str, Option(help="The reward: ocr, jpeg, ..., or a TOML with [[rewards]] as in a recipe")],
    store: StoreOption = DEFAULT_STORE,
    iterations: Annotated[str | None, Option(help="Which rollouts: 3-7,9. Default: all that there are")] = None,
    evaluations: Annotated[bool, Option("--evaluations", help="The held-out samples too")] = False,
    cluster: ClusterOption = None,
    allow_numerics_change: Annotated[bool, Option(help="Accept other versions or devices")] = False,
    accept_scorer: Annotated[bool, Option(help="Accept that the reward service's scorer changed")] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Score stored samples of a run with other rewards, and say how far they agree. The same command continues it.

    Nothing is generated. RUN may be at work, and nothing of it changes. Missing pictures are decoded.
    --dry-run says how many samples are decoded and scored.

    Examples:
        cosmos-flows rescore nft-1a2b3c4d --reward aesthetic --iterations 3-7
        cosmos-flows rescore nft-1a2b3c4d --reward rewards.toml --evaluations
    """
    plans = import_module("flows.rescoring.plan")  # brings pandas along
    wanted = plans.plan_of_rescore(store, run, reward, iterations, evaluations=evaluations)
    if dry_run:
        planned = plans.cost_of(wanted)
        print_found(planned, planned.lines(), as_json=as_json)
        return
    plan = wanted.rescore.run.plan
    options: Any = (store, iterations, evaluations, cluster, allow_numerics_change, accept_scorer)
    tags = tags_of(plan.recipe.train.train_policy.type, plan.model.adapter)
    with flowing(tags, f"the same command continues the re-score of {run}", as_json=as_json):
        import_module("flows.branches.rescore").rescore(run, reward, *options)
    if as_json:
        print_json(import_module("flows.rescoring.report").report_of(wanted).as_json())
