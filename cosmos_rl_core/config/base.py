"""The base of every configuration section: closed, frozen, without NaN, and with an exact identity."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

NOT_IDENTITY: dict[str, Any] = {"identity": False}
"""``json_schema_extra`` of a field that decides where or how a run computes, not its result."""


class Section(BaseModel):
    """A closed group of settings.

    A field declared with ``json_schema_extra=NOT_IDENTITY`` is left out of :meth:`identity`. One declared with
    ``json_schema_extra={"neutral": value}`` is left out while it equals ``value``.
    """

    plugin: ClassVar[tuple[str, str] | None] = None
    """Kind of the plugin that a section's settings are for, and the field that holds its name; None for most."""
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result, as plain JSON data."""
        return _identity(self)


def _identity(value: Any) -> Any:
    if isinstance(value, Section):
        return {
            name: _identity(getattr(value, name))
            for name, field in type(value).model_fields.items()
            if _counts(field.json_schema_extra, getattr(value, name))
        }
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, (list, tuple)):
        return [_identity(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _identity(item) for key, item in value.items()}
    return value


def _counts(extra: Any, value: Any) -> bool:
    if not isinstance(extra, dict):
        return True
    return extra.get("identity", True) and not ("neutral" in extra and _identity(value) == extra["neutral"])


def written(section: Section, *names: str) -> list[str]:
    """Return which of the fields were set by whoever made ``section``, in the order of ``names``."""
    return [name for name in names if name in section.model_fields_set]
