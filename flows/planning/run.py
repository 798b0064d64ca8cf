"""A run: its plan, the store that it runs in, and where its artifacts go."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cosmos_rl_core.algorithms._needs import Needs
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.lease import Lease, holder_of
from cosmos_rl_core.weights.parts import TRAINING_ONLY
from flows.planning import costs
from flows.planning.datasets import data_of, held_out_of
from flows.planning.plan import Plan, Slots, run_url
from stages import contracts
from stages.artifacts.request import Request
from stages.artifacts.slots import drop
from stages.contracts import MEDIA, TENSORS, StageConfig


@dataclass(frozen=True)
class Prepared:
    """Requests for embeddings and latents, which runs share: the fingerprint of each names its slot."""

    plan: Plan
    store_url: str

    @cached_property
    def embed(self) -> Request:
        """Return the Request for text embeddings of the prompts that training conditions on."""
        negative_prompt = self.plan.recipe.policy.diffusers.sample.negative_prompt
        return self._embed(self.plan.embedded_prompts, negative_prompt)

    @cached_property
    def embed_held_out(self) -> Request:
        """Return the Request for text embeddings of the prompts of held-out media."""
        return self._embed(self.plan.held_out_prompts)

    @cached_property
    def encode(self) -> Request:
        """Return the Request for latents of the media that an algorithm with data reads."""
        return self._encode(data_of(self.plan.recipe), self.plan.data_digest)

    @cached_property
    def encode_held_out(self) -> Request:
        """Return the Request for latents of the media of ``validation.data``."""
        return self._encode(held_out_of(self.plan.recipe), self.plan.held_out_digest)

    def _embed(self, prompts: tuple[Prompt, ...], negative_prompt: str | None = None) -> Request:
        config = contracts.Embed(
            model=self.plan.base,
            # Embeddings depend on texts alone; runs whose prompts have other metadata share them.
            prompts=tuple(Prompt(id=prompt.id, text=prompt.text) for prompt in prompts),
            negative_prompt=negative_prompt,
            max_prompt_length=self.plan.recipe.policy.diffusers.max_prompt_length,
            prefixed=self.plan.prefixed,
        )
        return self._shared(config)

    def _encode(self, data: DatasetOptions | None, digest: str) -> Request:
        assert data is not None, "a step encodes media only if the recipe names them"
        base, media = self.plan.base, self.plan.media
        config = contracts.Encode(model=base, dataset=data, dataset_digest=digest, media=media)
        return self._shared(config)

    def _shared(self, config: StageConfig) -> Request:
        # Nothing is drawn, so runs with different seeds share these artifacts.
        request = self.plan.request("?", config, seed=0)
        slot = store.join(store.absolute(self.store_url), "dataset", request.fingerprint)
        return request.model_copy(update={"slot": slot})


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
        return Slots(self.url, self.trains_on_rewards)

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
        """Return whether exported policies generate samples from held-out prompts."""
        return self.recipe.evaluates

    @property
    def validates(self) -> bool:
        """Return whether the diffusion loss of policies is measured on held-out media."""
        return self.recipe.validation is not None and self.recipe.validation.data is not None

    def is_due(self, k: int) -> bool:
        """Return whether policy version k is exported and judged."""
        freq = self.recipe.validation.freq if self.recipe.validation else 0
        return k in (0, self.recipe.train.num_iterations) or bool(freq and k % freq == 0)

    def exports(self, k: int) -> bool:
        """Return whether policy version k is exported, judged or not."""
        every = self.recipe.train.ckpt.export_every
        return self.is_due(k) or bool(every and k % every == 0)

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
