"""Results of requests as JSON: as cosmos-rl's service has them, and the scorer that they are from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cosmos_rl_core.rewards._answers import brief, finite
from cosmos_rl_core.rewards._facts import Facts

MAX_NAMED = 3
"""Number of samples without scores that a message names."""


@dataclass(frozen=True)
class Identity:
    """The scorer of a result."""

    name: str
    version: str
    digest: str

    def as_json(self) -> dict[str, str]:
        """Return the identity as plain JSON data."""
        return {"name": self.name, "version": self.version, "digest": self.digest}


def failed(kind: str, error: str, identity: Identity, errors: Sequence[str | None] | None = None) -> dict[str, Any]:
    """Return the result of a reward without scores; ``errors`` has the reason of each sample, None for no fault."""
    told: dict[str, Any] = {"error": error, "scores": None}
    if errors is not None:
        told["errors"] = list(errors)
    return told | {"duration": "0.00", "decoded_duration": "N/A", "type": kind, "scorer": identity.as_json()}


def scored(
    kind: str, answer: Mapping[str, Any], count: int, facts: Facts, identity: Identity, decoded_s: float = 0.0
) -> dict[str, Any]:
    """Return the result of a process's answer. Without a score for each sample it is a failure that says why."""
    if "error" in answer:
        return failed(kind, brief(answer["error"]), identity)
    given = answer.get("entries")
    if not isinstance(given, list) or len(given) != count:
        return failed(kind, f"the scorer answered {brief(given)} for {count} samples", identity)
    names = _names(given, facts)
    errors = [_fault(entry, names, facts) for entry in given]
    if any(error is not None for error in errors):
        named = [f"sample {i}: {error}" for i, error in enumerate(errors) if error is not None]
        more = [f"and {len(named) - MAX_NAMED} more"] if len(named) > MAX_NAMED else []
        text = f"{len(named)} of {count} samples have no score: {'; '.join([*named[:MAX_NAMED], *more])}"
        return failed(kind, text, identity, errors)
    return {
        "scores": {facts.wire.get(name, name): [_value(e["scores"].get(name)) for e in given] for name in names},
        "input_info": answer.get("input"),
        "duration": f"{answer.get('seconds', 0.0):.2f}",
        "decoded_duration": f"{decoded_s:.2f}",
        "type": kind,
        "scorer": identity.as_json(),
    }


def _names(given: Sequence[Any], facts: Facts) -> list[str]:
    """Return the names of all scores: those that the plugin declares, then others in their order."""
    others = (name for entry in given if isinstance(entry, dict) for name in entry.get("scores") or {})
    return list(dict.fromkeys([*facts.scores, *others]))


def _fault(entry: Any, names: Sequence[str], facts: Facts) -> str | None:
    """Return why a sample has no scores, or None."""
    if not isinstance(entry, dict) or not isinstance(entry.get("scores"), dict):
        error = entry.get("error") if isinstance(entry, dict) else entry
        return brief(error) or "no reason"
    scores = entry["scores"]
    for name in names:
        value = scores.get(name)
        if name in facts.scores or not facts.scores:
            if finite(value) is None and not (name not in facts.scores and isinstance(value, str)):
                return f"the score {name!r} is {'missing' if value is None else brief(value)}"
        elif isinstance(value, float) and finite(value) is None:
            return f"the score {name!r} is {value}"
    return None


def _value(value: Any) -> Any:
    number = finite(value)
    return value if number is None else number


def pushed(kind: str, told: Mapping[str, Any], count: int | None, identity: Identity) -> dict[str, Any]:
    """Return the result that a process pushed, under an identity of its own.

    Raises ``ValueError`` unless it has a list of scores for each name, or an error.
    """
    if told.get("error"):
        return failed(kind, brief(told["error"]), identity)
    scores = told.get("scores")
    if not isinstance(scores, dict) or not scores:
        raise ValueError("expected an object of lists under `scores`, or a text under `error`")
    for name, values in scores.items():
        if not isinstance(values, list) or (count is not None and len(values) != count):
            raise ValueError(f"the scores {name!r}: expected a list with a value for each sample")
        if any(isinstance(value, float) and finite(value) is None for value in values):
            raise ValueError(f"the scores {name!r} have a number that is not finite")
    kept = {name: told[name] for name in ("input_info", "duration", "decoded_duration") if name in told}
    return {"scores": scores, **kept, "type": kind, "scorer": identity.as_json()}
