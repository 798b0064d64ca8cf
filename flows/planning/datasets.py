"""What the datasets of a recipe hold: prompts, and media of the size that is trained on."""

from typing import cast

from cosmos_rl_core import plugins
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets._base import MediaPlugin, Prompt
from cosmos_rl_core.errors import ConfigError
from flows.planning import costs


def prompts_of(dataset: DatasetOptions) -> tuple[Prompt, ...]:
    """Prompts of one dataset."""
    plugin = plugins.load("datasets", dataset.name)
    with plugins.errors_of("datasets", dataset.name):
        return plugin.prompts(dataset)


def data_of(recipe: Recipe) -> DatasetOptions | None:
    """The media that an algorithm with rewards reads besides its prompts; None where it has none."""
    return getattr(recipe.train.train_policy, "data", None)


def data_prompts_of(recipe: Recipe) -> tuple[tuple[Prompt, ...], str]:
    """Prompts of the algorithm's data, none without, and the digest of the files that its media are read from."""
    policy = recipe.train.train_policy
    if not policy.rewarded:
        return (), _media_plugin(policy.dataset).digest(policy.dataset)
    data, most = data_of(recipe), policy.given_frames[1]
    if data is None and most > 0:
        raise ConfigError(
            f"max_num_conditional_frames = {most} takes the first frames of media: name them in "
            "[train.train_policy.data], or leave it at 0"
        )
    if data is None and costs.needs_of(recipe).data_term is not None:
        raise ConfigError(
            "the loss has a term on media, of weight data_beta: name the media in [train.train_policy.data], or set "
            "data_beta = 0"
        )
    if data is not None and not costs.needs_data(recipe):
        raise ConfigError(
            "nothing reads the media in [train.train_policy.data]: leave them out, or set max_num_conditional_frames, "
            "or the weight of a loss on media if the algorithm has one, above 0"
        )
    return media_of(recipe, data, "train.train_policy.data")


def media_of(recipe: Recipe, data: DatasetOptions | None, place: str) -> tuple[tuple[Prompt, ...], str]:
    """Prompts and digest of prepared media, nothing without; their size must be the one that is trained on."""
    if data is None:
        return (), ""
    plugin = _media_plugin(data)
    diffusers = recipe.policy.diffusers
    with plugins.errors_of("datasets", data.name):
        prompts, digest = plugin.prompts(data), plugin.digest(data)
        found = plugin.Media(data).item(0)[0].shape[:3]
    if found != (expected := (diffusers.train_frames, *diffusers.inference_size)):
        raise ConfigError(
            f"{place} gives media of {_times(found)} (frames, height, width), policy.diffusers trains "
            f"on {_times(expected)}; make its settings equal"
        )
    return prompts, digest


def is_trained_on(
    recipe: Recipe,
    judged_by: DatasetOptions,
    held_out: tuple[tuple[Prompt, ...], str],
    trained: tuple[tuple[Prompt, ...], str],
) -> bool:
    """Whether held-out media are the trained ones: the same files or, where they are generated, some of their prompts.

    Both as prompts and digest.
    """
    media = recipe.train.train_policy.dataset if not recipe.train.train_policy.rewarded else data_of(recipe)
    if media is None or media.name != judged_by.name or held_out[1] != trained[1]:
        return False
    return bool(held_out[1]) or bool({p.id for p in held_out[0]} & {p.id for p in trained[0]})


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(str(length) for length in shape)


def _media_plugin(dataset: DatasetOptions) -> MediaPlugin:
    plugin = plugins.load("datasets", dataset.name)
    if not hasattr(plugin, "Media"):
        able = [name for name in plugins.known("datasets") if hasattr(plugins.load("datasets", name), "Media")]
        raise ConfigError(f"the dataset {dataset.name!r} has prompts only; with media: {', '.join(able)}")
    return cast("MediaPlugin", plugin)
