"""The datasets of a recipe: prompts, and media of the size that the policy is trained on."""

from typing import NamedTuple, cast

from cosmos_rl_core import plugins
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets._base import MediaPlugin, Prompt
from cosmos_rl_core.datasets._shares import Share, most
from cosmos_rl_core.errors import ConfigError
from flows.planning import costs
from flows.planning.checks import Mistakes


class Media(NamedTuple):
    """Media of a dataset."""

    prompts: tuple[Prompt, ...] = ()
    digest: str = ""
    """Digest of the files; ``""`` for media that are generated, and for no media."""


class PromptSet(NamedTuple):
    """Prompts of a dataset."""

    prompts: tuple[Prompt, ...] = ()
    shares: tuple[Share, ...] = ()
    """The sets of a mixture, in the order of their prompts."""


class Datasets(NamedTuple):
    """The contents of a recipe's datasets."""

    prompts: tuple[Prompt, ...]
    shares: tuple[Share, ...]
    validation_prompts: tuple[Prompt, ...]
    data: Media
    held_out: Media


def read_datasets(recipe: Recipe, mistakes: Mistakes) -> Datasets:
    """Return the contents of the recipe's datasets. Add what cannot be read, and what does not fit together."""
    policy, validation = recipe.train.train_policy, recipe.validation
    trained_on = mistakes.catch(_prompts, policy.dataset) or PromptSet()
    found = Datasets(
        *trained_on,
        validation_prompts=(mistakes.catch(_prompts, validation and validation.dataset) or PromptSet()).prompts,
        data=mistakes.catch(_trained_media, recipe) or Media(),
        held_out=mistakes.catch(_media, recipe, held_out_of(recipe), "validation.data") or Media(),
    )
    wanted, available = recipe.prompts_per_iteration if policy.rewarded else 0, len(found.prompts)
    if 0 < available < wanted:
        mistakes.append(f"one iteration needs {wanted} prompts, the dataset has {available}")
    all_needed = most(found.shares, wanted) if found.shares else []
    for number, (share, needed) in enumerate(zip(found.shares, all_needed, strict=True), 1):
        if needed > share.num_prompts:
            mistakes.append(
                f"one iteration needs up to {needed} prompts of set {number} of the mixture, which has "
                f"{share.num_prompts}; lower its weight"
            )
    trained = _ids(found.prompts) | _ids(found.data.prompts)
    if overlap := trained & _ids(found.validation_prompts):
        shown = f"e.g. {min(overlap)}"
        mistakes.append(f"{len(overlap)} validation prompts are also trained on, {shown}")
    if _trains_on_held_out(recipe, found):
        mistakes.append("validation.data has media that are trained on; use another split")
    return found


def _trains_on_held_out(recipe: Recipe, found: Datasets) -> bool:
    """Return whether both are the same files or, for generated media, share a prompt."""
    policy, held_out = recipe.train.train_policy, held_out_of(recipe)
    media = data_of(recipe) if policy.rewarded else policy.dataset
    if media is None or held_out is None or media.name != held_out.name:
        return False
    shared = _ids(found.data.prompts or found.prompts) & _ids(found.held_out.prompts)
    return found.held_out.digest == found.data.digest and bool(found.held_out.digest or shared)


def _ids(prompts: tuple[Prompt, ...]) -> set[str]:
    return {prompt.id for prompt in prompts}


def _prompts(dataset: DatasetOptions | None) -> PromptSet:
    """Return the prompts of a dataset; none for None."""
    if dataset is None:
        return PromptSet()
    plugin = plugins.load("datasets", dataset.name)
    with plugins.errors_of("datasets", dataset.name):
        if not hasattr(plugin, "weighted"):
            return PromptSet(plugin.prompts(dataset))
        sets = plugin.weighted(dataset)
    every = tuple(prompt for _, prompts in sets for prompt in prompts)
    return PromptSet(every, tuple(Share(weight=weight, num_prompts=len(prompts)) for weight, prompts in sets))


def data_of(recipe: Recipe) -> DatasetOptions | None:
    """Return the media that an algorithm with rewards reads besides its prompts; None without them."""
    return getattr(recipe.train.train_policy, "data", None)


def held_out_of(recipe: Recipe) -> DatasetOptions | None:
    """Return the held-out media; None without them."""
    return recipe.validation.data if recipe.validation else None


def _trained_media(recipe: Recipe) -> Media:
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
    return _media(recipe, data, "train.train_policy.data")


def _media(recipe: Recipe, data: DatasetOptions | None, place: str) -> Media:
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
        every = {name: plugins.load("datasets", name) for name in plugins.known("datasets")}
        able = ", ".join(name for name, each in every.items() if hasattr(each, "Media"))
        raise ConfigError(f"the dataset {dataset.name!r} has prompts only; with media: {able}")
    return cast("MediaPlugin", plugin)
