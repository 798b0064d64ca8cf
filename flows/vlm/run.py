"""A run that fine-tunes a VLM: its slots, and the Requests for indexes and tokens, which runs share."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cosmos_rl_core.config.vlm.chat_datasets import ChatDatasetOptions
from cosmos_rl_core.config.vlm.recipe import VlmRecipe
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.storage import store
from flows.planning.base import BaseRun
from flows.planning.plan import read_plan
from flows.vlm.plan import VlmPlan, place_of
from flows.vlm.shared_tokens import EARLIER, earlier_of
from stages.artifacts.request import Input, Request
from stages.artifacts.slots import input_of
from stages.contracts import StageConfig
from stages.vlm.contracts import VlmIndex, VlmTokenize


@dataclass(frozen=True)
class VlmRun(BaseRun[VlmPlan]):
    """A plan of a VLM and the store that it runs in."""

    @property
    def recipe(self) -> VlmRecipe:
        """Return the recipe of the plan."""
        return self.plan.recipe

    def index(self, *, held_out: bool = False) -> Request:
        """Return the Request for the index of the training conversations, or of the held-out conversations."""
        digest = self.plan.held_out_digest if held_out else self.plan.data_digest
        datasets, limit = self._data(held_out=held_out)
        folders = {name: options.media_path for name, options in datasets.items() if options.media_path}
        # Plans written before ``media_places`` existed resolve a folder from the current directory.
        known = self.plan.media_places
        places = {name: known.get(folder) or place_of(folder) for name, folder in folders.items()}
        return self._shared(VlmIndex(sources=dict(datasets), files_digest=digest, places=places, max_left_out=limit))

    def tokenize(self, *, held_out: bool = False) -> Request:
        """Return the Request for the tokens of the training conversations, or of the held-out conversations.

        Its inputs are the index, and tokens that runs of this store made with the same settings, from which equal
        conversations are taken. Raises :class:`ArtifactError` if the index is not there.
        """
        planned = self._tokenize(held_out=held_out)
        inputs: dict[str, tuple[Input, ...]] = {"index": (input_of(self.index(held_out=held_out).slot),)}
        if earlier := earlier_of(planned, _slots_of_runs(self.store_url)):
            inputs[EARLIER] = earlier
        return planned.model_copy(update={"inputs": inputs})

    def tokens(self, *, held_out: bool = False) -> Input:
        """Return the tokens of these conversations as an input."""
        return input_of(self.tokens_slot(held_out=held_out))

    def tokens_slot(self, *, held_out: bool = False) -> str:
        """Return the slot of the tokens, which is known before there is an index."""
        return self._tokenize(held_out=held_out).slot

    @property
    def token_slots(self) -> list[str]:
        """Return the slots of all tokens of the run."""
        return [self.tokens_slot(held_out=side) for side in ((False, True) if self.validates else (False,))]

    def _tokenize(self, *, held_out: bool) -> Request:
        """Return the Request before its inputs are in the store. Its slot is final."""
        options = self.recipe.train.train_policy
        datasets, limit = self._data(held_out=held_out)
        config = VlmTokenize(
            vlm=self.plan.vlm,
            sources=dict(datasets),
            turns=options.turns,
            max_length=options.model_max_length,
            max_left_out=limit,
        )
        return self._shared(config, {"index": (self.index(held_out=held_out).expected(),)})

    def _data(self, *, held_out: bool) -> tuple[Mapping[str, ChatDatasetOptions], float]:
        validation = self.recipe.validation
        if held_out and validation is not None:
            return validation.datasets, 0.0
        options = self.recipe.train.train_policy
        return options.datasets, options.max_left_out

    def _shared(self, config: StageConfig, inputs: Mapping[str, tuple[Input, ...]] | None = None) -> Request:
        # Nothing is drawn, so runs with different seeds share these artifacts.
        request = self.plan.request("?", config, None, dict(inputs or {}), seed=0)
        slot = store.join(store.absolute(self.store_url), "dataset", request.fingerprint)
        return request.model_copy(update={"slot": slot})


def _slots_of_runs(store_url: str) -> Iterator[str]:
    """Yield the slots of the tokens of every run of the store, planned or made."""
    for name in sorted(store.names(store.join(store.absolute(store_url), "runs"))):
        try:
            plan = read_plan(store_url, name)
        except (ConfigError, ArtifactError):
            continue
        if isinstance(plan, VlmPlan):
            yield from VlmRun(plan, store_url).token_slots
