"""Base of all configuration sections: closed, frozen, without NaN, with an exact identity."""

import json
import os
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import ConfigError

NOT_IDENTITY: dict[str, Any] = {"identity": False}
"""``json_schema_extra`` of a field that decides where or how a run computes, not its result."""

MAX_NAME_BYTES = 255
"""Most bytes of the name of a file or folder on a disk."""
Kept = TypeVar("Kept")
_NO_VALUE = object()
_PLAIN = frozenset((str, int, float, bool, type(None)))


def expanded(path: str) -> str:
    """Return a path with the home directory in place of a ``~`` at its beginning."""
    return os.path.expanduser(path)


def _of_user(path: str) -> str:
    """Return a path like :func:`expanded`. Raises ``ValueError`` for a text that cannot be a path."""
    if "\0" in path:
        raise ValueError("has a zero byte, which no path has")
    if "://" not in path and any(len(name.encode()) > MAX_NAME_BYTES for name in path.split("/")):
        raise ValueError(f"has a name of more than {MAX_NAME_BYTES} bytes, which no path has")
    return expanded(path)


UserPath = Annotated[str, AfterValidator(_of_user)]
"""A path, or a name or URL in place of one. ``~`` is expanded when it is read, so that all later steps see one path."""


class Section(BaseModel):
    """A closed group of settings.

    A field declared with ``json_schema_extra=NOT_IDENTITY`` is left out of :meth:`identity`. One declared with
    ``json_schema_extra={"neutral": value}`` is left out while it equals ``value``.
    """

    plugin: ClassVar[tuple[str, str] | None] = None
    """Kind of plugin that the section configures, and the field with its name; None for most sections."""
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide the result, as plain JSON data."""
        return _identity(self)


def _identity(value: Any) -> Any:
    # Most values are plain. They come first because `isinstance` is slow with pydantic's models.
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Section):
        return {
            name: identity
            for name, neutral in _decisive(type(value))
            if (identity := _identity(getattr(value, name))) != neutral
        }
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, (list, tuple)):
        return [_identity(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _identity(item) for key, item in value.items()}
    return value


@cache
def _decisive(section: type[Section]) -> list[tuple[str, Any]]:
    """Return the fields that decide the result, each with its neutral value. Cached: a status calls it 2,000 times."""
    extras = [(name, field.json_schema_extra) for name, field in section.model_fields.items()]
    known = [(name, extra if isinstance(extra, dict) else {}) for name, extra in extras]
    return [(name, extra.get("neutral", _NO_VALUE)) for name, extra in known if extra.get("identity", True)]


def written(section: Section, *names: str) -> list[str]:
    """Return the fields among ``names`` that were set explicitly, in the order of ``names``."""
    unknown = [name for name in names if name not in type(section).model_fields]
    assert not unknown, f"{type(section).__name__} has no field {', '.join(unknown)}"
    return [name for name in names if name in section.model_fields_set]


def as_read(value: Kept) -> Kept:
    """Return settings as canonical JSON gives them back: with the keys of tables sorted.

    Returns ``value`` itself if all its keys are sorted already.
    """
    found: Any = value
    if isinstance(value, Section):
        fields = ((name, getattr(value, name)) for name in type(value).model_fields)
        changed = {name: after for name, before in fields if (after := as_read(before)) is not before}
        return value.model_copy(update=changed) if changed else value
    if isinstance(value, dict):
        after = {name: as_read(value[name]) for name in sorted(value)}
        same = [*after] == [*value] and all(after[name] is value[name] for name in after)
        found = value if same else after
    elif isinstance(value, (list, tuple)):
        items = [as_read(item) for item in value]
        same = all(after is before for after, before in zip(items, value, strict=True))
        found = value if same else type(value)(items)
    return found


def _default(field: FieldInfo) -> Any:
    """Return the default of a field; ``_NO_VALUE`` if it has none, or if the default depends on other fields."""
    if field.is_required() or field.default_factory_takes_validated_data:
        return _NO_VALUE
    return field.get_default(call_default_factory=True)


def as_written(value: Any) -> Any:
    """Return settings as a recipe would write them, as plain JSON data: without settings at their defaults."""
    if isinstance(value, Section):
        key = value.plugin[1] if value.plugin else ""
        fields = ((name, field, getattr(value, name)) for name, field in type(value).model_fields.items())
        return {
            name: as_written(found)
            for name, field, found in fields
            if found != _default(field) or (name == key and found is not None)
        }
    if isinstance(value, dict):
        return {str(name): as_written(found) for name, found in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_written(found) for found in value]
    return to_jsonable_python(value)


def plugin_options(base: type[Section]) -> BeforeValidator:
    """Return a validator that builds the ``Options``, a subclass of ``base``, of the plugin that a table names.

    The validator raises :class:`ConfigError` for an unknown name and for a plugin whose ``Options`` do not fit.
    """
    kind, key = base.plugin or ("", "")

    def validate(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if key not in value:
            raise ValueError(f"needs `{key}`; known: {', '.join(plugins.known(kind))}")
        name = str(value[key])
        module = plugins.load(kind, name)
        options = module.Options
        if not (isinstance(options, type) and issubclass(options, base)):
            raise ConfigError(f"{module.__file__}: Options must be a subclass of {base.__name__}")
        if (found := options.model_fields[key].annotation) != Literal[name]:
            expected = f"Options.{key} must be Literal[{name!r}]"
            raise ConfigError(f"{module.__file__}: {expected}, found {found}")
        return options.model_validate_json(json.dumps(value), strict=True)

    return BeforeValidator(validate)
