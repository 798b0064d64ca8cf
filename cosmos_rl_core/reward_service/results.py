"""Results of requests as JSON: the fields of cosmos-rl's service, and the scorer that computed them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.rewards._base.answers import brief, finite

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


def failed(
    kind: str,
    error: str,
    identity: Identity,
    answer: Mapping[str, Any] = MappingProxyType({}),
    errors: Sequence[str | None] | None = None,
) -> dict[str, Any]:
    """Return the result of a reward that could not be scored. ``errors`` has an entry a sample: its error, or None.

    ``answer`` is the answer of a process, if there is one; it has facts about the samples, and seconds.
    """
    told: dict[str, Any] = {"error": error, "scores": None}
    if errors is not None:
        told["errors"] = list(errors)
    return told | {
        "input_info": answer.get("input") or {},
        "duration": _seconds(answer),
        "decoded_duration": "N/A",
        "type": kind,
        "scorer": identity.as_json(),
    }


def scored(
    kind: str, answer: Mapping[str, Any], count: int, options: RewardOptions, identity: Identity, decoded_s: float = 0.0
) -> dict[str, Any]:
    """Return the result made of a process's answer. If a sample has no score, it is a failure that says why.

    The score is the one with the options' label. Any other number that is absent or not finite is null.
    """
    if "error" in answer:
        return failed(kind, brief(answer["error"]), identity, answer)
    given = answer.get("entries")
    if not isinstance(given, list) or len(given) != count:
        return failed(kind, f"the scorer answered {brief(given)} for {count} samples", identity, answer)
    errors = [_fault(entry, options.label) for entry in given]
    if any(error is not None for error in errors):
        named = [f"sample {i}: {error}" for i, error in enumerate(errors) if error is not None]
        more = [f"and {len(named) - MAX_NAMED} more"] if len(named) > MAX_NAMED else []
        text = f"{len(named)} of {count} samples have no score: {'; '.join([*named[:MAX_NAMED], *more])}"
        return failed(kind, text, identity, answer, errors)
    wire, rows = options.facts.wire, [entry["scores"] for entry in given]
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        "scores": {wire.get(name, name): [_value(row.get(name)) for row in rows] for name in names},
        "input_info": answer.get("input"),
        "duration": _seconds(answer),
        "decoded_duration": f"{decoded_s:.2f}",
        "type": kind,
        "scorer": identity.as_json(),
    }


def _seconds(answer: Mapping[str, Any]) -> str:
    return f"{answer.get('seconds', 0.0):.2f}"


def _fault(entry: Any, label: str) -> str | None:
    """Return why a sample has no score, or None."""
    if not isinstance(entry, dict) or not isinstance(entry.get("scores"), dict):
        error = entry.get("error") if isinstance(entry, dict) else entry
        return brief(error) or "no reason"
    if label not in entry["scores"]:
        return f"no score named {label!r} among {brief(sorted(entry['scores']))}"
    value = entry["scores"][label]
    return None if finite(value) is not None else f"the score {label!r} is {brief(value)}, expected a finite number"


def _value(value: Any) -> Any:
    """Return a number that is finite, a text or a truth value; None for any other number."""
    number = finite(value)
    return number if number is not None or isinstance(value, float) else value


def pushed(kind: str, told: Mapping[str, Any], count: int | None, identity: Identity) -> dict[str, Any]:
    """Return the result made of ``told``, which another process pushed. ``identity`` is what names its scorer.

    Raises ``ValueError`` unless it has a list of finite scores for each name, or an error.
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
