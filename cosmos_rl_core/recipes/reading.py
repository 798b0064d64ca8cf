"""Recipes and cluster profiles from TOML files, with all mistakes at once. Files of cosmos-rl are translated."""

import importlib
from collections.abc import Sequence

from cosmos_rl_core import shipped
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.reading import Values, profile_of, read_toml, validated, with_changes
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.errors import ConfigError, Mistakes
from cosmos_rl_core.recipes import effects


def read_values(
    path: str, overrides: Sequence[str] = (), cluster: str | None = None, mistakes: Mistakes | None = None
) -> Values:
    """Return the plain values of a TOML recipe with overrides ``a.b.c=value`` (TOML values; bare words are strings).

    Files of cosmos-rl are translated first. ``cluster`` is a TOML file whose ``[launch]`` replaces the recipe's. Raises
    :class:`ConfigError` if the file is missing or not TOML, or if a key of cosmos-rl cannot be translated. Mistakes in
    overrides and in ``cluster``, and values beyond the limits of TOML files, are added to ``mistakes``, so that the
    caller can look for more; without ``mistakes`` they raise :class:`ConfigError`.
    """
    file = shipped.path_of(path, "recipe")
    # Imported here, because only planning reads recipes: a status does not.
    translated = importlib.import_module("cosmos_rl_core.importers.translation").translated
    values = translated(read_toml(file, shipped.EXAMPLE, mistakes), path)
    return with_changes(values, file, overrides, cluster, mistakes)


def launch_of(cluster: str) -> LaunchConfig:
    """Read a cluster profile. Raises :class:`ConfigError` if the file is missing or not valid."""
    launch = validated(LaunchConfig, profile_of(cluster)["launch"], cluster)
    if mistakes := list(effects.of_launch(launch)):
        raise ConfigError("\n  ".join([f"{cluster}:", *mistakes]))
    return launch


def check(values: Values, source: str) -> Recipe:
    """Build a recipe from plain values, strictly typed. Raises one :class:`ConfigError` with all mistakes."""
    recipe, idle = checked(values, source)
    if idle:
        raise ConfigError("\n  ".join([f"{source}:", *idle]))
    return recipe


def checked(values: Values, source: str) -> tuple[Recipe, list[str]]:
    """Build a recipe like :func:`check`, and return it with a sentence for each setting without effect."""
    recipe = validated(Recipe, values, source, effects.without_effect)
    return recipe, list(effects.without_effect(recipe))
