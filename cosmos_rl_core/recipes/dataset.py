"""The file of a dataset: where its media and captions come from, and which of them are used."""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, StringConstraints, model_validator

from cosmos_rl_core import outside_plugins, shipped
from cosmos_rl_core.config.base import NOT_IDENTITY, Section
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.reading import read_toml, validated, with_changes
from cosmos_rl_core.config.train import AnyCaptioner, AnyDataset
from cosmos_rl_core.errors import ConfigError, Mistakes, mistakes_in
from cosmos_rl_core.recipes.reading import check, read_values

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,47}$")]
"""At most 48 characters: shorter than the digests that name other folders of the store, so that no name equals one."""


class DatasetConfig(Section):
    """A dataset that is indexed once, shared by runs, and added to when its files change."""

    name: Name
    """Name of the dataset in its store."""
    sources: dict[Name, AnyDataset] = Field(min_length=1)
    """Plugins that list files of media and captions, by names of your own. An item keeps the name of its source."""
    captioned: bool = True
    """Whether items without a caption are left out, unless ``[caption]`` writes it."""
    caption: AnyCaptioner | None = Field(default=None, json_schema_extra=NOT_IDENTITY)
    """Captioner of items that have no caption. A change of the captioner captions them again, and indexes no file
    again."""
    min_size: tuple[PositiveInt, PositiveInt] = (1, 1)
    """Least height and width of a medium in pixels. Smaller ones are left out."""
    min_frames: int = Field(default=1, ge=1)
    """Fewest frames of a medium. Shorter ones are left out."""
    max_frames: int | None = Field(default=None, ge=1, json_schema_extra={"neutral": None})
    """Most frames of a medium. Longer ones are left out. Default: any number."""
    max_seconds: float | None = Field(default=None, gt=0, json_schema_extra={"neutral": None})
    """Longest duration of a video in seconds: its frames by its frames per second. Longer ones are left out. Default:
    any duration."""
    duplicates: Literal["keep", "drop"] = Field(default="keep", json_schema_extra={"neutral": "keep"})
    """``drop`` leaves out an item whose medium (the same bytes) is already there under the same caption, in any source.
    It is used once the other item is gone. A medium with several captions is kept under each of them."""
    max_left_out: float = Field(default=0.05, ge=0.0, le=1.0, json_schema_extra=NOT_IDENTITY)
    """Largest share of all items that may be left out as damaged or too small; more is an error. Duplicates do not
    count."""
    recipes: tuple[str, ...] = Field(default=(), json_schema_extra=NOT_IDENTITY)
    """Recipes that train on this dataset, whose text embeddings and latents are made too. Relative paths start at the
    file that names them."""
    plugins: tuple[str, ...] = Field(default=(), json_schema_extra=NOT_IDENTITY)
    """Files or folders of plugins outside the package. Relative paths start at the file that names them."""
    launch: LaunchConfig = Field(default=LaunchConfig(), json_schema_extra=NOT_IDENTITY)
    """Where and how its stages run."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.caption is not None and not self.captioned:
            raise ValueError("captioned = false keeps items without a caption, and [caption] writes them; remove one")
        if self.max_frames is not None and self.max_frames < self.min_frames:
            raise ValueError(f"max_frames = {self.max_frames} is less than min_frames = {self.min_frames}")
        return self


Misfits = Callable[[DatasetConfig], Sequence[str]]
"""Function that returns a message for each stage that does not fit the devices."""


def read_dataset(
    path: str, overrides: Sequence[str] = (), cluster: str | None = None, misfits: Misfits | None = None
) -> DatasetConfig:
    """Read the TOML file of a dataset, with overrides ``a.b.c=value``. Import the plugins from outside that it names.

    ``misfits`` checks that the stages fit the devices. Raises one :class:`ConfigError` with all mistakes.
    """
    file, mistakes = shipped.path_of(path, "dataset"), Mistakes()
    values = read_toml(file, "configs/data/local.toml or package:data/local", mistakes)
    values = with_changes(values, file, overrides, cluster, mistakes)
    # First, because the plugins of each file take the place of all found before.
    for recipe in _texts(values.get("recipes")):
        _check_recipe(recipe, mistakes)
    mistakes.catch(outside_plugins.find, _texts(values.get("plugins")))
    config = mistakes.catch(validated, DatasetConfig, values, path)
    if config is not None and misfits is not None and (wrong := misfits(config)):
        mistakes.append(str(mistakes_in(path, wrong)))
    if mistakes or config is None:
        raise ConfigError("\n".join(mistakes))
    return config


def _texts(values: object) -> list[str]:
    """Return the strings in ``value`` if it is a list. Validation reports its other values."""
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _check_recipe(path: str, mistakes: Mistakes) -> None:
    """Add the mistakes of a recipe that are found without a snapshot."""
    if (values := mistakes.catch(read_values, path, mistakes=mistakes)) is not None:
        mistakes.catch(outside_plugins.find, _texts(values.get("plugins")))
        mistakes.catch(check, values, path)
