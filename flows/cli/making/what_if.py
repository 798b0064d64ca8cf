"""The command that trains other settings on the stored rollouts of a run."""

from functools import partial
from importlib import import_module
from typing import Annotated, Any

from typer import Option

from cosmos_rl_core.weights.parts import Anchor
from flows.cli.base.options import (
    ClusterOption,
    DryRunOption,
    JsonOption,
    NameOption,
    OverridesOption,
    RunArgument,
    StoreOption,
    SweepsOption,
)
from flows.cli.base.planned import misfits
from flows.cli.base.studying import make_study
from flows.defaults import DEFAULT_STORE
from flows.lineage.origin import MAX_DRIFT, StoredRollouts
from flows.planning.plan import Settings


def what_if(
    run: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    iterations: Annotated[str | None, Option(help="Which rollouts: 0-15. Default: all that there are")] = None,
    algorithm: Annotated[str | None, Option(help="Another algorithm: nft, dpo, ...")] = None,
    overrides: OverridesOption = None,
    rewards: Annotated[str | None, Option(help="TOML with other [[rewards]]; default: RUN's")] = None,
    sweeps: SweepsOption = None,
    anchor: Annotated[Anchor | None, Option(help="What NFT compares with: its own old policy, or the samples'")] = None,
    max_drift: Annotated[float, Option(min=1e-9, help="Drift at which a chain of updates ends")] = MAX_DRIFT,
    controls: Annotated[int, Option(min=0, max=20, help="Runs of each setting with shuffled rewards")] = 3,
    name: NameOption = None,
    cluster: ClusterOption = None,
    allow_numerics_change: Annotated[bool, Option(help="Accept other versions or devices")] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train other settings on the stored rollouts of a run, and compare them. The same command continues it.

    No training sample is generated, and nothing of RUN changes. Each setting is trained from policy 0 on, evaluated,
    and shown next to RUN itself and to runs of the same setting with shuffled rewards. Its samples were made by RUN's
    policies: the page says how far the trained ones are from these, and a chain that goes too far ends (exit code 78 if
    all do). --dry-run says what it would cost.

    Examples:
        cosmos-flows what-if nft-1a2b3c4d --sweep train.optm_lr=1e-4,3e-4,1e-3
        cosmos-flows what-if nft-1a2b3c4d --algorithm dpo --iterations 0-7
    """
    plans = import_module("flows.studying.what_if")  # brings pandas along
    settings = Settings("", store, None, None, tuple(overrides or ()), cluster, allow_numerics_change)
    stored = StoredRollouts(anchor=anchor, max_drift=max_drift)
    chosen = {"iterations": iterations, "algorithm": algorithm, "rewards": rewards, "controls": controls, "name": name}
    fits = partial(misfits, runs_here=True)
    study, planned = plans.plan_of_what_if(run, settings, stored, sweeps=sweeps or (), misfits=fits, **chosen)
    others = {"anchor": anchor, "max_drift": max_drift, "cluster": cluster}

    def make(flows: Any) -> None:
        accepted = {"allow_numerics_change": allow_numerics_change}
        flows.what_if(run, store, overrides=overrides, sweeps=sweeps, **chosen, **others, **accepted)

    make_study(study, planned, store, make, dry_run=dry_run, as_json=as_json)
