"""Pictures of the same samples in two runs, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flows.comparing.side import Side, shared
from stages.artifacts.slots import current_of, input_of
from stages.reporting.book import Piece
from stages.reporting.excerpt import Picture
from stages.reporting.samples import Samples

CHOSEN = ("fixed", "typical")
"""Reasons for which fragments have samples of evaluated policies and of rollouts, whatever the scores."""


@dataclass(frozen=True)
class Pair:
    """One sample in both runs."""

    prompt: str
    before: Picture | None
    """Picture by policy 0, if both runs began with equal pictures."""
    a: Picture
    b: Picture
    apart: float | None
    """Mean difference of the pixels in levels of 255; None if one picture has no pixels or another size."""

    @property
    def seeds(self) -> str:
        """Return the seed of the noise, or both seeds if they differ."""
        return str(self.a.seed) if self.a.seed == self.b.seed else f"{self.a.seed}, {self.b.seed}"


@dataclass(frozen=True)
class Pictures:
    """The same samples of both runs, of one iteration or policy version."""

    where: str
    """Name of the place, such as ``policy 6`` or ``iteration 5``."""
    pieces: tuple[Piece, Piece]
    """The fragments that have the samples."""
    pairs: Sequence[Pair]

    @property
    def words(self) -> str:
        """Return in one sentence how far pictures are apart."""
        known = [pair.apart for pair in self.pairs if pair.apart is not None]
        if not known:
            return f"{len(self.pairs)} samples of {self.where}, whose pixels are not kept"
        equal = sum(gap == 0 for gap in known)
        levels = f"pixels differ by {np.mean(known):.3g} of 255 levels on average"
        return f"{equal} of {len(known)} fixed samples of {self.where} have equal pictures; {levels}"


def pictures(a: Side, b: Side) -> Pictures | None:
    """Return the fixed samples of the newest trained policy that both runs judged, or else of the newest rollout of
    both, or else of policy 0.

    Samples belong together if prompt and place in the group are equal. None if the runs share no sample.
    """
    judged = shared(a.collected.judged, b.collected.judged)
    sampled = shared(a.collected.iterations, b.collected.iterations)
    places = [("policy", k) for k in sorted(judged, reverse=True) if k]
    places += [("iteration", k) for k in sorted(sampled, reverse=True)]
    for word, k in [*places, *(("policy", k) for k in judged if not k)]:
        both = judged[k] if word == "policy" else sampled[k]
        if ids := _in_both(*both):
            first = judged.get(0) if word == "policy" and k else None
            pixels = [_pixels(one, word, k, ids) for one in (a, b)]
            return Pictures(f"{word} {k}", both, [_pair(one, both, first, pixels) for one in ids])
    return None


def _in_both(a: Piece, b: Piece) -> list[str]:
    chosen = [sample for why in CHOSEN for sample in a.excerpt.shown.get(why, ())]
    return [one for one in chosen if one in a.excerpt.pictures and one in b.excerpt.pictures]


def _pair(
    sample: str,
    both: tuple[Piece, Piece],
    first: tuple[Piece, Piece] | None,
    pixels: Sequence[dict[str, np.ndarray]],
) -> Pair:
    a, b = (piece.excerpt.pictures[sample] for piece in both)
    before = [piece.excerpt.pictures.get(sample) for piece in first or ()]
    same = None not in before and len({one.thumb for one in before if one is not None}) == 1
    return Pair(a.prompt, before[0] if same else None, a, b, _apart(pixels[0].get(sample), pixels[1].get(sample)))


def _apart(a: np.ndarray | None, b: np.ndarray | None) -> float | None:
    if a is None or b is None or a.shape != b.shape:
        return None
    return float(np.abs(a.astype("float32") - b.astype("float32")).mean())


def _pixels(side: Side, word: str, k: int, ids: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the pixels by sample id, for the samples that still have any."""
    slots = side.run.slots
    slot = slots.version(k, "evaluate") if word == "policy" else slots.iteration(k, "rollout")
    if current_of(slot)[1] is None:
        return {}
    stored = Samples.read(input_of(slot), None).load(ids)
    return {sample.sample_id: sample.pixels for sample in stored if sample.finite and sample.media}
