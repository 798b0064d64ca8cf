"""Adapted modules and ranks of LoRA, as functions of module names. Imports no torch, so that plans can check them."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from cosmos_rl_core.config.policy import ALL_LINEAR, LoraConfig
from cosmos_rl_core.errors import ConfigError, counted


def targets(config: LoraConfig, linear: Collection[str]) -> tuple[str, ...]:
    """Return the suffixes that name the adapted modules, given the names of all ``linear`` modules."""
    return tuple(sorted(linear)) if config.target_modules == (ALL_LINEAR,) else config.target_modules


def peft_settings(config: LoraConfig, suffixes: Collection[str]) -> dict[str, Any]:
    """Return the arguments of peft's ``LoraConfig`` that differ from its defaults; exports contain them too.

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


def alpha(config: LoraConfig, module: str) -> float:
    """Return the alpha of a module's adapter."""
    return next((a for pattern, a in config.alpha_pattern.items() if _names(pattern, module)), config.lora_alpha)


def scale(config: LoraConfig, module: str) -> float:
    """Return the factor on the output of a module's adapter."""
    r = rank(config, module)
    return alpha(config, module) / (math.sqrt(r) if config.use_rslora else r)


def of_modules(
    ranks: Mapping[str, int], alphas: Mapping[str, float], suffixes: Collection[str], *, use_rslora: bool = False
) -> LoraConfig:
    """Return settings that give each module its own rank and alpha. ``suffixes`` must name exactly these modules."""
    r, lora_alpha = _most_common(ranks), _most_common(alphas)
    return LoraConfig(
        r=int(r),
        lora_alpha=lora_alpha,
        target_modules=tuple(sorted(suffixes)),
        use_rslora=use_rslora,
        r_pattern={_only(name): own for name, own in sorted(ranks.items()) if own != r},
        alpha_pattern={_only(name): own for name, own in sorted(alphas.items()) if own != lora_alpha},
    )


def suffixes_of(adapted: Collection[str], weights: Collection[str]) -> tuple[str, ...]:
    """Return the shortest suffixes that name the ``adapted`` modules and no other module that has ``weights``.

    Raises :class:`ConfigError` if the name of an adapted module is also the end of the name of one that is not adapted.
    """
    words = [name.split(".") for name in weights]
    others = {".".join(each[:count]) for each in words for count in range(1, len(each))} - set(adapted)
    found: set[str] = set()
    for module in adapted:
        names = module.split(".")
        # A number alone would also name modules without weights.
        ends = [".".join(names[-count:]) for count in range(1, len(names) + 1) if not names[-count].isdigit()]
        fitting = (end for end in ends if not any(f".{other}".endswith(f".{end}") for other in others))
        if (shortest := next(fitting, None)) is None:
            raise ConfigError(f"no suffix names the module {module} without others that have no adapter")
        found.add(shortest)
    return tuple(sorted(found))


def joined(below: LoraConfig, above: LoraConfig, modules: Collection[str], others: Collection[str]) -> LoraConfig:
    """Return the settings of the one adapter that equals ``below`` on ``modules`` plus ``above`` on ``others``.

    Its ranks are sums, and every scale is 1: :class:`cosmos_rl_core.weights.joined.Joined` scales the tensors.
    """
    both = ((below, modules), (above, others))
    names = {*modules, *others}
    ranks = {name: sum(rank(config, name) for config, adapted in both if name in adapted) for name in names}
    suffixes = {*below.target_modules, *above.target_modules}
    suffixes = {ALL_LINEAR} if ALL_LINEAR in suffixes else suffixes
    return of_modules(ranks, {name: float(r) for name, r in ranks.items()}, suffixes)


def differences(found: LoraConfig, wanted: LoraConfig, linear: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield a sentence for each difference between ``found`` and the recipe's adapter: modules, ranks, strengths."""
    here, there = set(adapted(found, linear)), set(adapted(wanted, linear))
    for names, owner in ((here - there, "it alone"), (there - here, "[policy.lora] alone")):
        if names:
            yield f"{owner} adapts {counted(len(names), 'module')}, e.g. {min(names)}"
    shared = sorted(here & there)
    for what, of in (("rank", rank), ("alpha", alpha)):
        if unequal := [name for name in shared if of(found, name) != of(wanted, name)]:
            name = unequal[0]
            mine, asked = (f"{of(config, name):g}" for config in (found, wanted))
            yield f"its {what} is {mine}, [policy.lora] says {asked} ({counted(len(unequal), 'module')}, e.g. {name})"
    if shared and found.use_rslora != wanted.use_rslora:
        yield f"its use_rslora is {str(found.use_rslora).lower()}, [policy.lora] says the opposite"


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


def _most_common(numbers: Mapping[str, float]) -> float:
    return max((count, number) for number, count in Counter(numbers.values()).items())[1]


def _only(module: str) -> str:
    """Return the pattern of one module: peft reads other patterns as ends of names too."""
    return f"^{re.escape(module)}"


def _names(pattern: str, module: str) -> bool:
    """Return whether a pattern matches the whole name or its end after a dot, like in peft's ``rank_pattern``."""
    return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
