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
    """Raise :class:`ConfigError` if a pattern names no adapted module, or two of a kind name the same.

    peft would take the first of two; in a recipe, tables have no order.
    """
    mistakes = [
        mistake
        for field, patterns in (("r_pattern", config.r_pattern), ("alpha_pattern", config.alpha_pattern))
        for mistake in _mistakes(field, patterns, adapted)
    ]
    if mistakes:
        raise ConfigError("; ".join(mistakes))


def check_ranks(config: LoraConfig, adapted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise :class:`ConfigError` if an adapter's rank is above what its matrix can have, the smaller of its sides.

    ``adapted`` is the shape of each adapted matrix.
    """
    beyond = sorted(module for module, shape in adapted.items() if rank(config, module) > min(shape))
    if not beyond:
        return
    shown = [_beyond(config, module, adapted[module]) for module in beyond[:3]]
    more = f" and {len(beyond) - 3} more" if len(beyond) > 3 else ""
    raise ConfigError(
        f"policy.lora: the rank is above the smaller side of {len(beyond)} of {len(adapted)} adapted matrices: "
        f"{'; '.join(shown)}{more}. Lower r, or give these modules a rank of their own by r_pattern"
    )


def _beyond(config: LoraConfig, module: str, shape: tuple[int, ...]) -> str:
    sides = " x ".join(map(str, shape))
    return f"{module} of {sides} has rank {rank(config, module)}, at most {min(shape)}"


def _mistakes(field: str, patterns: Mapping[str, float], adapted: Collection[str]) -> list[str]:
    named = {pattern: {module for module in adapted if _names(pattern, module)} for pattern in sorted(patterns)}
    lost = [
        f"policy.lora.{field}: {pattern!r} names none of the {len(adapted)} adapted modules, e.g. {min(adapted)}"
        for pattern, modules in named.items()
        if not modules
    ]
    twice = {
        module: found
        for module in sorted(adapted)
        if len(found := [pattern for pattern, modules in named.items() if module in modules]) > 1
    }
    both = [
        f"policy.lora.{field}: {' and '.join(map(repr, found))} both name {module}; let one of them leave it out"
        for module, found in list(twice.items())[:1]
    ]
    return [*lost, *both]


def _names(pattern: str, module: str) -> bool:
    """As peft matches ``rank_pattern``: the whole name, or its end after a dot."""
    return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
