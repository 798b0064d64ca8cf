"""Runs that train on the rollouts of another run: the inputs of their updates, and how their losses treat them."""

from cosmos_rl_core.algorithms._base import algorithm_of
from cosmos_rl_core.algorithms._foreign import Foreign
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.weights.parts import BEHAVIOUR, OWN
from flows.lineage.origin import StoredRollouts
from flows.planning.base import AnyPlan, AnyRun
from flows.planning.run import Run
from stages.artifacts.request import Input
from stages.artifacts.slots import current_of, named_manifest


def made_by(run: Run, k: int) -> Input:
    """Return the weights that made stored rollout k. Raises :class:`ArtifactError` if the rollout is not there."""
    slot = run.slots.iteration(k, "rollout")
    _, rollout = current_of(slot)
    if rollout is None:
        raise ArtifactError(f"{slot} has no artifact yet")
    (found,) = rollout.inputs["policy"]
    return found


def foreign(run: Run, k: int, own: Input) -> Foreign | None:
    """Return how update k treats a stored rollout; None if the run's weights ``own`` made it.

    Raises :class:`ConfigError` if other weights made it and the algorithm has no loss on rollouts of other policies.
    """
    begins = run.plan.origin
    if begins is None or begins.stored is None or (source := made_by(run, k)).content == own.content:
        return None
    if refusal := needs_its_own(run):
        raise ConfigError(f"update {k} of {run.plan.run_id}: {refusal}")
    settings = named_manifest(source).config["lora"]
    lora = None if settings is None else LoraConfig.model_validate(settings)
    return Foreign(anchor=begins.stored.anchor or OWN, lora=lora, max_drift=begins.stored.max_drift)


def settled(wanted: StoredRollouts, origin: AnyRun, plan: AnyPlan) -> StoredRollouts:
    """Return how a plan trains on stored rollouts, with the anchor that its loss compares with.

    If no anchor is named, the loss compares with the run's own copy, and with staleness with the policy that made the
    rollouts. If the origin trains on stored rollouts itself, its anchor is taken. Raises :class:`ConfigError` if an
    anchor is named that the loss does not read.
    """
    options = plan.recipe.train.train_policy
    reads = options.rewarded and BEHAVIOUR in algorithm_of(options).needs.roles
    if wanted.anchor is not None and not reads:
        raise ConfigError(
            f"anchor = {wanted.anchor!r} without effect: the loss of {options.type} reads no behaviour policy"
        )
    begins = origin.plan.origin
    inherited = begins.stored.anchor if begins is not None and begins.stored is not None else None
    usual = BEHAVIOUR if origin.staleness else OWN
    return wanted.model_copy(update={"anchor": (wanted.anchor or inherited or usual) if reads else None})


def needs_its_own(run: Run) -> str:
    """Return why the algorithm cannot train on rollouts of other policies; "" if it can."""
    needs, name = run.needs, run.recipe.train.train_policy.type
    if not needs.transitions and (BEHAVIOUR not in needs.roles or needs.off_policy):
        return ""
    return (
        f"{name} compares the policy with the one that made the rollouts, which must be the run's own; once they "
        "differ, these rollouts give it no gradient. Train on them with another algorithm, such as nft or dpo, or on "
        "the first of them alone"
    )
