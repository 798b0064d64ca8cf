"""The prompts of several datasets. Every iteration takes a share of each by weight.

On average an iteration takes exactly its weight's share of prompts from each set, and each time that number rounded up
or down. Within a set every prompt is used once before any is used again. An evaluation uses all prompts once, whatever
the weights.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from cosmos_rl_core import plugins
from cosmos_rl_core.config.base import Section
from cosmos_rl_core.config.train import AnyDataset, DatasetOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.datasets._checked import checked_prompts
from cosmos_rl_core.errors import ConfigError


class Set(Section):
    """A set of the mixture."""

    weight: float = Field(default=1.0, gt=0)
    """Share of an iteration's prompts, relative to the weights of the other sets."""
    dataset: AnyDataset
    """The dataset of prompts."""


class Options(DatasetOptions):
    """Sets and their weights."""

    name: Literal["mixture"] = "mixture"  # pyright: ignore[reportIncompatibleVariableOverride]

    sets: tuple[Set, ...] = Field(min_length=1)
    """A prompt of several sets belongs to the first of them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(each.dataset.name == self.name for each in self.sets):
            raise ValueError("a mixture in a mixture: name its sets in the outer one, with their weights multiplied")
        return self

    @property
    def follows(self) -> tuple[str, ...]:
        """Return the sentences of all sets about data that may change, each once."""
        return tuple(dict.fromkeys(said for each in self.sets for said in each.dataset.follows))


def prompts(options: Options) -> tuple[Prompt, ...]:
    """Return the prompts of all sets, set after set. Raises one :class:`ConfigError` with every mistake in them."""
    return tuple(prompt for _, prompts in weighted(options) for prompt in prompts)


def weighted(options: Options) -> tuple[tuple[float, tuple[Prompt, ...]], ...]:
    """Return weight and prompts of each set; no prompt is in two. Raises like :func:`prompts`."""
    found: list[tuple[float, tuple[Prompt, ...]]] = []
    known: set[str] = set()
    mistakes: list[str] = []
    for number, each in enumerate(options.sets, 1):
        name = each.dataset.name
        plugin = plugins.load("datasets", name)
        if not hasattr(plugin, "prompts"):
            mistakes.append(
                f"set {number} of the mixture: the dataset {name!r} has media and no prompts; expected one of: "
                f"{_able()}"
            )
            continue
        try:
            with plugins.errors_of("datasets", name):
                every: tuple[Prompt, ...] = plugin.prompts(each.dataset)
                every = every if name in plugins.own("datasets") else checked_prompts(every)
        except ConfigError as error:
            mistakes.append(str(error))
            continue
        own = tuple(prompt for prompt in every if prompt.id not in known)
        if not own:
            mistakes.append(f"set {number} of the mixture ({name}) has no prompt that earlier sets lack; leave it out")
        known |= {prompt.id for prompt in own}
        found.append((each.weight, own))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return tuple(found)


def _able() -> str:
    """Return the names of the datasets that may be sets of a mixture."""
    names = (name for name in plugins.known("datasets") if name != "mixture")
    return ", ".join(name for name in names if hasattr(plugins.load("datasets", name), "prompts"))
