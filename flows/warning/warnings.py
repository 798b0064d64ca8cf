"""The warnings of a run: the limits that tripped in an iteration, and the decisions on them."""

from dataclasses import dataclass
from typing import Any, Self

from cosmos_rl_core.canonical import from_json
from cosmos_rl_core.storage import store
from flows.warning.decisions import Decision, decisions_on
from stages.artifacts.files import read_entry
from stages.artifacts.manifest import Manifest
from stages.contracts import Warn
from stages.reporting.numbers import words

SHOWN = 12
"""Characters of a digest that are printed."""


@dataclass(frozen=True)
class Warned:
    """An iteration whose scores exceed a limit."""

    manifest: Manifest
    rows: list[dict[str, Any]]
    """Rows of the evidence, one for each limit that tripped."""
    decisions: list[Decision]

    @classmethod
    def of(cls, manifest: Manifest) -> Self | None:
        """Return the warning that an artifact of the stage ``warn`` holds; None if no limit tripped."""
        if not manifest.summary.get("tripped"):
            return None
        evidence = from_json(read_entry(manifest.slot, manifest.files[Warn.EVIDENCE]))
        return cls(manifest, evidence["tripped"], decisions_on(manifest))

    @property
    def k(self) -> int:
        """Return the iteration."""
        return self.manifest.iteration or 0

    @property
    def tripped(self) -> tuple[str, ...]:
        """Return a sentence for each limit that tripped."""
        return tuple(map(words, self.rows))

    @property
    def decision(self) -> Decision | None:
        """Return the decision that counts; None without any."""
        return self.decisions[-1] if self.decisions else None

    @property
    def waits(self) -> bool:
        """Return whether the run waits until a person approves the warning."""
        return self.decision is not None and self.decision.word == "suspended"

    @property
    def evidence(self) -> str:
        """Return the digest that decisions name."""
        return self.manifest.content

    @property
    def page(self) -> str:
        """Return the URL of the page with the samples."""
        return store.join(self.manifest.slot, self.manifest.files[Warn.PAGE].path)

    def lines(self) -> list[str]:
        """Return the lines to print."""
        said = "nothing was decided yet" if self.decision is None else str(self.decision)
        return [
            *(f"iteration {self.k}: {sentence}" for sentence in self.tripped),
            f"  evidence {self.evidence[:SHOWN]}, {said}",
            f"  samples: {self.page}",
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the warning for scripts."""
        return {
            "iteration": self.k,
            "tripped": self.rows,
            "evidence": self.evidence,
            "page": self.page,
            "decisions": [decision.model_dump(mode="json", exclude={"place"}) for decision in self.decisions],
        }
