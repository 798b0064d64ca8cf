"""Contents of ``fragment.json``: all that a report shows of one iteration or of one judged policy version."""

import json
from collections.abc import Sequence
from typing import Any, Self

from cosmos_rl_core.canonical import canonical_json
from cosmos_rl_core.config.base import Section
from cosmos_rl_core.rewards._answers import finite
from stages.artifacts.records import parsed
from stages.scoring.spreads import Spread

QUANTILES = 32
"""Parts of equal size that the sorted scores are cut into. Their ends are enough to draw a distribution."""


HELD_OUT_LOSS = "held-out loss"
"""Name of the change of the held-out loss among those of rewards."""


class Score(Section):
    """One score of a reward over all samples."""

    reward: str
    score: str
    """Its name: that of the reward, or of another number that it gives."""
    n: int
    mean: float | None
    deviation: float | None
    error: float | None
    """Standard error over samples."""
    prompt_error: float | None
    """Standard error over the means of prompts, whose samples are alike."""
    quantiles: tuple[float, ...] = ()
    """The least score, the ends of parts of equal size, the greatest score."""

    @classmethod
    def of(cls, reward: str, score: str, values: Any, prompts: Any) -> Self:
        """Return the numbers of a Series of finite scores of samples of these prompts."""
        spread = Spread.of(values, prompts)
        ends = [place / QUANTILES for place in range(QUANTILES + 1)]
        return cls(
            reward=reward,
            score=score,
            n=spread.n,
            mean=finite(spread.mean),
            deviation=finite(spread.deviation),
            error=finite(float(values.sem())) if spread.n else None,
            prompt_error=finite(spread.error),
            quantiles=tuple(float(f"{value:.6g}") for value in values.quantile(ends)) if spread.n else (),
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
    """Samples without a score, or held back, for one reason."""

    what: str
    """``not finite``, ``no score``, or ``gated``."""
    reward: str
    reason: str
    count: int


class Picture(Section):
    """One sample with its picture."""

    sample: str
    prompt: str
    seed: int
    score: float | None
    """The headline reward."""
    others: dict[str, float] = {}
    """The other rewards."""
    error: str = ""
    """Why it has no score."""
    thumb: str = ""
    """A small picture as a data URI: three frames of a video side by side."""
    full: str = ""
    """Name of the file of the fragment in full size; a video ends with ``.mp4``."""
    missing: str = ""
    """Why there is no picture."""
    width: int = 0
    height: int = 0
    """Of the small picture."""

    @property
    def is_video(self) -> bool:
        """Return whether the full size is a video."""
        return self.full.endswith(".mp4")


class Tripped(Section):
    """A limit of early warning that was exceeded."""

    words: str
    reward: str
    score: str
    samples: tuple[str, ...]
    """The samples that exceed it most."""


class Change(Section):
    """The change of a number since version 0, sample by sample or item by item."""

    of: str
    mean: float | None
    error: float | None
    """Standard error: over the means of prompts for a reward, over items for the loss."""
    n: int
    better: int
    """Samples whose number rose."""
    worse: int
    """Samples whose number fell."""


class Loss(Section):
    """The diffusion loss on held-out media, over items; None if that of an item is not finite."""

    mean: float | None
    error: float | None
    n: int


class Question(Section):
    """A held-out question to a VLM, with a small picture of what it is about."""

    number: int
    """Of the conversation in its dataset of tokens."""
    fixed: bool
    """Whether it is shown at every judged policy version. Others are shown because the answer is wrong."""
    text: str
    thumb: str = ""
    """A data URI: three frames of a video side by side; "" without a picture."""
    width: int = 0
    height: int = 0


class Excerpt(Section):
    """Everything that a report shows of one iteration or of one judged policy version."""

    k: int
    """The iteration, or the policy version."""
    samples: int = 0
    prompts: int = 0
    scored: int = 0
    """Samples with a headline reward."""
    alike: int = 0
    """Prompts whose samples all have the same headline reward, from which nothing is learned."""
    scores: tuple[Score, ...] = ()
    by_prompt: tuple[PromptScore, ...] = ()
    failures: tuple[Failure, ...] = ()
    tripped: tuple[Tripped, ...] = ()
    pictures: dict[str, Picture] = {}
    first: dict[str, Picture] = {}
    """The same samples of version 0, of those that changed most."""
    shown: dict[str, tuple[str, ...]] = {}
    """Why samples are shown: ``fixed``, ``typical``, ``best``, ``worst``, ``widest``, ``failed``, ``tripped``,
    ``improved`` or ``worsened``, each with their ids in order."""
    changes: tuple[Change, ...] = ()
    """Since version 0, of each reward and of the held-out loss."""
    loss: Loss | None = None

    @classmethod
    def read(cls, data: bytes, url: str) -> Self:
        """Return the excerpt of a file's bytes. Raises :class:`ArtifactError` if they are of another version."""
        return parsed(cls, json.loads(data), url)

    def encode(self) -> bytes:
        """Return the file's bytes."""
        return canonical_json(self.model_dump(mode="json"))

    def score(self, reward: str, score: str | None = None) -> Score | None:
        """Return a score by its names; None if the iteration has none."""
        name = reward if score is None else score
        return next((one for one in self.scores if (one.reward, one.score) == (reward, name)), None)

    def chosen(self, why: str) -> Sequence[Picture]:
        """Return the samples that are shown for a reason, in order."""
        return [self.pictures[one] for one in self.shown.get(why, ()) if one in self.pictures]
