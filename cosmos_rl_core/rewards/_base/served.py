"""Scorers behind a reward service: their identity, and the error if a scorer changes during a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._base.answers import brief

FORMAT = 1
"""Version of the format in which services describe their scorers."""


@dataclass(frozen=True)
class ServedScorer:
    """A scorer of a service, as the service names it."""

    name: str
    version: str
    digest: str
    """Digest of the plugin, its settings, its version and its weights."""
    metadata: bool = field(default=False, compare=False)
    """Whether requests to this scorer may have the metadata of prompts."""
    references: str | None = field(default=None, compare=False)
    """Use of the prompts' references: ``ignored``, ``taken`` or ``needed``. None if the service does not tell; requests
    to it then have no references."""

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({self.digest[:12]})"

    @classmethod
    def of(cls, name: str, told: Any) -> "ServedScorer | None":
        """Return the scorer that a service describes; None if ``told`` describes none."""
        if not isinstance(told, Mapping) or not isinstance(digest := told.get("digest"), str) or not digest:
            return None
        uses = told.get("references")
        references = uses if isinstance(uses, str) else None
        return cls(name, brief(told.get("version", "")), digest, told.get("metadata") is True, references)


class ScorerChangedError(ConfigError):
    """A service has another scorer than the one that the run began with."""

    @classmethod
    def of(cls, name: str, pinned: ServedScorer | None, found: ServedScorer | None) -> "ScorerChangedError":
        """Return the error that names both scorers."""
        before, now = (str(one) if one else "a service that names no scorer" for one in (pinned, found))
        return cls(
            f"{name} changed: this run was scored by {before}, now it is {now}. Scores of two scorers cannot be "
            "compared. Give the service the first one back, or go on with --accept-scorer: what is scored stays, and "
            "the rest is scored by the new one"
        )


def why_loading(told: Mapping[str, Any] | None, name: str) -> str | None:
    """Return why a service has not loaded a scorer yet, "" if it gives no reason.

    None if the scorer is loaded or the service has no such scorer. ``told`` has the service's descriptions by name.
    """
    one = (told or {}).get(name)
    if not isinstance(one, Mapping) or one.get("digest") != "":
        return None
    return brief(one.get("error", ""))


def named(told: Mapping[str, Any] | None, name: str) -> ServedScorer | None:
    """Return the scorer with a name from a service's descriptions of its scorers; None if there are none.

    Raises :class:`ConfigError` if the service describes other scorers only.
    """
    if told is None:
        return None
    if (found := ServedScorer.of(name, told.get(name))) is None:
        raise ConfigError(f"the reward service has no {name!r}; known: {', '.join(sorted(told)) or 'none'}")
    return found
