"""Reading of TOML files as plain values, with overrides and a cluster profile, and strict building of sections."""

import difflib
import json
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from cosmos_rl_core import shipped
from cosmos_rl_core.config import toml
from cosmos_rl_core.config.base import Section, expanded
from cosmos_rl_core.config.policy import NOT_IN_LORA
from cosmos_rl_core.errors import ConfigError, Mistakes

Values = dict[str, Any]
"""Plain values of a TOML file."""


def with_changes(
    values: Values, file: Path, overrides: Sequence[str], cluster: str | None, mistakes: Mistakes | None = None
) -> Values:
    """Return the values of ``file`` with overrides and a cluster profile. Plugins and recipes get absolute paths.

    Raises, or adds to ``mistakes``, like :func:`cosmos_rl_core.recipes.reading.read_values`.
    """
    _place_files(values, file.parent)
    found = Mistakes()
    if cluster is not None:
        values |= found.catch(profile_of, cluster) or {}
    for override in overrides:
        found.catch(_apply, values, override)
    if mistakes is not None:
        mistakes.extend(found)
    elif found:
        raise ConfigError("\n".join(found))
    _place_files(values, Path.cwd())
    return values


def _place_files(values: Values, folder: Path) -> None:
    """Resolve relative paths of plugins and recipes against ``folder``. Other values are left for validation."""
    for key in ("plugins", "recipes"):
        if isinstance(paths := values.get(key), list):
            inside = [isinstance(at, str) and not at.startswith(shipped.PREFIX) for at in paths]
            values[key] = [str(folder / expanded(at)) if there else at for at, there in zip(paths, inside, strict=True)]


def profile_of(cluster: str) -> Values:
    """Return the plain values of a cluster profile. Raises :class:`ConfigError` unless it holds ``[launch]`` alone."""
    file = shipped.path_of(cluster, "cluster profile")
    profile = read_toml(file, "deployments/clusters/local.toml")
    if profile.keys() != {"launch"}:
        raise ConfigError(f"{cluster} must hold the table [launch] only, found {sorted(profile)}")
    return profile


def rewards_in(path: str) -> list[Any]:
    """Return the ``[[rewards]]`` of a file. Raises :class:`ConfigError` if it holds anything else."""
    found = read_toml(path, "a file with [[rewards]] as in a recipe")
    if found.keys() != {"rewards"}:
        raise ConfigError(f"{path} must hold [[rewards]] only, found {sorted(found)}")
    return found["rewards"]


def read_toml(path: str | Path, example: str, mistakes: Mistakes | None = None) -> Values:
    """Read a TOML file. Raises :class:`ConfigError`, which names ``example``, if it is missing or not TOML.

    Values beyond the limits of :mod:`cosmos_rl_core.config.toml` are cut, with a message for each in ``mistakes``;
    without ``mistakes`` they raise, too.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"no file at {path}; expected a TOML file such as {example}")
    try:
        values = toml.parsed(file.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if beyond := toml.cut_to_limits(values):
        message = f"{path}: {toml.beyond_limits(beyond)}"
        if mistakes is None:
            raise ConfigError(message)
        mistakes.append(message)
    return values


_S = TypeVar("_S", bound=Section)


def validated(model: type[_S], values: Any, source: str, more: Callable[[_S], Iterator[str]] | None = None) -> _S:
    """Build a section from plain values, strictly typed. Raises one :class:`ConfigError` with all mistakes.

    The mistakes that ``more`` finds in a section are added to its own.
    """
    try:
        # Through JSON, whose strict mode also accepts arrays for tuples and whole numbers for floats.
        text = json.dumps(values, default=str)
        return model.model_validate_json(text, strict=True, context=more)
    except ValidationError as error:
        mistakes = [line for item in error.errors() for line in _line(item, model).splitlines()]
        raise ConfigError("\n  ".join([f"{source}:", *mistakes])) from error


def _line(item: Any, model: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in item["loc"] if part != "[key]")
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown key{_hint(item['loc'], model)}"
    message = item["msg"].removeprefix("Value error, ")
    found = "" if item["type"] in {"missing", "value_error"} else f" (found {toml.shortened(item['input'])})"
    return f"{where}: {message}{found}".removeprefix(": ")


def _hint(location: tuple[Any, ...], model: type[BaseModel]) -> str:
    name, known = str(location[-1]), _known_fields(location, model)
    if name in MOVED:
        return f"; {MOVED[name]}"
    if close := difflib.get_close_matches(name, known, n=1):
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if known else ""


_OF_SAMPLER = ("solver_option", "s_churn", "s_noise", "s_t_min", "s_t_max")
MOVED = {
    "enabled": "the algorithm is train.train_policy.type",
    "num_rollout": "it is rollout.n_generation here, with any number of GPUs",
    "sample_steps": "it is policy.diffusers.sample.num_steps here",
    "guidance": "it is policy.diffusers.sample.guidance_scale here, which is 1 + guidance",
    "reward_config": "each reward is a [[rewards]] table; the algorithm has adv_clip_min and adv_clip_max",
    **{name: f"it is policy.diffusers.sample.{name} here" for name in _OF_SAMPLER},
    **NOT_IN_LORA,
    "rank_pattern": "it is policy.lora.r_pattern here, as in cosmos-rl",
}
"""Messages for settings of cosmos-rl that have another name here, or no counterpart."""


def _known_fields(location: tuple[Any, ...], model: type[BaseModel]) -> list[str]:
    """Return the fields of the table that holds ``location``, over all plugins if the table is a plugin's."""
    models = [model]
    for part in location[:-1]:
        if isinstance(part, str):
            fields = [known.model_fields[part] for known in models if part in known.model_fields]
            models = [section for field in fields for section in _sections(field.annotation)]
    return sorted({name for known in models for name in known.model_fields})


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return [section for argument in get_args(annotation) for section in _sections(argument)]
    below = [section for child in annotation.__subclasses__() for section in _sections(child)]
    return [annotation, *below]


def _apply(values: Values, override: str) -> None:
    path, separator, text = override.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys) or len(keys) > toml.MAX_DEPTH:
        raise ConfigError(f"cannot read override {toml.shortened(override)}; expected section.key=value")
    try:
        value = toml.parsed(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word
    except ValueError as error:
        raise ConfigError(f"override {toml.shortened(override)}: {error}") from error
    if beyond := toml.cut_to_limits({path.strip(): value}):
        raise ConfigError(f"override {toml.shortened(override)}: {toml.beyond_limits(beyond)}")
    table = values
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {toml.shortened(override)}: {key} is not a table")
    table[keys[-1]] = value
