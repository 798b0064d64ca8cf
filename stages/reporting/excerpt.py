"""Contents of ``fragment.json``: all that a report shows of one iteration or of one evaluated policy version."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from cosmos_rl_core.canonical import canonical_json
from cosmos_rl_core.config.base import Section
from cosmos_rl_core.estimates.estimate import Estimate
from cosmos_rl_core.rewards._base.answers import finite
from stages.artifacts.records import parsed
from stages.scoring.summaries import Spread

QUANTILES = 32
"""Number of equal parts that the sorted scores are cut into. The ends of the parts suffice to draw a distribution."""


HELD_OUT_LOSS = "held-out loss"
"""Name of the change of the held-out loss among the rewards' changes."""


class Score(Section):
    """One score of a reward over all samples."""

    reward: str
    score: str
    """Name of the score: the name of the reward, or of another number that it gives."""
    n: int
    mean: float | None
    deviation: float | None
    error: float | None
    """Standard error over prompts, whose samples are correlated; for answers, over conversations."""
    clusters: int
    """Number of prompts or conversations."""
    quantiles: tuple[float, ...] = ()
    """The least score, the ends of the equal parts between, and the greatest score."""

    @classmethod
    def of(cls, reward: str, score: str, values: Any, prompts: Any) -> Self:
        """Return the numbers of a score. ``values`` (finite) and ``prompts`` are Series with one entry per sample."""
        spread = Spread.of(values, prompts)
        ends = [place / QUANTILES for place in range(QUANTILES + 1)]
        return cls(
            reward=reward,
            score=score,
            n=spread.estimate.n,
            mean=finite(spread.mean),
            deviation=finite(spread.deviation),
            error=finite(spread.estimate.error),
            clusters=spread.estimate.clusters,
            quantiles=tuple(float(f"{value:.6g}") for value in values.quantile(ends)) if len(values) else (),
        )

    @property
    def name(self) -> str:
        """Return the name for people."""
        return self.reward if self.score == self.reward else f"{self.reward}: {self.score}"


class PromptScore(Section):
    """The mean of the headline reward over the samples of a prompt."""

    prompt_id: str
    prompt: str
    mean: float
    n: int


class Failure(Section):
    """Samples that have no score, samples that gates held back, or answers that were cut off, for one reason."""

    what: str
    """``not finite``, ``refused``, ``no score``, ``gated``, or ``answer``."""
    reward: str
    reason: str
    count: int


class Picture(Section):
    """One sample with its picture."""

    sample: str
    prompt: str
    seed: int
    score: float | None
    """Score of the headline reward."""
    others: dict[str, float] = {}
    """Scores of all rewards and the weighted sum, by label."""
    error: str = ""
    """Why the sample has no score."""
    thumb: str = ""
    """A small picture as a data URI: three frames of a video side by side."""
    full: str = ""
    """Name of the fragment's file with the picture in full size; it ends with ``.mp4`` for a video."""
    missing: str = ""
    """Why there is no picture."""
    width: int = 0
    height: int = 0
    """Height of the small picture in pixels, as ``width`` is its width."""
    references: tuple[str, ...] = ()
    """Digests of the pictures that its prompt refers to, in order."""

    @property
    def is_video(self) -> bool:
        """Return whether the full picture is a video."""
        return self.full.endswith(".mp4")


class Tripped(Section):
    """A limit of early warning that was exceeded."""

    words: str
    reward: str
    score: str
    samples: tuple[str, ...]
    """The samples that exceed it most."""


class Change(Section):
    """The change of a number since version 0: the difference of both means."""

    of: str
    mean: float | None
    error: float | None
    """Standard error of the difference, paired by prompt, medium or conversation."""
    n: int
    clusters: int
    """Number of prompts, media or conversations."""
    better: int
    """Number of samples whose value rose."""
    worse: int
    """Number of samples whose value fell."""

    @classmethod
    def of_both(cls, of: str, change: Estimate, rises: Any) -> Self:
        """Return a change. ``rises`` is a Series: the rise of each sample or item that both versions have."""
        counts = {"better": int((rises > 0).sum()), "worse": int((rises < 0).sum())}
        return cls(of=of, **_numbers(change), **counts)


