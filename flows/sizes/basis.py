"""Facts of a run, in addition to its recipe, that decide its memory and time."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.pipelines import sizes
from cosmos_rl_core.pipelines.sizes import Pictures


class Basis(NamedTuple):
    """Facts of a run that decide the memory of its stages."""

    below: LoraConfig | None = None
    """Settings of the frozen adapter below the trained one, if there is one."""
    pictures: Pictures = ()
    """Height and width of each reference of the prompt whose references have the most tokens in the run."""
    generates: bool = True
    """Whether the run makes rollouts. If not, an update also holds the policy that made the stored rollouts."""


PLAIN = Basis()
"""A run that begins with the base model, makes rollouts, and has no references."""


def largest(pipeline: str, prompts: Iterable[Prompt], known: Iterable[Pictures] = ()) -> Pictures:
    """Return the sizes of the references of the prompt whose references have the most tokens; empty without any.

    ``known`` are the largest sizes of other prompts. Raises :class:`ConfigError` for a size that the model refuses.
    """
    found = _by_tokens(pipeline, prompts, known)
    return found[-1][0] if found else ()


def typical(pipeline: str, prompts: Iterable[Prompt]) -> Pictures:
    """Return the sizes of the references of the prompt with the median number of reference tokens."""
    found, seen = _by_tokens(pipeline, prompts), 0
    middle = sum(count for _, count in found) / 2
    for pictures, count in found:
        seen += count
        if seen >= middle:
            return pictures
    return ()


def _by_tokens(pipeline: str, prompts: Iterable[Prompt], known: Iterable[Pictures] = ()) -> list[tuple[Pictures, int]]:
    """Return the sizes of references and how many prompts have them, fewest tokens first."""
    counts = Counter(tuple((one.height, one.width) for one in prompt.references) for prompt in prompts)
    counts.update(tuple(pictures) for pictures in known if pictures)
    if [*counts] == [()]:
        return []
    return sorted(counts.items(), key=lambda item: (sizes.num_reference_tokens(pipeline, item[0]), item[0]))
