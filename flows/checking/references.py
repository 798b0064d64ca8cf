"""Checks of the pictures and clips that prompts refer to, against the model and the rewards."""

from collections.abc import Iterator, Sequence
from itertools import chain

from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ConfigError, counted
from cosmos_rl_core.pipelines import directories, sizes
from cosmos_rl_core.pipelines.sizes import Pictures
from cosmos_rl_core.pipelines.spec import CONDITIONAL_LATENTS
from flows.sizes import costs
from flows.sizes.basis import largest


def check(
    recipe: Recipe, trained: Sequence[Prompt], evaluated: Sequence[Prompt], media: Sequence[Sequence[Prompt]]
) -> Pictures:
    """Return the sizes of the references of the prompt whose references have the most tokens.

    ``media`` has the captions of media, trained on and held out. Raises :class:`ConfigError` with all reasons why the
    model or a reward cannot take the references.
    """
    path, prompts, is_given = costs.base_path(recipe), [*trained, *evaluated], recipe.train.train_policy.given_frames[1]
    every = [*prompts, *chain(*media)]
    # If media give the first frames, only evaluated prompts have references, so they are counted by themselves.
    together = (trained, evaluated, *media) if is_given else (prompts, *media)
    mistakes = [mistake for some in together for mistake in _of_numbers(path, some)]
    if not mistakes:
        mistakes += [*_of_kinds(recipe, path, every), *_of_sizes(path, every), *_of_data_term(recipe, path, media[0])]
    if is_given and any(prompt.references for prompt in (*trained, *chain(*media))):
        mistakes.append("max_num_conditional_frames gives frames of media, and there are references too; use only one")
    if not all(prompt.references for prompt in prompts):
        needing = [one.fn.label for one in recipe.rewards if one.fn.uses_references == "needed"]
        mistakes += [f"{label} compares with references; the prompts have none" for label in needing]
    if mistakes:
        raise ConfigError("\n  ".join(mistakes))
    return largest(path, every)


def _of_numbers(path: str, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a mistake if prompts that are trained on together have numbers of references that the model cannot take."""
    name, takes = directories.pipeline_class(path), directories.spec(path).references
    fewest, most = (takes.fewest, takes.most) if takes else (0, 0)
    if wrong := [prompt for prompt in prompts if not fewest <= len(prompt.references) <= most]:
        count, example = counted(len(wrong), "prompt"), f"e.g. {wrong[0].id}"
        yield (
            f"{name} takes no references; {count} have some, {example}; take them out, or take another base model"
            if most == 0
            else f"{name} takes {fewest} to {most} references; {count} have another number, {example}, which has "
            f"{len(wrong[0].references)}; change the dataset"
        )
    elif len(numbers := {len(prompt.references) for prompt in prompts}) > 1:
        some = " and ".join(map(str, sorted(numbers)))
        yield f"prompts have {some} references; expected equally many in all that are trained on or evaluated together"


def _of_kinds(recipe: Recipe, path: str, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a mistake if clips are given to a model of pictures, or if references leave nothing to generate."""
    known = {one.digest: one for prompt in prompts for one in prompt.references}
    if not known:
        return
    takes = directories.spec(path).references
    assert takes is not None, "numbers of references are checked before"
    clips = [reference.place for reference in known.values() if reference.frames > 1]
    if clips and not takes.clips:
        yield f"{clips[0]} is a clip; {directories.pipeline_class(path)} takes pictures as references"
        return
    size, frames = recipe.policy.diffusers.inference_size, recipe.policy.diffusers.train_frames
    given = max(reference.frames for reference in known.values())
    entries = takes.entries(directories.settings(path, "transformer"), sizes.latent_shape(path, size, frames))
    if frames <= given and CONDITIONAL_LATENTS in entries:
        what = f"a clip gives the first {given} frames" if given > 1 else "a picture is the first frame"
        yield f"policy.diffusers.train_frames = {frames}: {what}, which leaves none to generate; raise it"


def _of_data_term(recipe: Recipe, path: str, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a mistake if a loss on media next to rewards would get references of several shapes; it takes one."""
    if not recipe.train.train_policy.rewarded or costs.needs_of(recipe).data_term is None:
        return
    shapes = {sizes.reference_tokens(path, [(one.height, one.width) for one in p.references]) for p in prompts}
    if len(shapes) > 1:
        yield (
            f"references of media in [train.train_policy.data] have {len(shapes)} shapes; the loss on media takes one: "
            "scale or crop them to one size"
        )


def _of_sizes(path: str, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield the references whose size the model does not take."""
    known = {one.digest: one for prompt in prompts for one in prompt.references}
    for reference in known.values():
        try:
            sizes.reference_tokens(path, [(reference.height, reference.width)])
        except ConfigError as error:
            yield f"{reference.place}: {error}"


def unread(recipe: Recipe, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a warning if nothing that trains looks at the references of the prompts."""
    trained = [one.fn for one in recipe.rewards if one.role == "train"]
    ignored = trained and all(one.uses_references == "ignored" for one in trained)
    if ignored and any(prompt.references for prompt in prompts):
        labels = ", ".join(one.label for one in trained)
        yield f"no reward that trains looks at the prompts' references ({labels} ignore them)"