class Loss(Section):
    """The loss on held-out data, over items; its mean is None if the loss of an item is not finite."""

    mean: float | None
    error: float | None
    """Standard error over media or conversations."""
    n: int
    clusters: int
    """Number of media or conversations."""

    @classmethod
    def of(cls, estimate: Estimate) -> Self:
        """Return the loss of an estimate."""
        return cls(**_numbers(estimate))


def _numbers(estimate: Estimate) -> dict[str, Any]:
    numbers = {"mean": finite(estimate.mean), "error": finite(estimate.error)}
    return numbers | {"n": estimate.n, "clusters": estimate.clusters}


class Question(Section):
    """A held-out question, with a small picture of its subject."""

    number: int
    """Number of the conversation in its dataset of tokens."""
    fixed: bool
    """Whether it is shown at every judged policy version. Other questions are shown because their answers are wrong."""
    text: str
    thumb: str = ""
    """A data URI: three frames of a video side by side; "" without a picture."""
    width: int = 0
    height: int = 0


@dataclass(frozen=True)
class Answered:
    """An answer to a question that is shown."""

    question: Question
    source: str
    """Name of its dataset."""
    expected: str
    answer: str
    correct: bool
    whole: bool
    """Whether the policy ended the answer; False if ``max_new_tokens`` cut it off."""
    first: str | None
    """The answer of version 0; None if this is version 0's."""


class Excerpt(Section):
    """Everything that a report shows of one iteration or of one evaluated policy version."""

    k: int
    """The iteration, or the policy version."""
    samples: int = 0
    prompts: int = 0
    scored: int = 0
    """Number of samples with a headline reward."""
    alike: int = 0
    """Number of prompts whose samples all have the same headline reward, so that nothing is learned from them."""
    scores: tuple[Score, ...] = ()
    by_prompt: tuple[PromptScore, ...] = ()
    failures: tuple[Failure, ...] = ()
    tripped: tuple[Tripped, ...] = ()
    undecided: int = 0
    """Number of limits on drift that were not judged, because there are too few prompts."""
    pictures: dict[str, Picture] = {}
    first: dict[str, Picture] = {}
    """Pictures that version 0 made of the samples that changed most, by sample id."""
    shown: dict[str, tuple[str, ...]] = {}
    """Ids of the shown samples, in order, by the reason why they are shown: ``fixed``, ``typical``, ``best``,
    ``worst``, ``widest``, ``failed``, ``tripped``, ``improved`` or ``worsened``."""
    changes: tuple[Change, ...] = ()
    """Changes of each reward and of the held-out loss since version 0."""
    loss: Loss | None = None

    @classmethod
    def read(cls, data: bytes, url: str) -> Self:
        """Return the excerpt in a file's bytes, of any version. Raises :class:`ArtifactError` if they hold none."""
        return parsed(cls, _today(json.loads(data)), url)

    def encode(self) -> bytes:
        """Return the file's bytes."""
        found = self.model_dump(mode="json")
        for picture in (*found["pictures"].values(), *found["first"].values()):
            if not picture["references"]:
                del picture["references"]
        return canonical_json(found)

    def score(self, reward: str, score: str | None = None) -> Score | None:
        """Return a score by its names; None if the iteration has none."""
        name = reward if score is None else score
        return next((one for one in self.scores if (one.reward, one.score) == (reward, name)), None)

    def chosen(self, why: str) -> Sequence[Picture]:
        """Return the samples that are shown for a reason, in order."""
        return [self.pictures[one] for one in self.shown.get(why, ()) if one in self.pictures]


def _today(found: Any) -> Any:
    """Return the values of an excerpt as this version writes them.

    Versions 1 and 2 had two errors, over samples and over prompts, which were equal for a single prompt; and they did
    not count prompts and media.
    """
    if not isinstance(found, dict):
        return found
    prompts = found.get("prompts", 0)
    for score in found.get("scores", ()):
        if "prompt_error" in score:
            error = score.pop("prompt_error")
            score |= {"error": error if prompts > 1 else None, "clusters": prompts}
    for one in (*found.get("changes", ()), *filter(None, [found.get("loss")])):
        if "clusters" not in one:
            of_media = one.get("of", HELD_OUT_LOSS) == HELD_OUT_LOSS
            one["clusters"] = one.get("n", 0) if of_media else prompts
            one |= {} if one["clusters"] > 1 else {"error": None}
    return found
