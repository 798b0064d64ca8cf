"""The datasets of a recipe: prompts, and media of the size that the policy is trained on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

from cosmos_rl_core import plugins
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets._base import MediaPlugin, Prompt
from cosmos_rl_core.errors import ConfigError
from flows.planning import costs


class Media(NamedTuple):
    """Media of a dataset."""

    prompts: tuple[Prompt, ...] = ()
    digest: str = ""
    """Digest of the files; ``""`` for media that are generated, and for no media."""


@dataclass(frozen=True)
class Datasets:
    """The contents of a recipe's datasets."""

    prompts: tuple[Prompt, ...]
    validation_prompts: tuple[Prompt, ...]
    data: Media
    held_out: Media

    def mistakes(self, recipe: Recipe) -> Iterator[str]:
        """Yield a message for too few prompts, and for prompts or media that are both trained on and held out."""
        wanted = recipe.prompts_per_iteration if recipe.train.train_policy.rewarded else 0
        if self.prompts and wanted > len(self.prompts):
            yield f"one iteration needs {wanted} prompts, the dataset has {len(self.prompts)}"
        trained = {prompt.id for prompt in (*self.prompts, *self.data.prompts)}
        if overlap := trained & {prompt.id for prompt in self.validation_prompts}:
            yield f"{len(overlap)} validation prompts are also trained on, e.g. {min(overlap)}"
        if self._trains_on_held_out(recipe):
            yield "validation.data has media that are trained on; use others, or another split"

    def _trains_on_held_out(self, recipe: Recipe) -> bool:
        """Return whether both are the same files or, for generated media, share a prompt."""
        policy = recipe.train.train_policy
        media, held_out = data_of(recipe) if policy.rewarded else policy.dataset, held_out_of(recipe)
        if media is None or held_out is None or media.name != held_out.name:
            return False
        trained = {prompt.id for prompt in self.data.prompts or self.prompts}
        shared = trained & {prompt.id for prompt in self.held_out.prompts}
        return self.held_out.digest == self.data.digest and bool(self.held_out.digest or shared)


def prompts_of(dataset: DatasetOptions | None) -> tuple[Prompt, ...]:
    """Return the prompts of a dataset; none for None."""
    if dataset is None:
        return ()
    plugin = plugins.load("datasets", dataset.name)
    with plugins.errors_of("datasets", dataset.name):
        return plugin.prompts(dataset)


def data_of(recipe: Recipe) -> DatasetOptions | None:
    """Return the media that an algorithm with rewards reads besides its prompts; None without them."""
    return getattr(recipe.train.train_policy, "data", None)


def held_out_of(recipe: Recipe) -> DatasetOptions | None:
    """Return the held-out media; None without them."""
    return recipe.validation.data if recipe.validation else None


def trained_media(recipe: Recipe) -> Media:
    """Return the media that an algorithm with rewards reads; for supervised training the digest alone.

    Raises :class:`ConfigError` for media that are needed and missing, or given and not read.
    """
    policy = recipe.train.train_policy
    if not policy.rewarded:
        return Media(digest=_media_plugin(policy.dataset).digest(policy.dataset))
    data, most = data_of(recipe), policy.given_frames[1]
    if data is None and most > 0:
        raise ConfigError(
            f"max_num_conditional_frames = {most} takes the first frames of media: name them in "
            "[train.train_policy.data], or leave it at 0"
        )
    if data is None and costs.needs_of(recipe).data_term is not None:
        raise ConfigError(
            "the loss has a term on media, with weight data_beta: name the media in [train.train_policy.data], or set "
            "data_beta = 0"
        )
    if data is not None and not costs.needs_data(recipe):
        raise ConfigError(
            "nothing reads the media in [train.train_policy.data]: leave them out, or set max_num_conditional_frames, "
            "or the weight of a loss on media if the algorithm has one, above 0"
        )
    return media_of(recipe, data, "train.train_policy.data")


def media_of(recipe: Recipe, data: DatasetOptions | None, place: str) -> Media:
    """Return the media of a dataset; none for None.

    Raises :class:`ConfigError` naming ``place`` if their size is not the size that the policy is trained on.
    """
    if data is None:
        return Media()
    plugin = _media_plugin(data)
    diffusers = recipe.policy.diffusers
    with plugins.errors_of("datasets", data.name):
        media = Media(plugin.prompts(data), plugin.digest(data))
        found = plugin.Media(data).item(0)[0].shape[:3]
    if found != (expected := (diffusers.train_frames, *diffusers.inference_size)):
        raise ConfigError(
            f"{place} gives media of {_times(found)} (frames, height, width), policy.diffusers trains "
            f"on {_times(expected)}; make its settings equal"
        )
    return media


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(str(length) for length in shape)


def _media_plugin(dataset: DatasetOptions) -> MediaPlugin:
    plugin = plugins.load("datasets", dataset.name)
    if not hasattr(plugin, "Media"):
        able = [name for name in plugins.known("datasets") if hasattr(plugins.load("datasets", name), "Media")]
        raise ConfigError(f"the dataset {dataset.name!r} has prompts only; with media: {', '.join(able)}")
    return cast("MediaPlugin", plugin)
