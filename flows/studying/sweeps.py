"""Sweeps: every combination of values of a few settings."""

from collections.abc import Iterator, Sequence
from itertools import product

from cosmos_rl_core.errors import ConfigError

_OPEN, _CLOSE, _QUOTES = "[{(", "]})", "\"'"


def combinations(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """Return every combination of sweeps such as ``train.optm_lr=1e-4,3e-4``, each as settings ``section.key=value``.

    One without settings if there are no sweeps. Raises :class:`ConfigError` for a sweep that has no key or no value,
    and for a key that is swept twice.
    """
    axes = [_axis(sweep) for sweep in sweeps]
    keys = [axis[0].partition("=")[0] for axis in axes]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ConfigError(f"{', '.join(twice)} is swept twice; give all of its values at once")
    return [*product(*axes)]


def label(settings: Sequence[str]) -> str:
    """Return settings in short, such as ``optm_lr=3e-4``; ``as it is`` for none."""
    named = (setting.partition("=") for setting in settings)
    return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, _, value in named) or "as it is"


def _axis(sweep: str) -> list[str]:
    key, _, values = sweep.partition("=")
    found = [*_values(values)]
    if not key.strip() or not all(found):
        raise ConfigError(f"sweep {sweep!r}: expected section.key=value,value")
    return [f"{key.strip()}={value}" for value in dict.fromkeys(found)]


def _values(text: str) -> Iterator[str]:
    """Yield the values between commas that are not inside of brackets or quotes."""
    depth, quote, value = 0, "", ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in _QUOTES:
            quote = letter
        depth += (letter in _OPEN) - (letter in _CLOSE) if not quote else 0
        if letter == "," and not depth and not quote:
            yield value.strip()
            value = ""
        else:
            value += letter
    yield value.strip()
