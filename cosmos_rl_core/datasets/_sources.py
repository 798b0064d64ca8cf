"""The sources of one dataset: plugins that list files of media and captions, and their units under one name each."""

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import BinaryIO, cast

from cosmos_rl_core import canonical, plugins
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets import _copies
from cosmos_rl_core.datasets._base import Item, ItemError, Picture, Reference, Source
from cosmos_rl_core.datasets._references import reference_of
from cosmos_rl_core.errors import ConfigError, DatasetError, mistakes_in, visible

CHANGED = "has changed since it was indexed; prepare the dataset again"


def source_of(options: DatasetOptions) -> Source:
    """Return the source that options describe. Raises :class:`ConfigError` if the plugin's files are not indexed."""
    plugin = plugins.load("datasets", options.name)
    if not hasattr(plugin, "Source"):
        able = [name for name in plugins.known("datasets") if hasattr(plugins.load("datasets", name), "Source")]
        raise ConfigError(f"the dataset {options.name!r} is no source of files; sources: {', '.join(able)}")
    with plugins.errors_of("datasets", options.name):
        return cast("Source", plugin.Source(options))


def stamps(sources: Mapping[str, Source]) -> dict[str, str]:
    """Return the stamp of each unit of all sources. A unit is named ``<name of the source>/<its name there>``."""
    return {f"{name}/{unit}": stamp for name, source in sources.items() for unit, stamp in source.stamps().items()}


def digest(found: dict[str, str]) -> str:
    """Return the sha256 (hex) over the stamps of all units.

    Raises :class:`ConfigError` for units whose names are no text, which no record can hold.
    """
    if wrong := [visible(unit) for unit in found if not _is_text(unit)]:
        raise mistakes_in("names of files that are not UTF-8; rename the files", wrong)
    return canonical.digest(found)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def place_of(sources: Mapping[str, Source], unit: str) -> tuple[Source, str]:
    """Return the source of a unit, and the unit's name there."""
    name, _, there = unit.partition("/")
    return sources[name], there


def references_of(source: Source, item: Item) -> list[tuple[Reference, bytes]]:
    """Return the references of an item that its source has just listed, each with its bytes; most items have none.

    Raises :class:`ItemError` for one that cannot be used.
    """
    read: Callable[[Item], list[Picture]] | None = getattr(source, "references", None)
    found: list[tuple[Reference, bytes]] = []
    for name, data in read(item) if read else ():
        try:
            found.append((reference_of(data), data))
        except ValueError as error:
            raise ItemError(f"{name}: {error}") from error
    return found


def opened(sources: Mapping[str, Source], unit: str, name: str, medium: str) -> BinaryIO:
    """Open a local copy of the medium of an item, whose sources have been listed.

    Raises :class:`DatasetError` unless its bytes have the digest ``medium``, which they had when it was indexed.
    """
    source, _ = place_of(sources, unit)
    try:
        with closing(source.open(name)) as file:
            copy, found, _ = _copies.copied(file)
    except (FileNotFoundError, KeyError) as error:
        raise DatasetError(f"{unit} {CHANGED}") from error
    if found != medium:
        copy.close()
        raise DatasetError(f"{unit} {CHANGED}")
    return copy
