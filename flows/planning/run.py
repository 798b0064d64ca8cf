"""A run: its plan, the store that it runs in, and where its artifacts go."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

from cosmos_rl_core.algorithms._needs import Needs
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.config.train import DatasetOptions, SnapshotOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.storage import store
from flows.planning import kinds
from flows.planning.base import AnyPlan, AnyRun, BaseRun
from flows.planning.datasets import Pinned, data_of, held_out_of
from flows.planning.plan import Plan
from flows.sizes import costs
from stages import contracts
from stages.artifacts.request import Input, Request
from stages.artifacts.slots import current_of, input_of
from stages.contracts import MEDIA, TENSORS, StageConfig


class PreparedMedia(NamedTuple):
    """Requests for the captions and latents of media: one of each, or one for each part of a dataset."""

    embeds: tuple[Request, ...] = ()
    encodes: tuple[Request, ...] = ()
    parts: tuple[Input, ...] = ()
    """Parts of the prepared dataset; empty for other media."""
    captions: tuple[Input, ...] = ()
    """The captions that captioners wrote for the parts."""

    def inputs(self) -> dict[str, tuple[Input, ...]]:
        """Return inputs of a stage that trains on the media: latents, and the parts and captions that describe them."""
        return {"data": inputs_of(self.encodes), "parts": self.parts, "captions": self.captions}


@dataclass(frozen=True)
class Prepared:
    """Requests for embeddings and latents, which runs share: the fingerprint of each names its slot."""

    plan: Plan
    store_url: str

    def steps(self) -> dict[str, Request]:
        """Return the Requests that come before iteration 0 by the names of their steps, in order, each once."""
        named: dict[str, Request] = {} if self.references is None else {"references": self.references}
        if self.embeds_all and self.plan.embedded_prompts:
            named["embed"] = self.embed
        if not self.embeds_all and self.plan.data_prompts:
            named["embed-data"] = self._embed_data
        named |= _named(self.data, "") | _named(self.held_out, "-held-out")
        # Both sides of a split share the Requests of their dataset's parts. The first name counts.
        first = {request.slot: name for name, request in reversed(named.items())}
        return {name: request for name, request in named.items() if first[request.slot] == name}

    @cached_property
    def references(self) -> Request | None:
        """Return the Request for the pictures that prompts refer to; None if no prompt refers to any."""
        found = {one.digest: one for prompt in self.plan.every_prompt for one in prompt.references}
        if not found:
            return None
        return self._shared(contracts.References(references=tuple(found[one] for one in sorted(found))))

    @cached_property
    def embeds_all(self) -> bool:
        """Return whether one stage embeds the prompts of all iterations."""
        return self.embedded_with(0) is None

    def embedded_with(self, k: int) -> range | None:
        """Return the iterations whose prompts one stage embeds with iteration k's; None if it embeds all prompts."""
        return costs.embedded_together(self.plan.recipe, len(self.plan.prompts), k)

    def embed_at(self, k: int) -> Request:
        """Return the Request for the prompts of the rollout of iteration k, and of the others embedded with them."""
        if (together := self.embedded_with(k)) is None:
            return self.embed
        if together not in self._embeds:
            drawn = {prompt.id: prompt for i in together for prompt in self.plan.prompts_of(i)}
            prompts = tuple(drawn[one] for one in sorted(drawn))
            self._embeds[together] = self._embed(prompts, self._negative_prompt)
        return self._embeds[together]

    def embeddings_at(self, k: int) -> tuple[Request, ...]:
        """Return the Requests for all embeddings that iteration k reads. The first includes the negative prompt."""
        prompts = (self.embed_at(k),) if self.plan.embedded_prompts else ()
        media = (self._embed_data,) if not self.embeds_all and self.plan.data_prompts else ()
        return (*prompts, *media, *self.data.embeds)

    @cached_property
    def embed(self) -> Request:
        """Return the Request for all prompts of rollouts, and of media that are no prepared dataset."""
        return self._embed(self.plan.embedded_prompts, self._negative_prompt)

    @cached_property
    def _embed_data(self) -> Request:
        return self._embed(self.plan.data_prompts, self._negative_prompt)

    @cached_property
    def _embeds(self) -> dict[range, Request]:
        """Requests for the prompts of several iterations."""
        return {}

    @property
    def _negative_prompt(self) -> str | None:
        return self.plan.recipe.policy.diffusers.sample.negative_prompt

    @cached_property
    def encode(self) -> Request:
        """Return the Request for latents of the media set that is trained on."""
        return self._encode(data_of(self.plan.recipe), self.plan.data_digest)

    @cached_property
    def data(self) -> PreparedMedia:
        """Return the Requests for the media that are trained on."""
        if not costs.needs_data(self.plan.recipe):
            return PreparedMedia()
        if self.plan.data_snapshot is None:
            return PreparedMedia(encodes=(self.encode,))
        return self._of_parts(data_of(self.plan.recipe), self.plan.data_snapshot)

    @cached_property
    def held_out(self) -> PreparedMedia:
        """Return the Requests for the media of ``validation.data``."""
        if (held_out := held_out_of(self.plan.recipe)) is None:
            return PreparedMedia()
        if self.plan.held_out_snapshot is None:
            encode = self._encode(held_out, self.plan.held_out_digest)
            return PreparedMedia((self._embed(self.plan.held_out_prompts),), (encode,))
        return self._of_parts(held_out, self.plan.held_out_snapshot)

    def _of_parts(self, options: DatasetOptions | None, pinned: Pinned) -> PreparedMedia:
        assert isinstance(options, SnapshotOptions)
        snapshot = pinned.read(self.store_url)
        # The empty prompt, for text dropout. Negative prompts differ between recipes and come from elsewhere.
        embed = self._embed_config(negative_prompt="", media=self.plan.media if pinned.pictures else None)
        encode = contracts.Encode(
            model=self.plan.base,
            sources=cast("dict[str, Any]", snapshot.sources),
            windows=options.windows_per_item,
            fps=options.fps,
            media=self.plan.media,
            buckets=self.plan.buckets if options.crop == "buckets" else (),
            deviations=self._samples,
        )
        parts, captions = snapshot.parts, snapshot.captions
        until = range(1, len(parts) + 1)
        embeds = tuple(self._shared(embed, {"parts": parts[:n], "captions": captions[:n]}) for n in until)
        later = pinned.later or ((),) * len(parts)
        encodes = tuple(self._encode_part(encode, parts, n, later[n - 1]) for n in until)
        return PreparedMedia(embeds, encodes, parts, captions)

    def _encode_part(
        self, config: contracts.Encode, parts: tuple[Input, ...], until: int, later: tuple[int, ...]
    ) -> Request:
        """Return the Request for the latents of part number ``until``, counted from 1.

        The ``later`` parts may say that some of its media are gone. Latents that were made before stay in use.
        """
        inputs = {"parts": parts[:until]}
        several = (inputs | {"later": tuple(parts[k] for k in later[:n])} for n in range(len(later), 0, -1))
        requests = [self._shared(config, one) for one in (*several, inputs)]
        # If one of these is current, nothing is made, and every later look finds the same one.
        return next((one for one in requests if current_of(one.slot)[1] is not None), requests[0])

    def _embed(self, prompts: tuple[Prompt, ...], negative_prompt: str | None = None) -> Request:
        # Embeddings depend on texts alone; runs whose prompts have other metadata share them.
        texts = tuple(Prompt(id=one.id, text=one.text, references=one.references) for one in prompts)
        config = self._embed_config(prompts=texts, negative_prompt=negative_prompt)
        if not any(prompt.references for prompt in prompts):
            return self._shared(config)
        return self._shared(config.model_copy(update={"media": self.plan.media}))

    def _embed_config(self, **texts: Any) -> contracts.Embed:
        length = self.plan.recipe.policy.diffusers.max_prompt_length
        return contracts.Embed(model=self.plan.base, max_prompt_length=length, prefixed=self.plan.prefixed, **texts)

    def _encode(self, data: DatasetOptions | None, digest: str) -> Request:
        assert data is not None, "a step encodes media only if the recipe names them"
        media = self.plan.media
        config = contracts.Encode(
            model=self.plan.base, dataset=data, dataset_digest=digest, media=media, deviations=self._samples
        )
        return self._shared(config)

    @property
    def _samples(self) -> bool:
        return self.plan.recipe.policy.diffusers.posterior == "sample"

    def _shared(self, config: StageConfig, inputs: dict[str, tuple[Input, ...]] | None = None) -> Request:
        # Nothing is drawn, so runs with different seeds share these artifacts.
        request = self.plan.request("?", config, None, inputs, seed=0)
        slot = store.join(store.absolute(self.store_url), "dataset", request.fingerprint)
        return request.model_copy(update={"slot": slot})


