"""Checks of the items of a prepared dataset, against the recipe that trains on them."""

import json
from collections.abc import Mapping
from typing import Any

from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.config.train import SnapshotOptions
from cosmos_rl_core.datasets._files import REFERENCES
from cosmos_rl_core.datasets._windows import Windows
from cosmos_rl_core.errors import ConfigError
from stages.artifacts.snapshots import Snapshot


def check_items(items: Any, windows: Windows, where: str) -> None:
    """Raise :class:`ConfigError` if items have no caption, or too few frames."""
    bare, short = items["caption"].isna(), items["frames"] < items["fps"].map(windows.least)
    if bare.any():
        raise ConfigError(
            f"{bare.sum()} items of {where} have no caption, e.g. {items.loc[bare, 'name'].iloc[0]}; caption them, or "
            "leave them out with captioned = true in the file of the dataset"
        )
    if short.any():
        first = items[short].iloc[0]
        raise ConfigError(
            f"{short.sum()} items of {where} have too few frames, e.g. {first['name']} has {first['frames']}, expected "
            f"at least {windows.least(first['fps'])}; leave them out with min_frames in the file of the dataset"
        )


def check_references(items: Any, where: str, sources: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise :class:`ConfigError` for items that name references which were not kept.

    ``sources`` are the options of the dataset's sources, by name.
    """
    bare = items[items["references"].isna()]
    values = bare["metadata"].map(lambda told: json.loads(told).get(REFERENCES))
    lost, named = bare[values.astype(bool)], values[values.astype(bool)]
    if lost.empty:
        return
    # Columns with pictures are kept as references and are no metadata. So in rows, a value here is of another column.
    rows = lost["unit"].str.partition("/")[0].map(lambda name: sources.get(name, {}).get("name") == "hf")
    other = rows.astype(bool) | ~named.map(_are_places).astype(bool)
    if other.any():
        raise ConfigError(
            f"{other.sum()} items of {where} have a column or key `references` without pictures, e.g. "
            f"{lost.loc[other, 'name'].iloc[0]}: {named[other].iloc[0]!r:.80}; rename it in the files of the dataset, "
            "and prepare it again"
        )
    raise ConfigError(
        f"{len(lost)} items of {where} name references that were not kept, e.g. {lost['name'].iloc[0]}: an earlier "
        "version has indexed them; read all files again (cosmos-flows preprocess --verify)"
    )


def _are_places(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def check_first_frames(recipe: Recipe, options: SnapshotOptions, items: Any, snapshot: Snapshot) -> None:
    """Raise :class:`ConfigError` unless indexed first frames have the size of the clips that are trained on."""
    used, size = {*items["unit"].str.partition("/")[0]}, recipe.policy.diffusers.inference_size
    for name in sorted(name for name in used if snapshot.sources.get(name, {}).get("first_frame")):
        where = f"the source {name!r} of {options.dataset!r} has first_frame = true"
        if options.windows_per_item > 1 or options.crop != "centre":
            raise ConfigError(
                f"{where}; leave out windows_per_item and crop, because one clip of a medium begins with it"
            )
        if (*snapshot.sources[name]["size"],) != size:
            raise ConfigError(
                f"{where} and size = {snapshot.sources[name]['size']}, inference_size is {[*size]}; make them equal in "
                "the file of the dataset, and prepare it again"
            )


def check_weights(items: Any, weights: Mapping[str, float], place: str, where: str) -> None:
    """Raise :class:`ConfigError` unless each source that items come from has a weight, and no other has one.

    ``place`` names the dataset in the recipe.
    """
    sources = {*items["unit"].str.partition("/")[0]}
    if weights and sources != weights.keys():
        raise ConfigError(
            f"{place}.weights names {', '.join(sorted(weights))}; the items of {where} that are used come from "
            f"{', '.join(sorted(sources))}: give each of these a weight"
        )
