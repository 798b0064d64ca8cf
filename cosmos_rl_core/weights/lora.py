"""Which modules get an adapter, and of which rank: a function of their names, torch-free, so that a plan can tell."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from cosmos_rl_core.config.policy import ALL_LINEAR, LoraConfig
from cosmos_rl_core.errors import ConfigError


def targets(config: LoraConfig, linear: Collection[str]) -> tuple[str, ...]:
    """The suffixes that name the adapted modules, out of the names of all ``linear`` ones."""
    return tuple(sorted(linear)) if config.target_modules == (ALL_LINEAR,) else config.target_modules


def peft_settings(config: LoraConfig, suffixes: Collection[str]) -> dict[str, Any]:
    """What peft's ``LoraConfig`` is told, and readers of an exported file; what has its default there is left out.

    Dropout is no part of it: it is no property of the weights, and training does its own.
    """
    settings = {"r": config.r, "lora_alpha": config.lora_alpha, "target_modules": list(suffixes)}
    special = {
        "use_rslora": config.use_rslora,
        "rank_pattern": config.r_pattern,
        "alpha_pattern": config.alpha_pattern,
    }
    return settings | {name: value for name, value in special.items() if value}


def rank(config: LoraConfig, module: str) -> int:
    """Rank of the adapter of a module; :func:`check_patterns` makes sure that at most one pattern names it."""
    return next((r for pattern, r in config.r_pattern.items() if _names(pattern, module)), config.r)


def check_patterns(config: LoraConfig, adapted: Collection[str]) -> None:
    """Raise :class:`ConfigError` if a pattern names no adapted module, or two of one table name the same.

    peft would apply the first of the two, but the tables of a recipe have no order.
    """
    mistakes: list[str] = []
    for field, patterns in (("r_pattern", config.r_pattern), ("alpha_pattern", config.alpha_pattern)):
        named = {module: [p for p in sorted(patterns) if _names(p, module)] for module in sorted(adapted)}
        mistakes += [
            f"policy.lora.{field}: {pattern!r} names none of the {len(adapted)} adapted modules, e.g. {min(adapted)}"
            for pattern in sorted(patterns.keys() - {p for found in named.values() for p in found})
        ]
        mistakes += [
            f"policy.lora.{field}: {' and '.join(map(repr, found))} both name {module}; let one of them leave it out"
            for module, found in named.items()
            if len(found) > 1
        ][:1]
    if mistakes:
        raise ConfigError("; ".join(mistakes))


def check_ranks(config: LoraConfig, adapted: Mapping[str, tuple[int, ...]]) -> None:
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
    """As peft matches ``rank_pattern``: the whole name, or its end after a dot."""
    return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
