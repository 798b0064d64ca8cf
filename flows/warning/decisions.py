"""Decisions on warnings: who let a run continue, or ended it, on which evidence, when and why.

They are sealed files next to the warning, ``<slot of warn>/decisions/<digest of the evidence>/0001.json``. No file
is ever changed or removed; of several decisions on the same evidence, the last one counts.
"""

import getpass
import itertools
import socket
import time
from typing import Literal, Self

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import RESTORE, unseal
from stages.artifacts.manifest import Manifest
from stages.artifacts.records import Sealed, parsed, place_of

DECISIONS = "decisions"
"""Folder of a warning's slot with the decisions on it."""
Word = Literal["marked", "suspended", "stopped", "approved"]
"""``marked`` and ``approved``: the run goes on. ``suspended``: it waits for a person. ``stopped``: it has failed."""


class Decision(Sealed):
    """One decision."""

    kind = "decision"
    place: str
    """The slot of the warning, by :func:`place_of`."""
    evidence: str
    """Digest of the warning's content: the scores that were judged, the limits, and the limits that tripped."""
    number: int
    """Number of the decision on this evidence; 1 for the first."""
    word: Word
    tripped: tuple[str, ...]
    """Limits that tripped, in words."""
    by: str
    """Author of the decision: the recipe, a person or Prefect."""
    at: str
    """UTC time, such as ``2025-01-31T12:00:00Z``."""
    note: str = ""

    @classmethod
    def read(cls, slot: str, evidence: str, number: int) -> Self | None:
        """Read one decision; None if there is none. Raises :class:`ArtifactError` if it is damaged or misplaced."""
        url = _url(slot, evidence, number)
        data = store.read_if_exists(url)
        if data is None:
            return None
        found = parsed(cls, unseal(data, cls.kind, url), url)
        if (found.place, found.evidence, found.number) != (place_of(slot), evidence, number):
            raise ArtifactError(f"{url} was written for number {found.number} on other evidence; {RESTORE}")
        return found

    @property
    def lets_pass(self) -> bool:
        """Return whether the run goes on."""
        return self.word in ("marked", "approved")

    def __str__(self) -> str:
        note = f": {self.note}" if self.note else ""
        did = {"marked": "let the run go on", "approved": "approved it"}.get(self.word, f"{self.word} the run")
        return f"{self.by} {did} at {self.at}{note}"


def _url(slot: str, evidence: str, number: int) -> str:
    return store.join(slot, DECISIONS, evidence, f"{number:04d}.json")


def decisions_on(manifest: Manifest) -> list[Decision]:
    """Return the decisions on a warning's evidence, in order.

    Raises :class:`ArtifactError` if one is damaged, or missing although a later one is there.
    """
    slot, evidence = manifest.slot, manifest.content
    found: list[Decision] = []
    for number in itertools.count(1):
        decision = Decision.read(slot, evidence, number)
        if decision is None:
            if store.size(_url(slot, evidence, number + 1)) is not None:
                raise ArtifactError(f"{_url(slot, evidence, number)} is missing, but a later one is there; {RESTORE}")
            return found
        found.append(decision)
    raise AssertionError


def decide(manifest: Manifest, word: Word, tripped: tuple[str, ...], by: str, note: str = "") -> Decision:
    """Write the next decision on a warning's evidence, and return the decision that counts then.

    If another process has written the same word first, its decision counts.
    """
    while True:
        before = decisions_on(manifest)
        if before and before[-1].word == word:
            return before[-1]
        made = Decision(
            place=place_of(manifest.slot),
            evidence=manifest.content,
            number=len(before) + 1,
            word=word,
            tripped=tripped,
            by=by,
            at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            note=note,
        )
        if store.put_if_absent(_url(manifest.slot, manifest.content, made.number), made.sealed()):
            return made


def person() -> str:
    """Return the user and host of this command, such as ``anna@node1``."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a user without a name
        return f"somebody@{socket.gethostname()}"
