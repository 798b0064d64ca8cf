"""Adapted modules and ranks of LoRA, as functions of module names. Imports no torch, so that plans can check them."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from cosmos_rl_core.config.policy import ALL_LINEAR, LoraConfig
from cosmos_rl_core.errors import ConfigError


def targets(config: LoraConfig, linear: Collection[str]) -> tuple[str, ...]:
    """Return the suffixes that name the adapted modules, given the names of all ``linear`` modules."""
    return tuple(sorted(linear)) if config.target_modules == (ALL_LINEAR,) else config.target_modules


def peft_settings(config: LoraConfig, suffixes: Collection[str]) -> dict[str, Any]:
    """Return the arguments of peft's ``LoraConfig``, which exports also contain, without default values.

    Dropout is left out: it is not a property of the weights, and training has its own implementation.
    """
    settings = {"r": config.r, "lora_alpha": config.lora_alpha, "target_modules": list(suffixes)}
    special = {
        "use_rslora": config.use_rslora,
        "rank_pattern": config.r_pattern,
        "alpha_pattern": config.alpha_pattern,
    }
    return settings | {name: value for name, value in special.items() if value}


def rank(config: LoraConfig, module: str) -> int:
    """Return the rank of a module's adapter. At most one pattern may name the module (:func:`adapted`)."""
    return next((r for pattern, r in config.r_pattern.items() if _names(pattern, module)), config.r)


def adapted(config: LoraConfig, linear: Mapping[str, tuple[int, ...]], others: Collection[str] = ()) -> list[str]:
    """Return the names of the modules that get an adapter, sorted, given the shapes of all ``linear`` modules.

    Raises :class:`ConfigError` for a target that names no linear module or one of the ``others``, for wrong patterns,
    and for a rank above the smaller side of a matrix.
    """
    suffixes = targets(config, linear)
    named = {suffix: [name for name in (*linear, *others) if f".{name}".endswith(f".{suffix}")] for suffix in suffixes}
    if lost := [suffix for suffix, names in named.items() if linear.keys().isdisjoint(names)]:
        # The last name that is not a number, with the numbers after it: ``to_out.0``.
        known = ", ".join(sorted({re.sub(r".*\.(?=\D)", "", name) for name in linear}))
        raise ConfigError(
            f"policy.lora.target_modules: no weight matrix of this transformer ends in {', '.join(lost)}; "
            f"it has {known}"
        )
    found = sorted({name for names in named.values() for name in names})
    if wrong := [name for name in found if name not in linear]:
        raise ConfigError(f"policy.lora.target_modules also name modules that are not linear: {', '.join(wrong[:5])}")
    _check_patterns(config, found)
    _check_ranks(config, {name: linear[name] for name in found})
    return found


def _check_patterns(config: LoraConfig, adapted: Collection[str]) -> None:
    """Raise :class:`ConfigError` if a pattern names no adapted module, or two patterns of a table name the same one.

    peft would apply the first of the two, but the tables of a recipe have no order.
    """
    mistakes: list[str] = []
    tables = {"r_pattern": config.r_pattern, "alpha_pattern": config.alpha_pattern}
    for field, patterns in tables.items():
        named = {module: [p for p in sorted(patterns) if _names(p, module)] for module in sorted(adapted)}
        mistakes += [
            f"policy.lora.{field}: {pattern!r} names none of the {len(adapted)} adapted modules, e.g. {min(adapted)}"
            for pattern in sorted(patterns.keys() - {p for found in named.values() for p in found})
        ]
        mistakes += [
            f"policy.lora.{field}: {' and '.join(map(repr, found))} both name {module}; change one of them"
            for module, found in named.items()
            if len(found) > 1
        ][:1]
    if mistakes:
        raise ConfigError("; ".join(mistakes))


def _check_ranks(config: LoraConfig, adapted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise :class:`ConfigError` if an adapter's rank is larger than the smaller side of its matrix.

    ``adapted`` holds the shape of each adapted matrix.
    """
    beyond = sorted(module for module, shape in adapted.items() if rank(config, module) > min(shape))
    if beyond:
        module, shape = beyond[0], adapted[beyond[0]]
        raise ConfigError(
            f"policy.lora: the rank is above the smaller side of {len(beyond)} of {len(adapted)} adapted matrices, "
            f"e.g. {module} of {' x '.join(map(str, shape))} has rank {rank(config, module)}, at most {min(shape)}. "
            "Lower r, or set the rank of these modules by r_pattern"
        )


def _names(pattern: str, module: str) -> bool:
    """Return whether a pattern matches the whole name or its end after a dot, like in peft's ``rank_pattern``."""
    return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
