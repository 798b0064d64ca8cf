"""Scorers behind a reward service: who they are, and that a run keeps to one of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._base.answers import brief

FORMAT = 1
"""Format of what services tell of their scorers."""


@dataclass(frozen=True)
class ServedScorer:
    """A scorer of a service, as the service names it."""

    name: str
    version: str
    digest: str
    """Digest of the plugin, its settings, its version and its weights."""
    metadata: bool = field(default=False, compare=False)
    """Whether frames for it may have the metadata of prompts."""
    references: str | None = field(default=None, compare=False)
    """Whether references of prompts are ``ignored``, ``taken`` or ``needed``. None if it does not tell, so that frames
    may have none."""

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
    """Another scorer than the one that a run began with."""

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
    """Return why a service does not know a scorer's digest yet, "" for no reason; None if it knows or has none."""
    one = (told or {}).get(name)
    if not isinstance(one, Mapping) or one.get("digest") != "":
        return None
    return brief(one.get("error", ""))


def named(told: Mapping[str, Any] | None, name: str) -> ServedScorer | None:
    """Return the scorer with a name from what a service tells of its scorers; None if it tells nothing.

    Raises :class:`ConfigError` if it tells of others only.
    """
    if told is None:
        return None
    if (found := ServedScorer.of(name, told.get(name))) is None:
        raise ConfigError(f"the reward service has no {name!r}; known: {', '.join(sorted(told)) or 'none'}")
    return found