def _named(media: PreparedMedia, ending: str) -> dict[str, Request]:
    """Return the Requests by names of steps: ``encode`` and ``ending``, with the number of the part in a dataset."""
    pairs = {"embed": media.embeds, "encode": media.encodes}
    if not media.parts:
        return {f"{stage}{ending}": one for stage, some in pairs.items() for one in some}
    return {f"{s}{ending}-part-{n:04d}": some[n] for n in range(len(media.parts)) for s, some in pairs.items()}


def inputs_of(requests: Iterable[Request]) -> tuple[Input, ...]:
    """Return the artifacts of Requests as inputs of a stage."""
    return tuple(input_of(request.slot) for request in requests)


@dataclass(frozen=True)
class Run(BaseRun[Plan]):
    """A plan of a diffusion model and the store that it runs in."""

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
        """Return the needs of the algorithm."""
        return costs.needs_of(self.recipe)

    @property
    def validates(self) -> bool:
        """Return whether the diffusion loss of policies is measured on held-out media."""
        return self.recipe.validation is not None and self.recipe.validation.data is not None

    @property
    def staleness(self) -> int:
        """Return by how many policy versions a rollout may be older than the policy that it updates."""
        return self.recipe.train.staleness

    def not_kept(self, newest: int) -> dict[str, list[str]]:
        """Return the parts of policies and rollouts, by slot, that are not kept once policy ``newest`` exists."""
        gone, kept = super().not_kept(newest), self.recipe.rollout.keep
        for part, keep in ((TENSORS, kept.tensors), (MEDIA, kept.media)):
            if self.trains_on_rewards and keep is not None and newest > keep:
                gone.setdefault(self.slots.iteration(newest - 1 - keep, "rollout"), []).append(part)
        return gone


def run_of(plan: AnyPlan, store_url: str) -> AnyRun:
    """Return the run of a plan, with the waves of its kind."""
    kind = kinds.of(plan)
    if kind is not None:
        return kind.run(plan, store_url)
    assert isinstance(plan, Plan)
    return Run(plan, store_url)
