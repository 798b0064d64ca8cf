"""A run: its plan, the store that it runs in, and where its artifacts go."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cosmos_rl_core.algorithms._needs import Needs
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.lease import Lease, holder_of
from cosmos_rl_core.weights.parts import TRAINING_ONLY
from flows.planning import costs
from flows.planning.plan import Plan, run_url
from flows.planning.prepared import Prepared
from stages.artifacts.slots import drop
from stages.contracts import MEDIA, TENSORS


@dataclass(frozen=True)
class Slots:
    """URLs of the slots below the root of a run."""

    root: str
    trainer: str
    """The stage that makes policy version k + 1 in iteration k: ``update`` or ``finetune``."""

    def iteration(self, k: int, stage: str) -> str:
        """Return the slot of a stage in iteration k."""
        return store.join(self.root, "iterations", f"{k:04d}", stage)

    def version(self, k: int, stage: str) -> str:
        """Return the slot of a stage that judges policy version k: its export, held-out samples or their scores."""
        return store.join(self.root, "exports", f"{k:04d}", stage)

    def policy(self, k: int) -> str:
        """Return the slot of policy version k. The stage ``policy`` makes version 0."""
        return store.join(self.root, "policy") if k == 0 else self.iteration(k - 1, self.trainer)

    @property
    def report(self) -> str:
        """Return the slot of the report."""
        return store.join(self.root, "report")


@dataclass(frozen=True)
class Run:
    """A plan and the store that it runs in."""

    plan: Plan
    store_url: str

    @property
    def url(self) -> str:
        """Return the root of the run."""
        return run_url(self.store_url, self.plan.run_id)

    @cached_property
    def slots(self) -> Slots:
        """Return where the artifacts of this run alone go."""
        return Slots(self.url, "update" if self.trains_on_rewards else "finetune")

    @cached_property
    def prepared(self) -> Prepared:
        """Return the Requests of embeddings and latents, which runs share."""
        return Prepared(self.plan, self.store_url)

    @property
    def recipe(self) -> Recipe:
        """Return the recipe of the plan."""
        return self.plan.recipe

    @cached_property
    def needs(self) -> Needs:
        """Return what the algorithm needs."""
        return costs.needs_of(self.recipe)

    @property
    def trains_on_rewards(self) -> bool:
        """Return whether iterations are rollout, reward, update (True) or finetune (False)."""
        return self.recipe.train.train_policy.rewarded

    @property
    def headline_reward(self) -> str:
        """Return the label of the first reward that trains, else of the first reward, else ``""``."""
        ordered = sorted(self.recipe.rewards, key=lambda reward: reward.role != "train")
        return ordered[0].fn.label if ordered else ""

    @property
    def needs_data(self) -> bool:
        """Return whether rollouts or updates read encoded media."""
        return costs.needs_data(self.recipe)

    @property
    def evaluates(self) -> bool:
        """Return whether exported policies generate from held-out prompts and are scored."""
        return self.recipe.validation is not None and bool(self.recipe.rewards)

    @property
    def validates(self) -> bool:
        """Return whether the diffusion loss of policies is measured on held-out media."""
        return self.recipe.validation is not None and self.recipe.validation.data is not None

    def is_due(self, k: int) -> bool:
        """Return whether policy version k is exported and judged."""
        freq = self.recipe.validation.freq if self.recipe.validation else 0
        return k in (0, self.recipe.train.num_iterations) or bool(freq and k % freq == 0)

    def going_to(self, iterations: int) -> "Run":
        """Return the same run with another number of iterations."""
        train = self.recipe.train.model_copy(update={"num_iterations": iterations})
        recipe = self.recipe.model_copy(update={"train": train})
        return replace(self, plan=self.plan.model_copy(update={"recipe": recipe}))

    def lease(self) -> Lease:
        """Return the lease, held by at most one process, that allows to make or delete artifacts of this run."""
        return Lease(self._lease_url)

    def holder(self, patience_s: float) -> dict[str, Any] | None:
        """Return ``pid`` and ``host`` of the process that holds the lease; None if nobody does.

        Waits up to ``patience_s`` for a heartbeat of a process on another machine.
        """
        return holder_of(self._lease_url, patience_s)

    @property
    def _lease_url(self) -> str:
        return store.join(self.url, "lease")

    def drop_old_state(self, newest: int) -> None:
        """Delete training state and parts of rollouts that the recipe does not keep, now that ``newest`` is there."""
        keep, kept = self.recipe.train.ckpt.max_keep, self.recipe.rollout.keep
        if keep is not None and newest > keep:
            drop(self.slots.policy(newest - keep), *TRAINING_ONLY)
        for part, keep in ((TENSORS, kept.tensors), (MEDIA, kept.media)):
            if self.trains_on_rewards and keep is not None and newest > keep:
                drop(self.slots.iteration(newest - 1 - keep, "rollout"), part)
