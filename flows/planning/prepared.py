"""Requests for embeddings and latents. Runs that ask for the same share the artifacts."""

from dataclasses import dataclass
from functools import cached_property

from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.storage import store
from flows.planning.datasets import data_of, held_out_of
from flows.planning.plan import Plan
from stages import contracts
from stages.artifacts.request import Request
from stages.contracts import StageConfig


@dataclass(frozen=True)
class Prepared:
    """Requests for embeddings and latents. The fingerprint of each names its slot."""

    plan: Plan
    store_url: str

    @cached_property
    def embed(self) -> Request:
        """Return the Request for text embeddings of the prompts that training conditions on."""
        return self._embed(self.plan.embedded_prompts, self.plan.recipe.policy.diffusers.sample.negative_prompt)

    @cached_property
    def embed_held_out(self) -> Request:
        """Return the Request for text embeddings of the prompts of held-out media."""
        return self._embed(self.plan.held_out_prompts)

    @cached_property
    def encode(self) -> Request:
        """Return the Request for latents of the media that training reads."""
        data = data_of(self.plan.recipe)
        assert data is not None, "only an algorithm with data has media to encode"
        return self._encode(data, self.plan.data_digest)

    @cached_property
    def encode_held_out(self) -> Request:
        """Return the Request for latents of held-out media."""
        data = held_out_of(self.plan.recipe)
        assert data is not None, "only a recipe with validation.data has held-out media"
        return self._encode(data, self.plan.held_out_digest)

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

    def _encode(self, data: DatasetOptions, dataset_digest: str) -> Request:
        config = contracts.Encode(
            model=self.plan.base, dataset=data, dataset_digest=dataset_digest, media=self.plan.media
        )
        return self._shared(config)

    def _shared(self, config: StageConfig) -> Request:
        # Nothing is drawn, so runs with different seeds share these artifacts.
        request = self.plan.request("?", config, seed=0)
        slot = store.join(store.absolute(self.store_url), "dataset", request.fingerprint)
        return request.model_copy(update={"slot": slot})
